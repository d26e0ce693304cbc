"""Blocks of the key/value memory: who holds which, and which hold something that can be used again.

    free run --allocate--> held --release--> cached (has a key) --evict, the least recently used first--> free
                            ^  ^                |
                            |  +----- share ----+            without a key, release leads to free at once

Knows numbers and keys. Knows nothing of tensors, tokens' meaning or requests; `kv.py` has the memory, `scheduler.py` decides.

Rules
- Block 0 is never handed out: what has no place of its own is written there.
- A block is free, cached or held by one or more; held by nobody and keyed means cached.
- A key names everything that a block's content depends on: what came before it, its tokens, contents that tokens stand for (images, audio),
  and through the root the model's revision and adapter. Equal keys, equal content.
- Blocks of one sequence lie side by side when they can: a new one begins in the middle of the longest free run, so that the one before it can grow.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

EVICTED_AT_ONCE = 32  # at most, when one is needed: what comes next finds neighbours


class OutOfBlocks(Exception):
    """Fewer can be had than were asked for; nothing was taken."""


@dataclass
class PoolStats:
    """Counts since the start, in blocks."""

    hits: int = 0  # found by their key when a sequence was admitted
    misses: int = 0  # could have been found, had they been there
    evictions: int = 0


class Content(NamedTuple):
    """Tokens `start` to `end` of a prompt stand for something else: an image, audio, embeddings. None: nobody knows what, so nothing is reused."""

    start: int
    end: int
    digest: bytes | None


class PrefixKeys:
    """The keys of one sequence's whole blocks, one after the other as its tokens come."""

    def __init__(self, root: bytes, block_size: int, contents: Sequence[Content] = ()) -> None:
        self._block_size = block_size
        self._contents = contents
        self._end = min((content.start for content in contents if content.digest is None), default=None)
        self._keys: list[bytes] = []
        self._last = root

    def stop_at(self, position: int) -> None:
        """What is at `position` is no token: blocks from there on have no keys."""
        if self._end is None or position < self._end:
            self._end = position

    def upto(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Keys of the whole blocks among the first `length` tokens."""
        size = self._block_size
        if self._end is not None:
            length = min(length, self._end)
        for start in range(len(self._keys) * size, length - size + 1, size):
            digest = blake2b(self._last, digest_size=16)
            digest.update(array("q", tokens[start : start + size]).tobytes())
            for content in self._contents:
                if content.start < start + size and content.end > start and content.digest is not None:
                    digest.update(b"%d:%d:%s;" % (content.start - start, content.end - start, content.digest))
            self._last = digest.digest()
            self._keys.append(self._last)
        return self._keys[: length // size]


class FreeRuns:
    """Free blocks as runs of neighbours."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start] if end > start else []
        self._ends = [end] if end > start else []
        self._count = max(0, end - start)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        at = bisect_right(self._starts, block) - 1
        return at >= 0 and block < self._ends[at]

    def add(self, block: int) -> None:
        at = bisect_left(self._starts, block)
        joins_next = at < len(self._starts) and self._starts[at] == block + 1
        joins_last = at > 0 and self._ends[at - 1] == block
        if joins_next and joins_last:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_next:
            self._starts[at] = block
        elif joins_last:
            self._ends[at - 1] = block + 1
        else:
            self._starts.insert(at, block)
            self._ends.insert(at, block + 1)
        self._count += 1

    def take(self, count: int, after: int) -> list[int]:
        """`count` of them (there are as many), beginning right after `after` where that can be."""
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            at = bisect_left(self._starts, after + 1)
            if at < len(self._starts) and self._starts[at] == after + 1:
                start = after + 1
            else:
                at = max(range(len(self._starts)), key=lambda n: self._ends[n] - self._starts[n])
                start, end = self._starts[at], self._ends[at]
                if (end - start) // 2 >= missing:
                    start += (end - start) // 2
            end = min(start + missing, self._ends[at])
            self._remove(at, start, end)
            taken.extend(range(start, end))
            after = end - 1
        self._count -= count
        return taken

    def _remove(self, at: int, start: int, end: int) -> None:
        first, last = self._starts[at], self._ends[at]
        left, right = start > first, end < last
        if left and right:
            self._ends[at] = start
            self._starts.insert(at + 1, end)
            self._ends.insert(at + 1, last)
        elif left:
            self._ends[at] = start
        elif right:
            self._starts[at] = end
        else:
            del self._starts[at], self._ends[at]


class BlockPool:
    """All blocks of one engine: 1 to `blocks` - 1. `caches` off: nothing is found again."""

    def __init__(self, blocks: int, block_size: int, *, caches: bool = True) -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(f"got {blocks} blocks of {block_size} tokens, expected at least 2 of 1")
        self.blocks = blocks
        self.block_size = block_size
        self.caches = caches
        self.stats = PoolStats()
        self._free = FreeRuns(1, blocks)
        self._holders = [0] * blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody; the next to be evicted first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.blocks - 1 - self.available

    @property
    def cached(self) -> int:
        """Blocks that can be found by their key, held ones included."""
        return len(self._block_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest beginning of `keys`. They are nobody's until `share`."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """One holder more for each; of blocks that `match` found or that somebody holds."""
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int, after: int = 0) -> list[int]:
        """`count` blocks for one holder, the neighbours of `after` where they are free.

        Raises:
            OutOfBlocks: fewer are available.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} of {self.available}")
        if count > len(self._free):
            for _ in range(min(len(self._idle), max(count - len(self._free), EVICTED_AT_ONCE))):
                self._evict()
        blocks = self._free.take(count, after)
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """`block`, which somebody holds, now has the content that `key` names. Another that has it already stays the one that is found."""
        if self.caches and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each, the last one first: the end of a sequence is evicted before its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.add(block)

    def invalidate(self) -> None:
        """Forget every key: the weights changed. Who holds blocks keeps them."""
        while self._idle:
            self._evict()
        self._block_of.clear()
        self._key_of.clear()

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._free.add(block)
        self.stats.evictions += 1
