"""The one table from errors to HTTP."""

import json

import pytest

from gateway import errors
from streamrt.errors import BadRequest, Cancelled, Overloaded, StageFailed, StreamrtError, UnknownModel, tree


def made(cls: type[StreamrtError]) -> StreamrtError:
    return cls(404, "no") if cls is errors.Refused else cls("no")


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_every_class_of_the_tree_has_a_row_of_its_own(cls):
    assert cls in errors.TABLE


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_every_error_has_the_openai_body(cls):
    body = errors.body(made(cls))["error"]
    assert body["message"].startswith("no") or cls is Cancelled
    assert body["type"]
    assert body["code"]
    assert set(body) == {"message", "type", "param", "code"}
    assert 400 <= errors.status(made(cls)) < 600


def test_a_class_that_the_table_does_not_know_is_told_like_its_parent():
    class Odd(BadRequest):
        code = "odd"

    assert errors.status(Odd("no")) == 400
    assert errors.body(Odd("no"))["error"]["code"] == "odd"


def test_the_hint_and_the_field_reach_the_client():
    error = errors.body(UnknownModel("no such model", hint="try b", param="model"))["error"]
    assert error == {"message": "no such model (try b)", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}


def test_what_may_be_tried_again_says_when():
    response = errors.response(Overloaded("full", retry_after_s=7))
    assert (response.status, response.headers["Retry-After"]) == (429, "7")
    assert "Retry-After" not in errors.response(StageFailed("no")).headers


def test_a_refusal_for_want_of_a_key_says_how_to_show_one():
    response = errors.response(errors.Unauthorized("no key"))
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert json.loads(response.body)["error"]["code"] == "invalid_api_key"
