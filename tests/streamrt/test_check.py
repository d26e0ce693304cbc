"""`streamrt check`: what a pipeline means, without starting it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrt.check import CheckReport, check
from streamrt.config import load_pipeline, parse_pipeline
from streamrt.errors import ConfigError
from streamrt.plan import Machine

MACHINE = Machine(cores=(0, 1), memory_bytes=8 * 2**30, shm_bytes=2**30)

VOICE = """
[pipeline]
name = "scripted"
[[stage]]
name = "vad"
use = "testing.vad"
[[stage]]
name = "asr"
use = "testing.asr"
[[stage]]
name = "llm"
use = "testing.llm"
[[stage]]
name = "tts"
use = "testing.tone"
inputs = ["llm"]
[deploy.llm]
memory = "1GiB"
"""


def report_of(text: str, *overrides: str, machine: Machine = MACHINE) -> CheckReport:
    return check(parse_pipeline(text, "/p/pipeline.toml", overrides), machine)


def test_it_prints_stages_tasks_endpoints_and_memory():
    assert (
        report_of(VOICE).as_text()
        == """\
scripted (/p/pipeline.toml)

stage  use           inputs  takes         gives           replicas
vad    testing.vad   -       audio, event  events (event)  1
asr    testing.asr   -       audio, event  text            1
llm    testing.llm   -       text          text            1
tts    testing.tone  llm     text          audio           1

task        way         to the client
listen      vad         event from vad
transcribe  asr         text from asr
respond     llm -> tts  text from llm, audio from tts
speak       tts         audio from tts

endpoints
  POST /v1/chat/completions
  POST /v1/audio/speech
  POST /v1/audio/transcriptions
  WS /v1/realtime

memory on cpu: 1.3GiB"""
    )


def test_the_same_as_json():
    report = json.loads(report_of(VOICE).as_json())
    assert report["edges"] == ["llm.text -> tts"]
    assert report["tasks"][2] == {
        "task": "respond",
        "entry": "llm",
        "stages": ["llm", "tts"],
        "outputs": {"text": "llm.text", "audio": "tts.audio"},
    }
    assert report["memory"] == {"cpu": 2**30 + 5 * 64 * 2**20}
    assert report["warnings"] == []


def test_endpoints_are_those_whose_tasks_are_there():
    text = '[pipeline]\nname = "p"\n[[stage]]\nname = "echo"\nuse = "echo"\n'
    assert report_of(text).endpoints == ("POST /v1/chat/completions",)
    assert report_of(text, "gateway.replicas=0").endpoints == ()


def test_a_machine_that_is_too_small_is_a_warning_and_not_the_files_fault():
    report = report_of(VOICE, "deploy.llm.memory=64GiB")
    assert report.memory == {}
    assert report.warnings[0].startswith("this machine can not run it: /p/pipeline.toml: deploy: got 64.3GiB of memory on cpu")


def test_a_stage_that_no_request_reaches_is_a_warning():
    text = '[pipeline]\nname = "p"\n[[stage]]\nname = "a"\nuse = "testing.llm"\n[[stage]]\nname = "b"\nuse = "testing.llm"\n'
    assert report_of(text, "tasks.respond=a").warnings == ('stage "b" is on the way of no task; [tasks] can name it as an entry',)


def test_a_missing_model_is_a_warning_with_the_line_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMRT_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "hearing.py").write_text(
        "import msgspec\nfrom streamrt.stage import Stage\n"
        "class Ear(Stage):\n    class Args(msgspec.Struct):\n        model: str = 'weights:whisper-tiny.en'\n"
        "    gives = {'text': 'text'}\n    tasks = ('transcribe',)\n    models = ('model',)\n"
    )
    (tmp_path / "p.toml").write_text('[pipeline]\nname = "p"\n[[stage]]\nname = "ear"\nuse = "hearing:Ear"\n')
    warnings = check(load_pipeline(tmp_path / "p.toml"), MACHINE).warnings
    assert len(warnings) == 1
    assert warnings[0].startswith('stage "ear": weights:whisper-tiny.en: ')
    assert warnings[0].endswith(f"streamrt fetch {tmp_path / 'p.toml'}")


DEVICE = """
[pipeline]
name = "device"
[[stage]]
name = "talker"
use = "device_stages:Talker"
[[stage]]
name = "vocoder"
use = "device_stages:Vocoder"
inputs = ["talker"]
[deploy.talker]
device = "cuda:0"
[deploy.vocoder]
device = "cuda"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({'inputs = ["talker"]': ""}, 'tasks.speak: got "talker.audio", which stays in device memory, as what the client gets, expected'),
        ({'device = "cuda:0"': 'device = "cpu"'}, 'deploy.talker.device: got "cpu", expected a GPU: "talker.audio"'),
        ({'device = "cuda"\n': 'device = "cuda:1"\n'}, 'deploy.vocoder.device: got "cuda:1", expected "cuda:0": it takes "talker.audio"'),
        ({'device = "cuda"\n': 'device = "cuda"\nconnector = "tcp"\n'}, 'deploy.vocoder.connector: got "tcp", expected "shm": it takes'),
    ],
    ids=["right", "to the client", "without a GPU", "to another GPU", "over tcp"],
)
def test_device_memory_goes_to_stages_on_that_gpu_alone(tmp_path, change, message):
    (tmp_path / "device_stages.py").write_text(
        "from streamrt import Stage\n"
        "class Talker(Stage):\n    takes, gives, tasks, device_ports = {'text'}, {'audio': 'audio'}, ('speak',), frozenset({'audio'})\n"
        "class Vocoder(Stage):\n    takes, gives = {'audio'}, {'audio': 'audio'}\n"
    )
    text = DEVICE
    for old, new in change.items():
        text = text.replace(old, new)
    config = parse_pipeline(text, tmp_path / "pipeline.toml")
    if not message:
        assert check(config, MACHINE).tasks[0].outputs == {"audio": "vocoder.audio"}
        return
    with pytest.raises(ConfigError) as caught:
        check(config, MACHINE)
    assert message in str(caught.value)


def test_it_needs_no_heavy_library():
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "onnxruntime", "faster_whisper", "kokoro_onnx"]))
from streamrt.check import check
from streamrt.config import parse_pipeline
print(len(check(parse_pipeline({VOICE!r})).tasks))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout == "4\n", done.stderr
