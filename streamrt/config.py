"""`pipeline.toml` -> frozen structs, strictly.

Every table of the file is one struct here; every key is one field, with its unit in the name or in the comment beside it.
`docs/pipeline.md` describes the same keys for the user, and a test holds the two together.

Knows TOML, types and files. Knows nothing of stage classes (`registry.py`), of what the graph means (`pipeline.py`) or of
the machine (`plan.py`).

Rules
- An unknown key or a wrong type is a ConfigError that says where, what was found, what was expected and what to do.
- Overrides (`--set`) are merged into the file's data before it is checked, so they meet the same checks.
- Relative paths are relative to the file that names them.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from streamrt.errors import ConfigError
from streamrt.stage import TASKS
from transport.connector import ConnectorOptions

S = TypeVar("S", bound=msgspec.Struct)

_SIZE = r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGTkmgt][iI]?)?[bB]?)\s*"
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
SecondsOrZero = Annotated[float, Meta(ge=0)]
Milliseconds = Annotated[int, Meta(ge=0)]
Size = Annotated[str, Meta(pattern=f"^{_SIZE}$", description='a size such as "64MiB" or "2GiB"')]
SizeOrEmpty = Annotated[str, Meta(pattern=f"^({_SIZE})?$", description='a size such as "64MiB" or "2GiB"')]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$", description="a name of at most 40 letters, digits, - and _")]
RunName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$", description="a name of at most 40 letters, digits, '.', - and _")
]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description='"cpu", "cuda" or "cuda:N"')]


# ---- the tables of the file -------------------------------------------------------------------------------------------------


class PipelineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[pipeline]`"""

    name: RunName  # runs are named by it: `down`, `ps` and `logs` take it


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[gateway]`: the process that speaks HTTP and WebSocket."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # 0: a free one
    replicas: CountOrZero = 1  # processes that share the port; 0: none, the Python API only
    api_key_env: str = ""  # name of the environment variable that holds the key; "" asks for none
    insecure: bool = False  # allow a host beyond loopback without a key
    tls_cert: str = ""  # path of a PEM file
    tls_key: str = ""  # path of a PEM file
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call; () = same origin only
    max_body: Size = "25MiB"  # of one request's body
    max_input_chars: Count = 4096  # text of one speech request
    max_prompt_chars: Count = 200_000  # text of one conversation, all messages together
    max_audio_s: Seconds = 1800.0  # audio of one transcription
    max_requests: Count = 128  # HTTP requests in work at a time; beyond: 429
    max_connections: Count = 256  # open connections, all kinds
    max_sessions: Count = 32  # open realtime sessions
    request_timeout_s: Seconds = 120.0  # deadline of one HTTP request
    job_timeout_s: Seconds = 1800.0  # deadline of one video
    max_stored: Count = 200  # video jobs, and images that are answered as URLs, kept at a time
    max_stored_size: Size = "4GiB"  # their bytes, all together
    stored_ttl_s: Seconds = 86400.0  # how long each is kept once it is finished
    slow_client_s: Seconds = 10.0  # a client that reads nothing for so long is closed
    keepalive_s: Seconds = 15.0  # a comment line in a silent event stream, so that proxies keep it

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes(self.max_body)

    @property
    def max_stored_bytes(self) -> int:
        return parse_bytes(self.max_stored_size)


class TurnDetectionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[session.turn_detection]`: defaults of server VAD, named as in the realtime protocol."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5  # speech probability
    prefix_padding_ms: Milliseconds = 300  # audio kept from before the speech
    silence_duration_ms: Milliseconds = 500  # silence that ends a turn
    create_response: bool = True
    interrupt_response: bool = True


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[session]`: defaults of a conversation."""

    instructions: str = ""
    voice: str = ""  # "": the speaking stage's own default
    language: str = ""  # of what the user speaks; "": the hearing stage's own default
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.8
    max_tokens: Count = 512  # of one response
    max_session_s: Seconds = 3600.0
    idle_timeout_s: Seconds = 300.0  # no audio and no event from the client for so long ends the session
    turn_detection: TurnDetectionConfig = TurnDetectionConfig()


class StageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[stage]]`: one step of the pipeline."""

    name: Name
    use: str  # a registered name, or "package.module:Class"
    inputs: tuple[str, ...] = ()  # "stage", or "stage.port" where that stage has several
    args: dict[str, Any] = {}  # for the class; checked against its `Args`


class DeployConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[deploy.<stage>]`: where and how big. Topology is none of its business."""

    replicas: Count = 1
    tp: Count = 1  # ranks: processes that hold the model together, a part each
    threads: Count = 1  # intra-op threads of one process
    memory: SizeOrEmpty = ""  # of one process on its device; "" = not counted
    device: Device | tuple[Device, ...] = "cpu"  # of the first rank; or of each rank, in the order of `devices_of`
    cores: tuple[CountOrZero, ...] = ()  # CPU numbers that a replica is pinned to, dealt out to its ranks; () = any
    nice: Annotated[int, Meta(ge=0, le=19)] = 0  # gives way to its neighbours on shared cores from ready on, the more the higher
    connector: Literal["shm", "tcp"] = "shm"  # how its chunks arrive
    max_requests: CountOrZero = 0  # requests held at a time by one replica; 0 = the stage class's default
    load_timeout_s: Seconds = 120.0  # from start to ready
    hang_timeout_s: Seconds = 10.0  # no heartbeat for so long: killed and restarted; a reader of its chunks is given up
    arena: Size = "64MiB"  # shared memory of one producing replica
    window: Size = "32MiB"  # unreleased bytes of one request on one edge
    window_chunks: Count = 32  # unreleased chunks of one request on one edge
    max_chunk: Size = "256MiB"  # one chunk; a larger one fails its request
    backend: Literal["local"] = "local"  # who places the processes
    env: dict[str, str] = {}  # added to the environment

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory) if self.memory else 0

    def devices_of(self, replica: int) -> tuple[str, ...]:
        """The device of each rank of a replica, "cuda" made "cuda:0"."""
        if not isinstance(self.device, str):
            first = replica * self.tp % len(self.device)
            return tuple(_numbered(device) for device in self.device[first : first + self.tp])
        kind, _, number = _numbered(self.device).partition(":")
        return tuple(f"{kind}:{int(number) + rank}" if number else kind for rank in range(self.tp))

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """The share of one rank."""
        share = len(self.cores) // self.tp
        return self.cores[rank * share : (rank + 1) * share]

    @property
    def arena_bytes(self) -> int:
        return parse_bytes(self.arena)

    @property
    def window_bytes(self) -> int:
        return parse_bytes(self.window)

    def connector_options(self) -> ConnectorOptions:
        """What this stage's connectors are opened with."""
        return ConnectorOptions(
            arena_bytes=self.arena_bytes,
            window_chunks=self.window_chunks,
            window_bytes=self.window_bytes,
            max_chunk_bytes=parse_bytes(self.max_chunk),
            hang_timeout_s=self.hang_timeout_s,
        )


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[run]`: how the processes are watched, restarted and stopped."""

    drain_s: SecondsOrZero = 10.0  # from SIGTERM until what still runs is killed
    heartbeat_s: Annotated[float, Meta(gt=0, le=5)] = 1.0
    max_restarts: CountOrZero = 5  # of one replica within `restart_window_s`; one more and it is given up
    restart_window_s: Seconds = 60.0
    restart_delay_s: SecondsOrZero = 0.2  # before the first restart; doubles with each that follows
    restart_delay_max_s: SecondsOrZero = 10.0
    max_queued_requests: CountOrZero = 64  # waiting in one client (a gateway is one); beyond: 429


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `file` is where it was read from; it is no key of it."""

    pipeline: PipelineInfo
    stage: tuple[StageConfig, ...]
    gateway: GatewayConfig = GatewayConfig()
    session: SessionConfig = SessionConfig()
    run: RunConfig = RunConfig()
    deploy: dict[str, DeployConfig] = {}  # stage name -> placement
    tasks: dict[str, str] = {}  # task -> stage that it enters at
    file: str = ""

    @property
    def name(self) -> str:
        return self.pipeline.name

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        return self.stage

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def folder(self) -> Path:
        """What relative paths are relative to, and where the user's own stage classes lie."""
        return self.path.parent

    def deployed(self, stage: str) -> DeployConfig:
        """The placement of `stage`; the defaults when the file says nothing."""
        return self.deploy.get(stage, DeployConfig())

    def stage_named(self, name: str) -> StageConfig:
        """The stage of that name. Raises KeyError."""
        for stage in self.stage:
            if stage.name == name:
                return stage
        raise KeyError(name)


# ---- reading -----------------------------------------------------------------------------------------------------------------


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read, override and check a pipeline file.

    Args:
        path: the TOML file.
        overrides: "stage.llm.args.max_tokens=200", "gateway.port=0"; the value is TOML, or else text.

    Raises:
        ConfigError: the file is not there, not TOML, or says something that streamrt does not understand.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="give the path of a pipeline.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can not be read: {error}") from None
    return parse_pipeline(text, path, overrides)


def parse_pipeline(text: str, path: Path | str = "pipeline.toml", overrides: Sequence[str] = ()) -> PipelineConfig:
    """`load_pipeline` for text that is already here; `path` is what messages call it and what relative paths start from."""
    path = Path(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", hint='text needs quotes: name = "voice"') from None
    changed = [_override(data, override) for override in overrides]
    where = Where(str(path), frozenset(changed))
    config = _check_names(convert(data, PipelineConfig, where, skip=("file",)), where)
    gateway = msgspec.structs.replace(
        config.gateway,
        tls_cert=_beside(path, config.gateway.tls_cert),
        tls_key=_beside(path, config.gateway.tls_key),
    )
    return msgspec.structs.replace(config, gateway=gateway, file=str(path.absolute()))


def _beside(path: Path, value: str) -> str:
    return str((path.parent / Path(value).expanduser()).absolute()) if value else ""


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _check_ranks(key: str, deploy: DeployConfig, where: Where) -> None:
    """Devices and cores can be dealt out to the ranks."""
    if not isinstance(deploy.device, str) and len(deploy.device) not in (deploy.tp, deploy.tp * deploy.replicas):
        numbers = " or ".join(map(str, sorted({deploy.tp, deploy.tp * deploy.replicas})))
        raise where.error(
            f"{key}.device", f"{len(deploy.device)} devices", f"{numbers}: one for each rank of a replica, or of all replicas"
        )
    for replica in range(deploy.replicas):
        gpus = [device for device in deploy.devices_of(replica) if device != "cpu"]
        if len(set(gpus)) < len(gpus) or 0 < len(gpus) < deploy.tp:
            raise where.error(
                f"{key}.device", show(deploy.device), "a GPU of its own for each rank of a replica, or the CPU for all of them"
            )
    if len(deploy.cores) % deploy.tp:
        raise where.error(f"{key}.cores", f"{len(deploy.cores)} cores", f"a multiple of {deploy.tp}: each rank gets its share")


def _check_names(config: PipelineConfig, where: Where) -> PipelineConfig:
    """What names refer to is there; what a name means is for `pipeline.py` to say."""
    names = [stage.name for stage in config.stage]
    if not names:
        raise where.error("stage", "no stage", "at least one [[stage]]", hint='add [[stage]] with name = "echo" and use = "echo"')
    for name in names:
        if name in ("client", "gateway"):
            raise where.error(f"stage.{name}.name", quote(name), "another name: this one is taken by the runtime itself")
    for name, deploy in config.deploy.items():
        if name not in names:
            raise where.error(f"deploy.{name}", f"[deploy.{name}]", f"the name of a stage: {any_of(names)}", hint=did_you_mean(name, names))
        if deploy.hang_timeout_s < 2 * config.run.heartbeat_s:
            expected = f"at least {2 * config.run.heartbeat_s:g}, twice run.heartbeat_s"
            raise where.error(f"deploy.{name}.hang_timeout_s", f"{deploy.hang_timeout_s:g}", expected)
        _check_ranks(f"deploy.{name}", deploy, where)
    for task, stage in config.tasks.items():
        if task not in TASKS:
            raise where.error(f"tasks.{task}", f"task {quote(task)}", any_of(TASKS), hint=did_you_mean(task, TASKS))
        if stage not in names:
            raise where.error(f"tasks.{task}", quote(stage), f"the name of a stage: {any_of(names)}", hint=did_you_mean(stage, names))
    if bool(config.gateway.tls_cert) != bool(config.gateway.tls_key):
        have, lack = ("tls_cert", "tls_key") if config.gateway.tls_cert else ("tls_key", "tls_cert")
        raise where.error(f"gateway.{lack}", "nothing", f"a path, because {have} is set", hint="set both for TLS, or neither")
    return config


def _override(data: dict[str, Any], override: str) -> str:
    """Put one `key.path=value` into the file's data; returns the key path that is now of its making."""
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {override}: got no KEY=VALUE", hint="write it as --set gateway.port=0")
    where = Where("--set")
    node: Any = data
    parts = key.split(".")
    made = ""
    for depth, part in enumerate(parts[:-1]):
        here = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            names = [str(item.get("name", "")) for item in node if isinstance(item, dict)]
            if part not in names:
                raise where.error(here, quote(part), f"the name of a stage: {any_of(names)}", hint=did_you_mean(part, names))
            node = node[[isinstance(item, dict) and item.get("name") == part for item in node].index(True)]
        elif isinstance(node, dict):
            made = made or (here if part not in node else "")
            node = node.setdefault(part, {})
        else:
            raise where.error(here, show(node), "a table")
    if not isinstance(node, dict):
        raise where.error(key, show(node), "a key inside a table", hint="a stage's keys are set as stage.<name>.<key>")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    node[parts[-1]] = parsed["value"] if parsed.keys() == {"value"} else text
    return made or key


# ---- checking ----------------------------------------------------------------------------------------------------------------


class Where(msgspec.Struct, frozen=True):
    """Where data came from, to say so when it is wrong."""

    file: str
    overridden: frozenset[str] = frozenset()  # key paths that came from `--set`

    def error(self, key: str, got: str, expected: str, *, hint: str = "") -> ConfigError:
        """`file: key: got X, expected Y`"""
        place = "--set" if any(key == k or key.startswith(f"{k}.") for k in self.overridden) else self.file
        return ConfigError(f"{place}: {key}: got {got}, expected {expected}", hint=hint, param=key)


def convert(data: Any, to: type[S], where: Where, key: str = "", *, skip: Sequence[str] = ()) -> S:
    """`data` (as TOML or JSON gives it) as a `to` struct; strict, and exact about the place that is wrong.

    Args:
        data: what was read.
        to: a msgspec Struct; nested structs, tuples of structs and dicts of structs are followed.
        where: what messages call the source.
        key: the key path of `data` itself.
        skip: fields that are no keys.
    """
    if not isinstance(data, dict):
        hint = f"write [[{key}]], once per {key}" if key == "stage" else ""
        raise where.error(key, show(data), "a table", hint=hint)
    fields = {field.name: field for field in msgspec.structs.fields(to) if field.name not in skip}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in fields:
            path = f"{key}.{name}" if key else name
            expected = any_of(fields) if fields else "no keys here"
            raise where.error(path, f"unknown key {quote(name)}", expected, hint=did_you_mean(name, fields))
        values[name] = _convert_value(value, fields[name].type, where, f"{key}.{name}" if key else name)
    for name, field in fields.items():
        if field.required and name not in values:
            path = f"{key}.{name}" if key else name
            hint = "add [[stage]]" if path == "stage" else f"add [{path}]" if not key else f"add {name} = ..."
            raise where.error(path, "nothing", expectation(field.type), hint=hint)
    try:
        return to(**values)
    except (TypeError, ValueError) as error:  # from a struct's own __post_init__
        raise ConfigError(f"{where.file}: {key}: {error}", param=key) from None


def _convert_value(value: Any, to: Any, where: Where, key: str) -> Any:
    plain = _strip(to)
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if _is_struct(plain):
        return convert(value, plain, where, key)
    if origin is tuple and _is_struct(arguments[0]):
        if not isinstance(value, list):
            raise where.error(key, show(value), "a list of tables", hint=f"write [[{key}]] instead of [{key}]")
        return tuple(convert(item, arguments[0], where, f"{key}.{_label(item, i)}") for i, item in enumerate(value))
    if origin is dict and _is_struct(arguments[1]):
        if not isinstance(value, dict):
            raise where.error(key, show(value), "tables by name", hint=f"write [{key}.<name>]")
        return {name: convert(item, arguments[1], where, f"{key}.{name}") for name, item in value.items()}
    try:
        return msgspec.convert(value, to, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        inside = f" ({error})" if isinstance(value, dict | list) else ""
        raise where.error(key, show(value), expectation(to) + inside, hint=_mend(value, plain)) from None


def _mend(value: Any, plain: Any) -> str:
    """What the user most likely meant by a value of the wrong type."""
    if plain is str and not isinstance(value, str | dict | list):
        return f'text needs quotes: "{value}"'
    if typing.get_origin(plain) in (tuple, list) and not isinstance(value, dict | list):
        return f"write it as a list: [{show(value)}]"
    if typing.get_origin(plain) is Literal and isinstance(value, str):
        return did_you_mean(value, [str(choice) for choice in typing.get_args(plain)])
    if plain in (int, float, bool) and isinstance(value, str) and re.fullmatch(r"[\d.]+|true|false", value):
        return f"write it without quotes: {value}"
    return ""


def _to_path(to: type, value: Any) -> Any:
    if to is Path:
        return Path(value)  # a TypeError from here becomes a ValidationError
    raise NotImplementedError(f"Args fields of type {to} can not be read from TOML")


def _label(item: Any, index: int) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) and name else str(index + 1)


def _strip(to: Any) -> Any:
    return typing.get_args(to)[0] if typing.get_origin(to) is Annotated else to


def _is_struct(to: Any) -> bool:
    return isinstance(to, type) and issubclass(to, msgspec.Struct)


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_LIMITS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "min_length": "length at least",
    "max_length": "length at most",
}


def expectation(to: Any) -> str:
    """A type in the user's words."""
    if typing.get_origin(to) is Annotated:
        plain, *metas = typing.get_args(to)
        for meta in metas:
            if isinstance(meta, Meta) and meta.description:
                return meta.description
        limits = [f"{_LIMITS[k]} {getattr(m, k)}" for m in metas if isinstance(m, Meta) for k in _LIMITS if getattr(m, k) is not None]
        return ", ".join([expectation(plain), *limits])
    origin, arguments = typing.get_origin(to), typing.get_args(to)
    if origin is Literal:
        return any_of(arguments)
    if origin in (list, tuple, set, frozenset):
        return f"a list, each {expectation(arguments[0])}" if arguments else "a list"
    if origin is dict or _is_struct(to):
        return "a table"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expectation(argument) for argument in arguments if argument is not type(None))
    return _WORDS[to] if to in _WORDS else str(getattr(to, "__name__", to))


def quote(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def show(value: object) -> str:
    """A value as the user wrote it, cut short."""
    text = _toml_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def any_of(choices: Iterable[object]) -> str:
    """`one of "a", "b"`, or just `"a"`."""
    names = [quote(choice) for choice in choices]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the closest known name, "" when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {quote(close[0])}?" if close else ""


def parse_bytes(text: str) -> int:
    """ "64MiB" -> 67108864. KiB, MiB, GiB, TiB are powers of two; KB, MB, GB, TB of ten. Raises ConfigError."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        raise ConfigError(f'got {quote(text)}, expected a size such as "64MiB" or "2GiB"')
    return int(float(match[1]) * _UNITS[match[2].lower().removesuffix("b") + "b"])


# ---- writing -----------------------------------------------------------------------------------------------------------------


def to_json(config: PipelineConfig) -> str:
    """For the Welcome message; `from_json` gives the same config back."""
    return msgspec.json.encode(config).decode()


def from_json(text: str | bytes) -> PipelineConfig:
    return msgspec.json.decode(text, type=PipelineConfig)


def to_toml(config: PipelineConfig) -> str:
    """The effective pipeline file: what differs from the defaults, readable by `parse_pipeline`."""
    blocks = [_table("[pipeline]", _said(config.pipeline))]
    blocks += [_table(f"[{name}]", _said(getattr(config, name))) for name in ("gateway", "session", "run")]
    blocks.insert(3, _table("[session.turn_detection]", _said(config.session.turn_detection)))
    for stage in config.stage:
        blocks.append(_table("[[stage]]", {k: v for k, v in _said(stage).items() if k != "args"}))
        blocks.append(_table("[stage.args]", stage.args))
    blocks += [_table(f"[deploy.{name}]", _said(deploy)) for name, deploy in config.deploy.items()]
    blocks.append(_table("[tasks]", config.tasks))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _said(struct: msgspec.Struct) -> dict[str, Any]:
    """Fields that differ from their default, without nested structs."""
    said = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and not isinstance(value, msgspec.Struct):
            said[field.name] = value
    return said


def _table(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items())]) if values else ""


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(str(key))} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)
