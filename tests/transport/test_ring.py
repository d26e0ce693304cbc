"""The ring and its layout: pure, so tried against a plain model."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.errors import TooLarge, WouldBlock
from transport.layout import LINE_BYTES, MAGIC, PAGE_BYTES, Layout, arena_layout, jumbo_layout
from transport.ring import Loan, Ring

KIB, MIB = 2**10, 2**20


def make_ring(*classes: tuple[int, int]) -> tuple[Ring, memoryview]:
    layout = Layout(classes)
    memory = memoryview(bytearray(layout.total_bytes))
    return Ring(layout, memory), memory


def generation(memory: memoryview, layout: Layout, slot: int) -> int:
    return int(struct.unpack_from("<Q", memory, layout.line_offset(slot))[0])


# ---- layout ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2 * 2**30))
def test_an_arena_stays_within_its_size_and_uses_most_of_it(arena_bytes: int) -> None:
    layout = arena_layout(arena_bytes)
    asked = max(arena_bytes, 128 * KIB)
    assert layout.total_bytes <= asked
    assert layout.total_bytes >= 0.8 * asked
    assert all(smaller[0] < larger[0] for smaller, larger in zip(layout.classes, layout.classes[1:], strict=False))


@pytest.mark.parametrize("layout", [arena_layout(64 * MIB), arena_layout(1), jumbo_layout(20 * MIB)], ids=["arena", "least", "jumbo"])
def test_slots_lie_apart_on_pages(layout: Layout) -> None:
    end = layout.line_offset(layout.slots)
    assert layout.line_offset(1) - layout.line_offset(0) == LINE_BYTES
    for slot, offset in enumerate(layout.payload_offset):
        assert offset % PAGE_BYTES == 0
        assert offset >= end
        end = offset + layout.slot_bytes(slot)
    assert end == layout.total_bytes


@given(st.integers(4 * MIB, 2**31))
def test_a_jumbo_slot_fits_with_little_slack(nbytes: int) -> None:
    slot_bytes = jumbo_layout(nbytes).max_payload_bytes
    assert nbytes <= slot_bytes <= 1.25 * nbytes
    assert jumbo_layout(slot_bytes).max_payload_bytes == slot_bytes


def test_the_header_page_says_what_the_area_is() -> None:
    ring, memory = make_ring((4 * KIB, 3), (8 * KIB, 1))
    magic, version, classes, total = struct.unpack_from("<QIIQ", memory)
    assert (magic, version, classes, total) == (MAGIC, 1, 2, ring.layout.total_bytes)
    assert magic.to_bytes(8, "little") == b"TREAMRT1"


@pytest.mark.parametrize("classes", [((0, 1),), ((100, 1),), ((4 * KIB, 0),)])
def test_an_impossible_layout_is_refused(classes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        Layout(classes)


# ---- ring -----------------------------------------------------------------------------------------------------------------


def test_the_generation_is_odd_while_written_and_even_when_sealed() -> None:
    ring, memory = make_ring((4 * KIB, 2))
    loan = ring.loan(10, "r")
    assert loan.generation == generation(memory, ring.layout, loan.slot) == 1
    loan.payload[:10] = 7
    ring.seal(loan, ["a"], 10)
    assert loan.generation == generation(memory, ring.layout, loan.slot) == 2
    offset = ring.layout.payload_offset[loan.slot]
    assert bytes(memory[offset : offset + 10]) == b"\7" * 10
    ring.release(loan.slot, "a")
    again = ring.loan(10, "r")
    assert again.generation == 3
    ring.abort(again)
    assert generation(memory, ring.layout, again.slot) == 4


def test_the_slot_freed_last_is_used_first() -> None:
    ring, _ = make_ring((4 * KIB, 8))
    loans = [ring.loan(1, holder) for holder in "abcd"]
    for loan in loans:
        ring.abort(loan)
    assert ring.loan(1, "a").slot == loans[-1].slot


def test_a_payload_takes_the_smallest_class_that_has_a_slot_to_spare() -> None:
    ring, _ = make_ring((4 * KIB, 1), (16 * KIB, 2))
    assert len(ring.loan(4 * KIB, "a").payload) == 4 * KIB
    assert len(ring.loan(4 * KIB, "b").payload) == 16 * KIB
    assert len(ring.loan(5 * KIB, "c").payload) == 16 * KIB
    with pytest.raises(WouldBlock):
        ring.loan(1, "d")
    with pytest.raises(TooLarge):
        ring.loan(16 * KIB + 1, "e")


def test_a_holder_leaves_as_much_as_it_takes() -> None:
    ring, _ = make_ring((4 * KIB, 8))
    for _ in range(4):
        ring.loan(1, "greedy")
    with pytest.raises(WouldBlock):
        ring.loan(1, "greedy")
    for _ in range(2):
        ring.loan(1, "second")
    with pytest.raises(WouldBlock):
        ring.loan(1, "second")
    ring.loan(1, "third")
    ring.loan(1, "fourth")
    with pytest.raises(WouldBlock):
        ring.loan(1, "fifth")


def test_a_shared_slot_is_free_when_every_borrower_has_done() -> None:
    ring, _ = make_ring((4 * KIB, 2))
    loan = ring.loan(1, "r")
    ring.seal(loan, ["a", "b", "c"], 1)
    assert not ring.release(loan.slot, "b")
    with pytest.raises(KeyError):
        ring.release(loan.slot, "b")
    assert ring.drop("a") == 0
    assert ring.slots_in_use == 1
    assert ring.drop("c") == 1
    assert ring.idle
    assert ring.bytes_in_use == 0
    with pytest.raises(KeyError):
        ring.release(loan.slot, "a")


def test_a_closed_ring_takes_loans_back_and_lets_the_memory_go() -> None:
    ring, memory = make_ring((4 * KIB, 2))
    loan = ring.loan(1, "r")
    ring.close()
    ring.abort(loan)
    assert generation(memory, ring.layout, loan.slot) == 1
    assert ring.idle


HOLDERS, CONSUMERS = ("r1", "r2", "r3"), ("c1", "c2")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("loan"), st.integers(1, 20 * KIB), st.sampled_from(HOLDERS)),
        st.tuples(st.just("seal"), st.integers(0, 9), st.sets(st.sampled_from(CONSUMERS), min_size=1)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.none()),
        st.tuples(st.just("release"), st.integers(0, 9), st.sampled_from(CONSUMERS)),
        st.tuples(st.just("drop"), st.just(0), st.sampled_from(CONSUMERS)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_the_ring_agrees_with_a_plain_model(operations: list[tuple[str, int, object]]) -> None:
    classes = ((4 * KIB, 4), (16 * KIB, 3))
    ring, memory = make_ring(*classes)
    written: list[Loan] = []  # loans
    lent: dict[int, tuple[Loan, set[object], int]] = {}  # slot -> loan, who reads it, the byte that fills it
    held: Counter[tuple[object, int]] = Counter()  # (holder, class) -> slots
    seen: set[tuple[int, int]] = set()  # (slot, generation) ever sealed

    def freed(loan: Loan) -> None:
        held[loan.holder, ring.layout.slot_class[loan.slot]] -= 1

    for number, (operation, n, who) in enumerate(operations):
        if operation == "loan":
            free = [count - sum(held[holder, i] for holder in HOLDERS) for i, (_, count) in enumerate(classes)]
            spare = [i for i, (size, _) in enumerate(classes) if n <= size and held[who, i] < free[i]]
            if n > classes[-1][0]:
                with pytest.raises(TooLarge):
                    ring.loan(n, who)
            elif not spare:
                with pytest.raises(WouldBlock):
                    ring.loan(n, who)
            else:
                loan = ring.loan(n, who)
                assert ring.layout.slot_class[loan.slot] == spare[0]
                assert loan.slot not in lent
                assert all(loan.slot != other.slot for other in written)
                held[who, spare[0]] += 1
                written.append(loan)
        elif operation == "seal" and written:
            loan = written.pop(n % len(written))
            loan.payload[:] = number % 251
            ring.seal(loan, who, len(loan.payload))
            assert (loan.slot, loan.generation) not in seen
            seen.add((loan.slot, loan.generation))
            lent[loan.slot] = (loan, set(who), number % 251)
        elif operation == "abort" and written:
            loan = written.pop(n % len(written))
            ring.abort(loan)
            freed(loan)
        elif operation == "release" and lent:
            slot = list(lent)[n % len(lent)]
            loan, readers, _ = lent[slot]
            if who not in readers:
                with pytest.raises(KeyError):
                    ring.release(slot, who)
            else:
                readers.discard(who)
                assert ring.release(slot, who) == (not readers)
                if not readers:
                    del lent[slot]
                    freed(loan)
        elif operation == "drop":
            mine = [slot for slot, (_, readers, _) in lent.items() if who in readers]
            alone = [slot for slot in mine if lent[slot][1] == {who}]
            assert ring.drop(who) == len(alone)
            for slot in mine:
                lent[slot][1].discard(who)
            for slot in alone:
                freed(lent.pop(slot)[0])
        assert ring.slots_in_use == len(written) + len(lent)
        assert ring.bytes_in_use == sum(ring.layout.slot_bytes(slot) for slot in [*lent, *(loan.slot for loan in written)])
        for slot, (loan, _, byte) in lent.items():
            assert generation(memory, ring.layout, slot) == loan.generation
            payload = np.frombuffer(memory, np.uint8, ring.layout.slot_bytes(slot), ring.layout.payload_offset[slot])
            assert payload[0] == payload[-1] == byte
