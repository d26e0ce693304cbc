"""docs/http.md says what the gateway does: every route, refused parameter, error code, limit and stock name."""

from pathlib import Path

from gateway import errors, models
from gateway.app import TABLE
from gateway.schema import NEUTRAL, ChatBody, ImageBody, ImageEditForm, SoundBody, SpeechBody, TranscriptionForm, VideoBody
from streamrt.config import GatewayConfig
from streamrt.errors import StreamrtError

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_every_route_is_documented():
    assert [f"{r.method} {r.path}" for r in TABLE if f"| `{r.method} {r.path}` |" not in PAGE] == []


def test_what_needs_no_key_is_said():
    for route in TABLE:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{route.method} {route.path}`"))
        assert row.endswith("| open |") is route.is_open


def test_every_parameter_is_documented():
    bodies = (ChatBody, SpeechBody, TranscriptionForm, ImageBody, ImageEditForm, VideoBody, SoundBody)
    fields = {*NEUTRAL, *(name for body in bodies for name in body.__struct_fields__)}
    assert sorted(name for name in fields if f"`{name}" not in PAGE) == []


def test_every_error_code_stands_beside_its_status():
    for cls, row in errors.TABLE.items():
        code = row.code or cls.code
        assert any(line.startswith(f"| {row.status}") or "404, 405" in line for line in PAGE.splitlines() if f"`{code}`" in line), (
            cls,
            code,
        )
    assert f"`{StreamrtError.code}`" in PAGE


def test_every_limit_is_a_key_of_the_configuration():
    limits = {name for name in GatewayConfig.__struct_fields__ if name.startswith("max_") or name.endswith("_s")}
    assert sorted(name for name in limits if f"`{name}`" not in PAGE) == []


def test_every_stock_name_is_listed():
    names = {*models.STOCK_VOICES, *(name for of in models.STOCK_MODELS.values() for name in of)}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []
