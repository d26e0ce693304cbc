"""Names of stage classes, and the arguments that classes take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamrt.config import parse_pipeline
from streamrt.errors import ConfigError
from streamrt.registry import EXTRAS, STAGES, known_names, load_class, load_graph, missing_module, missing_modules, parse_args, target_of
from streamrt.stage import Stage

MODULE = '''
from pathlib import Path
import msgspec
from streamrt.stage import Stage

class Shout(Stage):
    """Louder."""
    class Args(msgspec.Struct):
        marks: int = 1
        words: Path = Path("words.txt")
    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)

class NoStage: ...
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module in it; what is imported from there is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "shouting.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def error_of(use: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_class(use, folder)
    return str(caught.value)


def test_a_users_class_is_found_beside_the_pipeline_file(folder):
    found = load_class("shouting:Shout", folder)
    assert issubclass(found, Stage)
    assert found.__name__ == "Shout"


def test_a_file_beside_the_pipeline_never_hides_an_installed_module(folder):
    (folder / "stages.py").write_text("raise RuntimeError('not this one')")
    assert load_class("echo", folder).__module__ == "stages.echo"


def test_an_unknown_short_name_gets_the_closest():
    with pytest.raises(ConfigError) as caught:
        target_of("speech.tts.kokor")
    assert str(caught.value).startswith('got "speech.tts.kokor", expected one of "echo", ')
    assert str(caught.value).endswith('or "module:Class"\nhint: did you mean "speech.tts.kokoro"?')


def test_what_is_not_there_says_what_is(folder):
    assert error_of("shouting:Shot", folder) == 'got "shouting:Shot", expected "shouting:Shout"'
    assert error_of("shouting:NoStage", folder) == 'got "shouting:NoStage", which is no Stage, expected "shouting:Shout"'
    assert error_of("shoutin:Shout", folder) == (
        f'got "shoutin:Shout", expected a module that is there\nhint: there is no module "shoutin" in {folder} or among the installed packages'
    )
    assert error_of(":Shout", folder) == 'got ":Shout", expected "module:Class"'


def test_a_module_that_needs_a_missing_library_names_the_extra(folder):
    (folder / "heavy.py").write_text("import sphn_is_not_here")
    assert (
        error_of("heavy:X", folder)
        == '"heavy:X" can not be imported: sphn_is_not_here is not installed\nhint: pip install sphn_is_not_here'
    )
    error = missing_module(ModuleNotFoundError("No module named 'kokoro_onnx.x'", name="kokoro_onnx.x"), 'stage "tts" can not load')
    assert str(error) == "stage \"tts\" can not load: kokoro_onnx is not installed\nhint: pip install 'streamrt[voice]'"


def test_a_module_that_raises_says_what_it_raised(folder):
    (folder / "broken.py").write_text("1 / 0")
    assert error_of("broken:X", folder) == '"broken:X" can not be imported: ZeroDivisionError: division by zero'


def test_an_installed_package_may_register_names(folder):
    info = folder / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[streamrt.stages]\nloud = shouting:Shout\n")
    sys.path.append(str(folder))
    assert "loud" in known_names()
    assert target_of("loud") == "shouting:Shout"
    assert load_class("loud").__name__ == "Shout"


def pipeline(folder: Path, args: str = "", use: str = "shouting:Shout"):
    text = f'[pipeline]\nname = "p"\n[[stage]]\nname = "loud"\nuse = "{use}"\n[stage.args]\n{args}'
    return parse_pipeline(text, folder / "p.toml")


def test_args_are_typed_and_their_paths_start_at_the_pipelines_folder(folder):
    config = pipeline(folder, 'marks = 3\nwords = "lists/w.txt"')
    args = parse_args(load_class("shouting:Shout", folder), config.stages[0], config.path)
    assert (args.marks, args.words) == (3, folder / "lists/w.txt")


def test_a_wrong_argument_is_an_error_of_the_file(folder):
    with pytest.raises(ConfigError) as caught:
        load_graph(pipeline(folder, "mark = 3"))
    assert str(caught.value) == (
        f'{folder / "p.toml"}: stage.loud.args.mark: got unknown key "mark", expected one of "marks", "words"\nhint: did you mean "marks"?'
    )


def test_a_wrong_use_is_an_error_of_the_file(folder):
    with pytest.raises(ConfigError) as caught:
        load_graph(pipeline(folder, use="shouting:Shot"))
    assert str(caught.value) == f'{folder / "p.toml"}: stage.loud.use: got "shouting:Shot", expected "shouting:Shout"'


def test_a_graph_is_made_of_what_the_classes_declare(folder):
    graph, kinds = load_graph(pipeline(folder))
    assert graph.nodes["loud"].gives == {"text": "text"}
    assert kinds["loud"].__name__ == "Shout"


def test_what_a_stage_will_import_is_looked_for_and_not_imported():
    assert missing_modules("echo") == []
    assert all(module in EXTRAS for entry in STAGES.values() for module in entry.needs)


def test_every_registered_stage_imports_without_heavy_libraries():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))
from streamrt.registry import STAGES, load_class
for name in STAGES:
    load_class(name)
assert "aiohttp" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr
