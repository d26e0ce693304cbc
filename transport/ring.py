"""Shared-memory ring of slots: one writer, readers that hold leases.

Knows bytes, slots and generations, and who has borrowed what. Knows nothing of requests' meaning, tensors, sockets or
asyncio, and never waits; `arena.py` adds waiting.

    loan -> fill -> seal(consumers) -> release(consumer) ... -> free      a slot's life
        \\-> abort ---------------------------------------------^

Rules
- Only the writer writes; readers map the memory read-only. The writer never reads back what it wrote to shared memory.
- A slot is read only after a message has named it, and reused only after every borrower has released it or died.
- The generation is odd while the slot is written and even when sealed; it never comes back, so a late reader notices.
- Free slots are a stack per size class: the slot used last is the one still in the cache.
- A holder (a request) may take another slot of a class only while more of that class are free than it holds: alone it gets half
  of the class, n holders share n/(n+1) of it, and a newcomer finds room however long the others stall.

Source: loaned samples as in iceoryx2; dynamic thresholds of shared-memory switches (Choudhury and Hahne, 1998).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Hashable, Iterable

import numpy as np

from transport.errors import TooLarge, WouldBlock
from transport.layout import Layout

_NOBODY: set[Hashable] = set()


class Loan:
    """A slot that the writer may fill: `payload` is all of its bytes."""

    __slots__ = ("borrowers", "generation", "holder", "payload", "ring", "slot")

    def __init__(self, ring: Ring, slot: int, generation: int, payload: np.ndarray, holder: Hashable) -> None:
        self.borrowers: set[Hashable] = _NOBODY  # once sealed: who has yet to release it
        self.ring = ring
        self.slot = slot
        self.generation = generation  # odd; even once sealed
        self.payload = payload
        self.holder = holder


class Ring:
    """The slots of one area. `file` is the number under which messages name it."""

    def __init__(self, layout: Layout, memory: memoryview, file: int = 0) -> None:
        self.layout = layout
        self.file = file
        head = layout.head(os.getpid())
        memory[: len(head)] = head
        lines = memory[layout.line_offset(0) : layout.line_offset(layout.slots)].cast("Q")
        self._lines = lines
        self._words_per_line = len(lines) // layout.slots
        self._generations = [0] * layout.slots
        self._payloads = [
            np.frombuffer(memory, np.uint8, layout.slot_bytes(slot), offset) for slot, offset in enumerate(layout.payload_offset)
        ]
        self._free: list[list[int]] = [[] for _ in layout.classes]
        for slot in reversed(range(layout.slots)):
            self._free[layout.slot_class[slot]].append(slot)
        self._held: list[dict[Hashable, int]] = [{} for _ in layout.classes]  # holder -> slots of that class
        self._sizes = [slot_bytes for slot_bytes, _ in layout.classes]
        self._classes = layout.slot_class
        self._out: dict[int, Loan] = {}  # by slot; every slot that is not free
        self.bytes_in_use = 0  # whole slots

    @property
    def slots_in_use(self) -> int:
        return len(self._out)

    @property
    def idle(self) -> bool:
        return not self._out

    def free_slots(self, size_class: int) -> int:
        return len(self._free[size_class])

    def holds(self, holder: Hashable) -> int:
        """How many slots `holder` has."""
        return sum(held.get(holder, 0) for held in self._held)

    def loan(self, nbytes: int, holder: Hashable) -> Loan:
        """A slot of at least `nbytes`, from the smallest class that has one to spare for `holder`.

        Raises:
            TooLarge: no class has slots of that size.
            WouldBlock: none to spare now.
        """
        sizes = self._sizes
        for size_class in range(bisect_left(sizes, nbytes), len(sizes)):
            free, held = self._free[size_class], self._held[size_class]
            mine = held.get(holder, 0)
            if mine < len(free):
                slot = free.pop()
                held[holder] = mine + 1
                self.bytes_in_use += sizes[size_class]
                loan = self._out[slot] = Loan(self, slot, self._bump(slot), self._payloads[slot], holder)
                return loan
        if nbytes <= sizes[-1]:
            raise WouldBlock(f"no slot of {nbytes} bytes to spare for {holder}")
        raise TooLarge(f"{nbytes} bytes, and the largest slot has {sizes[-1]}")

    def seal(self, loan: Loan, consumers: Iterable[Hashable], nbytes: int) -> None:
        """The slot is written; `consumers` may read it, each until it releases it."""
        self._lines[loan.slot * self._words_per_line + 1] = nbytes
        loan.generation = self._bump(loan.slot)
        loan.borrowers = set(consumers)

    def abort(self, loan: Loan) -> None:
        """Nobody will see what was written."""
        loan.generation = self._bump(loan.slot)
        self._give_back(loan)

    def release(self, slot: int, consumer: Hashable) -> bool:
        """`consumer` has done with `slot`; True when the slot is free again. Raises KeyError when it had not borrowed it."""
        loan = self._out[slot]
        borrowers = loan.borrowers
        borrowers.remove(consumer)
        if borrowers:
            return False
        self._give_back(loan)
        return True

    def drop(self, consumer: Hashable) -> int:
        """`consumer` is dead: give all that it had borrowed back. Returns how many slots that freed."""
        lent = [slot for slot, loan in self._out.items() if consumer in loan.borrowers]
        return sum(self.release(slot, consumer) for slot in lent)

    def close(self) -> None:
        """Let go of the memory; loans that are still out keep it until they are given back."""
        self._payloads.clear()
        self._lines = memoryview(bytearray(len(self._lines) * 8)).cast("Q")

    def _bump(self, slot: int) -> int:
        generation = self._generations[slot] + 1
        self._generations[slot] = generation
        self._lines[slot * self._words_per_line] = generation
        return generation

    def _give_back(self, loan: Loan) -> None:
        slot, holder = loan.slot, loan.holder
        del self._out[slot]
        size_class = self._classes[slot]
        held = self._held[size_class]
        left = held[holder] - 1
        if left:
            held[holder] = left
        else:
            del held[holder]
        self._free[size_class].append(slot)
        self.bytes_in_use -= self._sizes[size_class]
