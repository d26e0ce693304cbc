"""The documents say what the code does: every key, with its default; every TOML block checks."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from streamrt.check import check
from streamrt.config import PipelineConfig, expectation, parse_pipeline, show
from streamrt.plan import Machine
from streamrt.registry import STAGES

DOCS = Path(__file__).parents[1] / "docs"
PIPELINE_DOC = (DOCS / "pipeline.md").read_text()

HEADINGS = {"stage": "[[stage]]", "deploy": "[deploy.<stage>]"}


def config_keys(struct: type[msgspec.Struct] = PipelineConfig, table: str = "") -> Iterator[tuple[str, str, msgspec.structs.FieldInfo]]:
    """(heading of the table, key, field) of every key of the file."""
    for field in msgspec.structs.fields(struct):
        inner = next((t for t in (field.type, *typing.get_args(field.type)) if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)
        if table:
            yield table, field.name, field
        if inner is not None:
            yield from config_keys(
                inner, HEADINGS.get(field.name, f"{table.removesuffix(']')}.{field.name}]" if table else f"[{field.name}]")
            )


def section(heading: str) -> str:
    """What the document says under a table's heading."""
    _, _, rest = PIPELINE_DOC.partition(f"\n## `{heading}`\n")
    return rest.partition("\n## ")[0]


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "see below" if isinstance(default, msgspec.Struct) else f"`{show(default)}`"


@pytest.mark.parametrize(("table", "key", "field"), [pytest.param(*row, id=f"{row[0]}.{row[1]}") for row in config_keys()])
def test_every_config_key_is_documented(table, key, field):
    rows = re.findall(rf"^\| `{key}` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section(table), re.MULTILINE)
    assert rows, f"docs/pipeline.md: no row for `{key}` ({expectation(field.type)}) under `{table}`"
    assert rows[0][1] == default_of(field)


def test_every_documented_key_exists():
    known = {(table, key) for table, key, _ in config_keys()}
    for table in {table for table, _ in known}:
        for key in re.findall(r"^\| `(\w+)` \|", section(table), re.MULTILINE):
            assert (table, key) in known


def test_every_table_of_the_file_is_documented():
    for field in msgspec.structs.fields(PipelineConfig):
        if field.name != "file":
            assert section(HEADINGS.get(field.name, f"[{field.name}]"))


def test_every_registered_stage_is_named():
    assert [name for name in STAGES if f"`{name}`" not in PIPELINE_DOC] == []


def toml_blocks() -> list:
    found = [
        (path.name, block)
        for path in sorted(DOCS.glob("*.md"))
        for block in re.findall(r"^```toml\n(.*?)^```$", path.read_text(), re.M | re.S)
    ]
    return [pytest.param(block, id=f"{name}-{number}") for number, (name, block) in enumerate(found)]


@pytest.mark.parametrize("block", toml_blocks())
def test_every_toml_block_checks(block):
    machine = Machine(cores=(0, 1), memory_bytes=16 * 2**30, shm_bytes=2**30)
    assert check(parse_pipeline(block), machine).memory
