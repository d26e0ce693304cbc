"""The documents say what the code does: every key, metric, command, variable and message; every TOML block checks."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer

from streamrt.check import check
from streamrt.cli import app
from streamrt.config import PipelineConfig, expectation, parse_pipeline, show
from streamrt.metrics import METRICS
from streamrt.plan import Machine
from streamrt.registry import STAGES
from transport import channel, chunk, layout, messages, tcp
from transport.connector import ConnectorOptions

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PIPELINE_DOC = (DOCS / "pipeline.md").read_text()
PROTOCOL_DOC = (DOCS / "protocol.md").read_text()
CLI_DOC = (DOCS / "cli.md").read_text()

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


def section(heading: str, page: str = PIPELINE_DOC) -> str:
    """What the page says under a heading in code font."""
    _, _, rest = page.partition(f"\n## `{heading}`\n")
    return rest.partition("\n## ")[0]


def in_code(cell: str) -> list[str]:
    """What stands in code font in a cell of a table."""
    return re.findall(r"`([^`]+)`", cell)


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


# ---- metrics.md ------------------------------------------------------------------------------------------------------------


def test_every_metric_is_documented_with_its_kind_and_labels():
    page = (DOCS / "metrics.md").read_text()
    rows = {
        name: (kind, tuple(in_code(labels)))
        for name, kind, labels in re.findall(r"^\| `(streamrt_\w+)` \| (\w+) \| \w+ \| ([^|]+) \|", page, re.M)
    }
    assert rows == {name: (definition.kind, definition.labels) for name, definition in METRICS.items()}


# ---- cli.md ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))
def test_every_option_of_a_command_is_documented(name):
    rows = re.findall(r"^\| (`-[^|]*) \|", section(f"streamrt {name}", CLI_DOC), re.M)
    documented = {word.split()[0] for row in rows for word in in_code(row)}
    command = typer.main.get_command(app).commands[name]
    options = {option for param in command.params if param.param_type_name == "option" and not param.hidden for option in param.opts}
    assert documented == options
    assert f"streamrt {name}" in section(f"streamrt {name}", CLI_DOC), "an example"


def test_every_command_that_is_documented_exists():
    assert set(re.findall(r"^## `streamrt (\w+)`$", CLI_DOC, re.M)) == set(typer.main.get_command(app).commands)


def test_every_environment_variable_is_documented():
    files = [
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        *(path for package in ("transport", "streamrt", "stages", "gateway") for path in (ROOT / package).rglob("*.py")),
    ]
    read = {name for path in files for name in re.findall(r"\bSTREAMRT_[A-Z_]+\b", path.read_text())}
    assert read == set(re.findall(r"\bSTREAMRT_[A-Z_]+\b", CLI_DOC))


# ---- protocol.md -----------------------------------------------------------------------------------------------------------


def wire_messages() -> list:
    """(what comes before the table, struct, tag shown in the table) of everything that crosses a process."""
    groups = {
        "## Control lane\n\nTo the orchestrator:": typing.get_args(messages.ToOrchestrator),
        "From the orchestrator:": typing.get_args(messages.FromOrchestrator),
        "### The replica table": (messages.Replica,),
        "## Work lane\n\nTo a replica:": (*typing.get_args(messages.ToReplica), messages.Edge),
        "To a client:": typing.get_args(messages.ToClient),
        "## The chunk header": (chunk.ChunkHeader, chunk.TensorSpec),
        "To the consumer:": typing.get_args(channel.ToConsumer),
        "To the producer:": typing.get_args(channel.ToProducer),
        "## TCP lane": (tcp.Hello, tcp.Data, tcp.Cancel, tcp.Accepted, tcp.Refused, tcp.Released),
    }
    return [
        pytest.param(place, struct, id=f"{struct.__module__}.{struct.__name__}") for place, structs in groups.items() for struct in structs
    ]


@pytest.mark.parametrize(("place", "struct"), wire_messages())
def test_every_message_is_documented_with_its_fields_in_order(place, struct):
    table = re.match(r"(?:(?!\n\|).)*((?:\n\|[^\n]*)+)", PROTOCOL_DOC.partition(f"\n{place}\n")[2], re.S)
    assert table, f"docs/protocol.md: no table after {place!r}"
    rows = [line.split("|")[1:-1] for line in table[1].splitlines() if line.startswith(f"| `{struct.__name__}` |")]
    assert rows, f"docs/protocol.md: no row for `{struct.__name__}` after {place!r}"
    cells = [cell.strip() for cell in rows[0]]
    if struct.__struct_config__.array_like and struct.__struct_config__.tag is not None:
        assert cells[1].strip("`") == str(struct.__struct_config__.tag)
        del cells[1]
    assert tuple(in_code(cells[1])) == struct.__struct_fields__


def test_the_numbers_of_a_shared_memory_area_are_said():
    text = PROTOCOL_DOC.partition("\n## Shared-memory areas\n")[2].partition("\n## ")[0].replace("\n", " ")
    assert f"Version {layout.VERSION}." in text
    assert f"`0x{layout.MAGIC:X}`" in text
    counts = [str(count) for _, count in layout.arena_layout(ConnectorOptions().arena_bytes).classes]
    assert f"The default arena of 64 MiB has {', '.join(counts[:-1])} and {counts[-1]} slots" in text


def test_the_versions_are_said():
    table = PROTOCOL_DOC.partition("\n## Versions\n")[2]
    said = {file: int(number) for file, number in re.findall(r"VERSION` in `(\w+)\.py` \| (\d+) \|", table)}
    assert said == {"messages": messages.WIRE_VERSION, "channel": channel.VERSION, "layout": layout.VERSION, "tcp": tcp.VERSION}
