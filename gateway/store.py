"""What outlives a connection, on disk: video jobs, and images that are answered as URLs.

    <state folder of the run>/store/<id>/item.json     what it is, atomically replaced
                                         content       its bytes, appended to while they are made

Knows files. Knows nothing of HTTP, or of what an item means to those who made it. All gateways of a run share one folder, so every look is a
look at the disk; all methods block, and are called on a thread.

Rules
- Bounded in count and in bytes: the oldest item that nobody works on gives way to a new one; when all are worked on, the new one is refused.
- An item goes when its time to live has passed since it was finished, except while its process works on it.
- An item is worked on by the process that made it, until `finish`. One whose process is gone stays as that process left it, `is_orphan`.
- Whoever deletes an item deletes it for all: its process finds it `Gone` at its next write.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from streamrt.errors import Overloaded, Unavailable
from streamrt.rundir import process_started

ID = re.compile(r"[a-z]{1,16}_[0-9a-f]{32}")  # nothing else becomes a path; 128 random bits, so who knows one was told
ITEM = "item.json"
CONTENT = "content"


class Gone(Exception):
    """Somebody has deleted the item."""


class Item(msgspec.Struct):
    """One thing that is kept. Written by the process that made it."""

    id: str
    created_at: float  # Unix time
    expires_at: float
    content_type: str
    state: dict[str, Any]  # what its maker says of it
    owner: tuple[int, int] | None = None  # (pid, its start) of the process that works on it; None = finished

    @property
    def is_held(self) -> bool:
        return self.owner is not None and process_started(self.owner[0]) == self.owner[1]

    @property
    def is_orphan(self) -> bool:
        """Its process went before it was finished."""
        return self.owner is not None and not self.is_held


class Store:
    """The items of one run. Made by each gateway; the folder is made with the first item."""

    def __init__(self, folder: Path, *, max_items: int, max_bytes: int, ttl_s: float) -> None:
        self._folder = folder
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._me = (os.getpid(), process_started(os.getpid()))

    def create(self, kind: str, state: dict[str, Any], content_type: str) -> Item:
        """A new item, held by this process. Raises Overloaded when there is no room, Unavailable."""
        self.sweep()
        self._make_room(items=1)
        now = time.time()
        item = Item(f"{kind}_{secrets.token_hex(16)}", now, now + self._ttl_s, content_type, state, self._me)
        with _writing(item.id):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / item.id).mkdir(mode=0o700)
        self.save(item)
        return item

    def save(self, item: Item) -> None:
        """Write what it is now. Raises Gone, Unavailable when the disk does not take it."""
        folder = self._folder / item.id
        draft = folder / f"{ITEM}.new"
        with _writing(item.id):
            draft.write_bytes(msgspec.json.encode(item))
            draft.rename(folder / ITEM)

    def append(self, item: Item, data: bytes) -> None:
        """Add to its content. Raises Gone, Overloaded, Unavailable."""
        self._make_room(size=len(data), but=item.id)
        with _writing(item.id), open(self._folder / item.id / CONTENT, "ab") as file:
            file.write(data)

    def discard(self, item: Item) -> None:
        """Delete its content."""
        self.content(item).unlink(missing_ok=True)

    def finish(self, item: Item) -> None:
        """Nobody works on it any more; its time to live begins. Raises Gone."""
        item.owner = None
        item.expires_at = time.time() + self._ttl_s
        self.save(item)

    def get(self, item_id: str) -> Item | None:
        """None when there is no such item, or none any more."""
        item = self._read(item_id) if ID.fullmatch(item_id) else None
        return None if item is None or self._is_expired(item) else item

    def items(self) -> list[Item]:
        """All of them, oldest first."""
        found = (self._read(name) for name in self._names())
        return sorted((item for item in found if item is not None and not self._is_expired(item)), key=lambda item: item.created_at)

    def content(self, item: Item) -> Path:
        return self._folder / item.id / CONTENT

    def delete(self, item_id: str) -> None:
        """It is gone at once, for all. Nothing happens when it is gone already."""
        gone = self._folder / f"gone-{secrets.token_hex(8)}"  # a folder half removed would look like a broken item
        try:
            (self._folder / item_id).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> float:
        """Delete what has expired, and what a killed process left half made. Returns the seconds until the next one expires."""
        now = time.time()
        next_s = self._ttl_s
        for name in self._names():
            item = self._read(name)
            if item is None:
                if now - self._touched(name) > self._ttl_s:
                    self.delete(name)
            elif self._is_expired(item):
                self.delete(name)
            elif not item.is_held:
                next_s = min(next_s, item.expires_at - now)
        for left in self._folder.glob("gone-*"):
            shutil.rmtree(left, ignore_errors=True)
        return max(0.0, next_s)

    def sweep_others(self) -> None:
        """The same for runs of other names, which perhaps nobody starts again."""
        for folder in self._folder.parent.parent.glob(f"*/{self._folder.name}"):
            Store(folder, max_items=self._max_items, max_bytes=self._max_bytes, ttl_s=self._ttl_s).sweep()

    def _make_room(self, *, items: int = 0, size: int = 0, but: str = "") -> None:
        """Delete the oldest items that nobody works on until there is room. Raises Overloaded."""
        kept = self.items()
        sizes = {item.id: self._size(item.id) for item in kept}
        while len(sizes) + items > self._max_items or sum(sizes.values()) + size > self._max_bytes:
            oldest = next((item for item in kept if item.id in sizes and item.id != but and not item.is_held), None)
            if oldest is None:
                raise Overloaded(
                    f"there is no room for another result: {len(sizes)} are being made, {sum(sizes.values())} bytes",
                    hint="[gateway] max_stored and max_stored_size set the limits",
                )
            self.delete(oldest.id)
            del sizes[oldest.id]

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if ID.fullmatch(name)]
        except FileNotFoundError:  # nothing was kept yet
            return []

    def _read(self, item_id: str) -> Item | None:
        try:
            return msgspec.json.decode((self._folder / item_id / ITEM).read_bytes(), type=Item)
        except (FileNotFoundError, msgspec.DecodeError):  # being made, deleted, or left half made by a crash
            return None

    def _size(self, item_id: str) -> int:
        try:
            return (self._folder / item_id / CONTENT).stat().st_size
        except FileNotFoundError:
            return 0

    def _touched(self, item_id: str) -> float:
        try:
            return (self._folder / item_id).stat().st_mtime
        except FileNotFoundError:
            return time.time()

    @staticmethod
    def _is_expired(item: Item) -> bool:
        return item.expires_at <= time.time() and not item.is_held


@contextmanager
def _writing(item_id: str) -> Iterator[None]:
    """Names what a write can fail of."""
    try:
        yield
    except FileNotFoundError:
        raise Gone(item_id) from None
    except OSError as error:
        raise Unavailable(f"results can not be kept: {error.strerror}", hint="STREAMRT_STATE_ROOT says where they go") from error
