"""Bodies: what is accepted, and how a wrong one is told."""

import pytest

from gateway.schema import (
    NEUTRAL,
    ChatBody,
    CompletionBody,
    SpeechBody,
    TranscriptionForm,
    convert_form,
    decode,
    prompts,
    refuse_unsupported,
)
from gateway.speech import is_sayable
from streamrt.errors import BadRequest

ASK = b'"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", ""),
        (b"  \n", ""),
        (b"{", ""),
        (b"]", ""),
        (b"null", ""),
        (b"[]", ""),
        (b'"text"', ""),
        (b"\xff\xfe", ""),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),  # half a surrogate pair
        (b'{"messages": NaN}', ""),
        (b'{"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", ""),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": {}}', "messages"),
        (b'{"messages": [{"content": "hi"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "robot"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{%s, "temperature": 3}' % ASK, "temperature"),
        (b'{%s, "temperature": "hot"}' % ASK, "temperature"),
        (b'{%s, "max_tokens": 0}' % ASK, "max_tokens"),
        (b'{%s, "modalities": ["smell"]}' % ASK, "modalities[0]"),
        (b'{%s, "audio": {"format": "ogg"}}' % ASK, "audio.format"),
        (b'{%s, "stop": ["a", "b", "c", "d", "e"]}' % ASK, "stop"),
        (b'{%s, "top_j": 5}' % ASK, "top_j"),
        (b'{%s, "n": 0}' % ASK, "n"),
        (b'{%s, "top_logprobs": 21}' % ASK, "top_logprobs"),
        (b'{%s, "logit_bias": {"5": 101}}' % ASK, "logit_bias[...]"),
        (b'{%s, "presence_penalty": -3}' % ASK, "presence_penalty"),
        (b'{%s, "tools": [{"type": "function", "function": {"name": "no spaces"}}]}' % ASK, "tools[0].function.name"),
        (b'{%s, "tools": [{"type": "custom", "function": {"name": "f"}}]}' % ASK, "tools[0].type"),
        (b'{%s, "tool_choice": "maybe"}' % ASK, "tool_choice"),
        (b'{%s, "response_format": {"type": "xml"}}' % ASK, "response_format.type"),
    ],
    ids=range(32),
)
def test_a_wrong_body_is_a_bad_request_that_names_the_field(body, param):
    with pytest.raises(BadRequest) as caught:
        decode(body, ChatBody)
    assert caught.value.param == param
    assert caught.value.message


REFUSED = [
    ("n", b"2"),
    ("tools", b'[{"type": "function", "function": {"name": "f"}}]'),
    ("tool_choice", b'"required"'),
    ("logprobs", b"true"),
    ("top_logprobs", b"3"),
    ("logit_bias", b'{"5": 1}'),
    ("response_format", b'{"type": "json_schema", "json_schema": {}}'),
    ("presence_penalty", b"0.5"),
    ("frequency_penalty", b"-0.5"),
    ("top_k", b"5"),
    ("ignore_eos", b"true"),
    ("regex", b'"a+"'),
    ("reasoning_effort", b'"high"'),
    ("functions", b'[{"name": "f"}]'),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_parameter_that_would_change_the_result_is_refused_by_name_unless_it_is_honoured(field, value):
    body = decode(b'{%s, "%s": %s}' % (ASK, field.encode(), value), ChatBody)
    with pytest.raises(BadRequest, match=f"^{field}: ") as caught:
        refuse_unsupported(body)
    assert caught.value.param == field
    refuse_unsupported(body, {field})


def test_neutral_values_pass():
    neutral = b'"n": 1, "tools": [], "logprobs": false, "response_format": {"type": "text"}, "presence_penalty": 0.0, "user": "me"'
    refuse_unsupported(decode(b"{%s, %s}" % (ASK, neutral), ChatBody))
    refuse_unsupported(decode(b'{"prompt": "x", "best_of": 1, "echo": false, "suffix": null}', CompletionBody))


def test_no_log_probabilities_beside_the_chosen_ones_is_a_wish_of_completions():
    with pytest.raises(BadRequest, match="^logprobs: "):
        refuse_unsupported(decode(b'{"prompt": "x", "logprobs": 0}', CompletionBody))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(b'"a"', ["a"]), (b'["a", ""]', ["a", ""]), (b"[1, 2]", [[1, 2]]), (b'[[1], "b", [2, 3]]', [[1], "b", [2, 3]])],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_them(prompt, expected):
    assert prompts(decode(b'{"prompt": %s}' % prompt, CompletionBody)) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(b"[[]]", "prompt[0]"), (b"[[1, -1]]", "prompt[0]"), (b'["a", 1.5]', "prompt[1]"), (b"[[1]" + b", [1]" * 64 + b"]", "prompt")],
)
def test_a_prompt_that_is_neither_is_named(prompt, param):
    with pytest.raises(BadRequest) as caught:
        prompts(decode(b'{"prompt": %s}' % prompt, CompletionBody))
    assert caught.value.param == param


def test_every_refused_parameter_is_a_field_of_the_body():
    assert set(NEUTRAL) <= {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}


def test_speech_bounds():
    with pytest.raises(BadRequest) as caught:
        decode(b'{"input": "hi", "speed": 9}', SpeechBody)
    assert caught.value.param == "speed"
    assert decode(b'{"input": "hi", "voice": {"id": "amy"}}', SpeechBody).response_format == "mp3"


def test_form_fields_are_converted_and_checked():
    form = convert_form({"temperature": "0.2", "stream": "true", "timestamp_granularities": ["word"]}, TranscriptionForm)
    assert (form.temperature, form.stream, form.timestamp_granularities) == (0.2, True, ["word"])
    for field, value in (("temperature", "warm"), ("response_format", "diarized_json"), ("include", ["logprobs"])):
        with pytest.raises(BadRequest) as caught:
            convert_form({field: value}, TranscriptionForm)
        assert caught.value.param.startswith(field)


@pytest.mark.parametrize("text", ["", " \n", ".", "…", "👍", "👩‍👩‍👧", "\x00\x07", "- !", "**"])
def test_texts_without_a_sound_are_known(text):
    assert not is_sayable(text)


@pytest.mark.parametrize("text", ["a", "7", "你好", "€", "Hi 👍", "1️⃣"])
def test_texts_with_a_sound_are_known(text):
    assert is_sayable(text)
