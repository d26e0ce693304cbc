"""The bytes of a shared-memory area: a header page, one line per slot, and the slots.

    0        +--------------------------------------------------------------+
             | magic u64 | version u32 | classes u32 | total u64 | pid u64  |  header page, 4096 bytes: for people and tools;
             | then per class: slot_bytes u64 | count u64                   |  nothing is decided by what it says
    4096     +--------------------------------------------------------------+
             | generation u64 (odd = being written) | nbytes u64 | unused   |  one line of 64 bytes per slot, so that no two
             | ...                                                          |  slots share a cache line
    payloads +--------------------------------------------------------------+
             | slot 0 | slot 1 | ...  smallest class first                  |  each slot starts on a page
    total    +--------------------------------------------------------------+

The arena of a producer is one such area with several classes of slots; a jumbo area has one slot. Pure: numbers in, numbers out.

Source: size classes with free lists rather than a byte ring, so that a held slot blocks no other; see docs/protocol.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

MAGIC = 0x31_54_52_4D_41_45_52_54  # "TREAMRT1", little-endian
VERSION = 1
PAGE_BYTES = 4096
LINE_BYTES = 64  # of one slot; the generation is its first word
MIN_ARENA_BYTES = 128 * 2**10
JUMBO_STEP_BYTES = 2**20  # jumbo areas are whole MiB

# Slot sizes and the share of the arena that each class gets. Small classes need little; a class is left out of an arena
# that could not hold four of its slots.
_CLASSES: tuple[tuple[int, int], ...] = (
    (16 * 2**10, 1),
    (64 * 2**10, 3),
    (256 * 2**10, 4),
    (2**20, 8),
    (8 * 2**20, 16),
    (64 * 2**20, 32),
)

_HEAD = struct.Struct("<QIIQQ")
_CLASS = struct.Struct("<QQ")


@dataclass(frozen=True)
class Layout:
    """Where every slot of an area lies. `classes` is (slot_bytes, count), smallest first, and says all."""

    classes: tuple[tuple[int, int], ...]
    slot_class: tuple[int, ...] = field(init=False, repr=False, compare=False)  # slot -> index in `classes`
    payload_offset: tuple[int, ...] = field(init=False, repr=False, compare=False)  # slot -> first byte of its payload
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slots = sum(count for _, count in self.classes)
        offset = _pages(PAGE_BYTES + slots * LINE_BYTES)
        slot_class: list[int] = []
        payload_offset: list[int] = []
        for index, (slot_bytes, count) in enumerate(self.classes):
            if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or count <= 0:
                raise ValueError(f"slots are whole pages and at least one of a class: got {count} of {slot_bytes} bytes")
            for _ in range(count):
                slot_class.append(index)
                payload_offset.append(offset)
                offset += slot_bytes
        object.__setattr__(self, "slot_class", tuple(slot_class))
        object.__setattr__(self, "payload_offset", tuple(payload_offset))
        object.__setattr__(self, "total_bytes", offset)

    @property
    def slots(self) -> int:
        return len(self.slot_class)

    @property
    def max_payload_bytes(self) -> int:
        return self.classes[-1][0]

    def slot_bytes(self, slot: int) -> int:
        return self.classes[self.slot_class[slot]][0]

    def line_offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * LINE_BYTES

    def head(self, pid: int) -> bytes:
        """The header page's content."""
        head = _HEAD.pack(MAGIC, VERSION, len(self.classes), self.total_bytes, pid)
        return head + b"".join(_CLASS.pack(*size_and_count) for size_and_count in self.classes)


def arena_layout(arena_bytes: int) -> Layout:
    """Size classes for an arena of at most `arena_bytes` (at least MIN_ARENA_BYTES)."""
    room = max(arena_bytes, MIN_ARENA_BYTES) - PAGE_BYTES  # the header page
    kept = [(slot_bytes, share) for slot_bytes, share in _CLASSES if 4 * slot_bytes <= arena_bytes] or [_CLASSES[0]]
    shares = sum(share for _, share in kept)
    counts: list[int] = []
    left = room - PAGE_BYTES  # the slots' lines are rounded up to a page
    for slot_bytes, share in reversed(kept):
        cost = slot_bytes + LINE_BYTES
        count = min(max(1, round(room * share / shares / cost)), left // cost)
        counts.append(count)
        left -= count * cost
    counts[-1] += left // (kept[0][0] + LINE_BYTES)
    return Layout(tuple((slot_bytes, count) for (slot_bytes, _), count in zip(kept, reversed(counts), strict=True) if count))


def jumbo_layout(nbytes: int) -> Layout:
    """One slot for a payload larger than any slot of the arena, with some slack so that the next one fits too."""
    step = max(JUMBO_STEP_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return Layout(((-(-nbytes // step) * step, 1),))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
