"""The layers hold, docs/architecture.md is the map of what is there, and the wheel and the core need nothing else."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("transport", "streamrt", "stages", "gateway")
MAP = (ROOT / "docs" / "architecture.md").read_text()

# What a core install lacks: every module of the extras, and what they bring along.
HEAVY = ("torch", "transformers", "safetensors", "accelerate", "gguf", "huggingface_hub", "onnxruntime", "faster_whisper", "ctranslate2", "kokoro_onnx",
         "phonemizer", "soxr", "av", "soundfile", "PIL", "sphn")  # fmt: skip


def files_on_the_map() -> list[str]:
    """`package/file.py` of each row of the code map."""
    found = []
    for package, table in re.findall(r"^### `(\w+)/`[^\n]*\n((?:\n|\|[^\n]*\n)+)", MAP, re.MULTILINE):
        for first_cell in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE):
            found += [f"{package}/{name}" for name in re.findall(r"`([\w/]+\.py)`", first_cell)]
    return found


def definitions(path: Path) -> set[str]:
    """Functions, classes and `Class.method`s of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    return names


def test_the_import_contracts_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_on_the_map_once():
    there = [str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert sorted(files_on_the_map()) == sorted(there)


def test_every_function_that_the_map_names_is_there():
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", MAP)
    assert len(named) > 15
    assert [f"{file}:{name}" for file, name in named if name not in definitions(ROOT / file)] == []


def test_every_link_between_pages_leads_somewhere():
    for page in (ROOT / "docs").glob("*.md"):
        for target, anchor in re.findall(r"\]\((?!https?:)([\w./-]*)#?([\w-]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_wheel_holds_the_four_packages_and_nothing_else(tmp_path):
    # A copy, because setuptools builds beside what it reads; of everything, because the wheel must leave the rest out.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "shared"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)
    files = {path.relative_to(source) for package in PACKAGES for path in (source / package).rglob("*") if path.is_file()}
    assert {Path(name) for name in names} == files


def test_check_needs_none_of_the_model_libraries():
    # The finder that looks into site-packages finds none of them, as if they were not installed.
    program = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {HEAVY} else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["streamrt", "check", "examples/03_voice/pipeline.toml", "--json"]
import streamrt.check
from streamrt.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [task["task"] for task in report["tasks"]] == ["listen", "transcribe", "respond", "speak"]
    for module in ("torch", "transformers", "onnxruntime", "faster_whisper", "kokoro_onnx"):
        assert any(f"needs {module}, which is not installed" in warning for warning in report["warnings"])


@pytest.mark.parametrize("package", ["streamrt", "transport", "gateway"])
def test_the_lower_packages_import_without_the_model_libraries(package):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / package).rglob("*.py") if path.name != "__main__.py"
    ]
    program = f"import sys\nfor name in {HEAVY}: sys.modules[name] = None\nimport {', '.join(m.removesuffix('.__init__') for m in modules)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
