"""`pipeline.toml` is read strictly, and its errors say where, got, expected and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrt.config import Where, convert, expectation, from_json, load_pipeline, parse_bytes, parse_pipeline, to_json, to_toml
from streamrt.errors import ConfigError

VOICE = """
[pipeline]
name = "voice-chat"

[session]
voice = "jf_alpha"

[[stage]]
name = "vad"
use = "speech.vad.silero"

[[stage]]
name = "llm"
use = "ar.causal_lm"
[stage.args]
model = "weights:smollm2-135m-instruct"
sampling = { temperature = 0.2, stop = ["a", "b"] }

[[stage]]
name = "tts"
use = "speech.tts.kokoro"
inputs = ["llm"]

[deploy.llm]
threads = 2
memory = "2GiB"
"""


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(text, "pipeline.toml", overrides)
    return str(caught.value)


def test_a_file_becomes_typed_structs_with_defaults_for_what_it_leaves_out():
    config = parse_pipeline(VOICE, "pipelines/voice.toml")
    assert config.name == "voice-chat"
    assert [stage.name for stage in config.stages] == ["vad", "llm", "tts"]
    assert config.stage_named("tts").inputs == ("llm",)
    assert config.deployed("llm").threads == 2
    assert config.deployed("llm").memory_bytes == 2 * 2**30
    assert config.deployed("vad").connector == "shm"
    assert config.gateway.port == 8000
    assert config.session.turn_detection.silence_duration_ms == 500
    assert config.path == Path("pipelines/voice.toml").absolute()


def test_args_belong_to_the_stage_above_them():
    config = parse_pipeline(VOICE)
    assert config.stage_named("llm").args["model"] == "weights:smollm2-135m-instruct"
    assert config.stage_named("vad").args == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "deploy.llm.threads=four",
            '--set: deploy.llm.threads: got "four", expected a whole number, at least 1',
        ),
        (
            'deploy.llm.threads="4"',
            '--set: deploy.llm.threads: got "4", expected a whole number, at least 1\nhint: write it without quotes: 4',
        ),
        (
            "deploy.llm.connector=shn",
            '--set: deploy.llm.connector: got "shn", expected one of "shm", "tcp"\nhint: did you mean "shm"?',
        ),
        (
            "deploy.llm.memory=2 gigs",
            '--set: deploy.llm.memory: got "2 gigs", expected a size such as "64MiB" or "2GiB"',
        ),
        (
            "stage.tts.inputs=llm",
            '--set: stage.tts.inputs: got "llm", expected a list, each text\nhint: write it as a list: ["llm"]',
        ),
        (
            "stage.llm.inpts=[]",
            '--set: stage.llm.inpts: got unknown key "inpts", expected one of "name", "use", "inputs", "args"\nhint: did you mean "inputs"?',
        ),
        (
            "pipeline.name=42",
            "--set: pipeline.name: got 42, expected a name of at most 40 letters, digits, '.', - and _\nhint: text needs quotes: \"42\"",
        ),
        (
            "gateway.port=70000",
            "--set: gateway.port: got 70000, expected a whole number, at least 0, at most 65535",
        ),
        (
            "deploy.lm.threads=2",
            '--set: deploy.lm: got [deploy.lm], expected the name of a stage: one of "vad", "llm", "tts"\nhint: did you mean "llm"?',
        ),
        (
            "stage.lm.use=echo",
            '--set: stage.lm: got "lm", expected the name of a stage: one of "vad", "llm", "tts"\nhint: did you mean "llm"?',
        ),
        (
            "tasks.speek=tts",
            '--set: tasks.speek: got task "speek", expected one of "respond", "speak", "transcribe", "listen", "image", "video", "audio", '
            '"duplex"\nhint: did you mean "speak"?',
        ),
        (
            "tasks.speak=ttts",
            '--set: tasks.speak: got "ttts", expected the name of a stage: one of "vad", "llm", "tts"\nhint: did you mean "tts"?',
        ),
        (
            "deploy.llm.hang_timeout_s=1",
            "--set: deploy.llm.hang_timeout_s: got 1, expected at least 2, twice run.heartbeat_s",
        ),
        (
            "gateway.port",
            "--set gateway.port: got no KEY=VALUE\nhint: write it as --set gateway.port=0",
        ),
        (
            "session.turn_detection=3",
            "--set: session.turn_detection: got 3, expected a table",
        ),
    ],
)
def test_a_wrong_value_says_where_got_expected_and_what_to_do(override, message):
    assert error_of(VOICE, override) == message


def test_an_error_in_the_file_names_the_file():
    text = VOICE.replace("threads = 2", "thread = 2")
    assert error_of(text).startswith(
        'pipeline.toml: deploy.llm.thread: got unknown key "thread", expected one of "replicas", "tp", "threads"'
    )
    assert error_of(text).endswith('hint: did you mean "threads"?')


def test_a_plural_table_name_is_an_unknown_key_with_a_hint():
    assert error_of(VOICE.replace("[deploy.llm]", "[deplyo.llm]")).endswith('hint: did you mean "deploy"?')


def test_one_stage_written_as_a_plain_table_is_told_to_double_its_brackets():
    message = error_of('[pipeline]\nname = "x"\n[stage]\nname = "echo"\nuse = "echo"')
    assert message.endswith("expected a list of tables\nhint: write [[stage]] instead of [stage]")


def test_what_is_missing_is_named():
    assert error_of("[[stage]]\nname = 'a'\nuse = 'echo'") == "pipeline.toml: pipeline: got nothing, expected a table\nhint: add [pipeline]"
    assert error_of("[pipeline]\nname = 'x'\n[[stage]]\nname = 'a'") == (
        "pipeline.toml: stage.a.use: got nothing, expected text\nhint: add use = ..."
    )
    assert error_of("stage = []\n[pipeline]\nname = 'x'").startswith("pipeline.toml: stage: got no stage, expected at least one [[stage]]")


def test_broken_toml_says_the_line():
    assert "pipeline.toml: not valid TOML: " in error_of("[pipeline\n")
    assert "line 1" in error_of("[pipeline\n")


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_pipeline(tmp_path / "nothing.toml")


def test_names_of_the_runtime_itself_are_taken():
    assert "this one is taken by the runtime itself" in error_of(VOICE, "stage.vad.name=gateway")


def test_half_of_tls_is_an_error():
    assert error_of(f'{VOICE}[gateway]\ntls_cert = "cert.pem"') == (
        "pipeline.toml: gateway.tls_key: got nothing, expected a path, because tls_cert is set\nhint: set both for TLS, or neither"
    )


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(VOICE)
    config = load_pipeline(path, ["gateway.tls_cert=tls/cert.pem", "gateway.tls_key=/etc/key.pem"])
    assert config.gateway.tls_cert == str(tmp_path / "tls/cert.pem")
    assert config.gateway.tls_key == "/etc/key.pem"
    assert config.folder == tmp_path


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("gateway.port=0", lambda c: c.gateway.port, 0),
        ("gateway.host=0.0.0.0", lambda c: c.gateway.host, "0.0.0.0"),
        ("deploy.vad.threads=2", lambda c: c.deployed("vad").threads, 2),
        ("stage.llm.args.max_tokens=200", lambda c: c.stage_named("llm").args["max_tokens"], 200),
        ("stage.llm.args.sampling.temperature=0.9", lambda c: c.stage_named("llm").args["sampling"]["temperature"], 0.9),
        ("session.turn_detection.create_response=false", lambda c: c.session.turn_detection.create_response, False),
        ("gateway.cors_origins=['https://a.example']", lambda c: c.gateway.cors_origins, ("https://a.example",)),
        ("session.instructions=a = b\nc = d", lambda c: c.session.instructions, "a = b\nc = d"),
    ],
)
def test_an_override_is_toml_or_else_text(override, read, value):
    assert read(parse_pipeline(VOICE, overrides=[override])) == value


def test_the_config_survives_the_wire_and_the_file():
    config = parse_pipeline(VOICE, overrides=["session.turn_detection.threshold=0.7", "tasks.respond=llm"])
    assert from_json(to_json(config)) == config
    assert parse_pipeline(to_toml(config)) == config


VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


@settings(max_examples=50, deadline=None)
@given(args=st.dictionaries(st.text(), st.recursive(VALUES, st.lists, max_leaves=5)))
def test_any_args_survive_being_written_as_toml(args):
    config = parse_pipeline(VOICE)
    stage = msgspec.structs.replace(config.stage[1], args=args)
    config = msgspec.structs.replace(config, stage=(config.stage[0], stage, config.stage[2]))
    assert parse_pipeline(to_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "count"),
    [("12GiB", 12 * 2**30), ("64MiB", 2**26), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("7", 7), ("3k", 3000), ("100 b", 100)],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1MiB", "12 gigs", "1.2.3MB"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ConfigError, match="expected a size such as"):
        parse_bytes(text)


class Inner(msgspec.Struct, frozen=True):
    depth: int = 1


class Args(msgspec.Struct):
    model: str
    inner: Inner = Inner()
    folder: Path = Path(".")
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit == 13:
            raise ValueError("limit 13 is not served")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model": 3}, 'f: stage.x.args.model: got 3, expected text\nhint: text needs quotes: "3"'),
        ({"modle": "a"}, 'f: stage.x.args.modle: got unknown key "modle", expected one of "model", "inner", "folder", "limit"\n'
                         'hint: did you mean "model"?'),
        ({}, "f: stage.x.args.model: got nothing, expected text\nhint: add model = ..."),
        ({"model": "a", "inner": {"depth": True}}, "f: stage.x.args.inner.depth: got true, expected a whole number"),
        ({"model": "a", "limit": "x"}, 'f: stage.x.args.limit: got "x", expected a whole number'),
        ({"model": "a", "folder": 1}, "f: stage.x.args.folder: got 1, expected a path"),
        ({"model": "a", "limit": 13}, "f: stage.x.args: limit 13 is not served"),
    ],
)  # fmt: skip
def test_the_arguments_of_a_stage_are_checked_in_the_same_words(data, message):
    with pytest.raises(ConfigError) as caught:
        convert(data, Args, Where("f"), "stage.x.args")
    assert str(caught.value) == message


def test_a_type_has_words_for_it():
    kinds: list[tuple[Any, str]] = [
        (bool, "true or false"),
        (list[int], "a list, each a whole number"),
        (dict[str, int], "a table"),
        (int | None, "a whole number"),
    ]
    assert [expectation(kind) for kind, _ in kinds] == [words for _, words in kinds]
