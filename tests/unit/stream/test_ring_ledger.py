"""Bytes of the ring: never given to two holders, never lost."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from multigpu.stream.ring_ledger import Extent, RingLedger


def test_extents_follow_each_other_and_skip_an_end_that_is_too_short() -> None:
    ring = RingLedger(100)
    first, second = ring.reserve(40), ring.reserve(40)
    assert (first.start, second.start) == (0, 40)
    assert ring.reserve(30) is None, "20 bytes are left at the end, and the front is in use"
    ring.release(first)
    third = ring.reserve(30)
    assert (third.start, third.skipped) == (0, 20)
    assert ring.used == 40 + 20 + 30


def test_bytes_come_back_in_order_only() -> None:
    ring = RingLedger(100)
    first, second = ring.reserve(50), ring.reserve(50)
    ring.release(second)
    assert ring.used == 100, "the older one is still held"
    ring.release(first)
    assert ring.used == 0
    assert ring.reserve(100).start == 0


def test_what_is_left_of_an_extent() -> None:
    whole = Extent(10, 20, 0)
    parts = {
        (0, 5): [(10, 30)],
        (10, 20): [],
        (5, 10): [(15, 30)],
        (25, 10): [(10, 25)],
        (15, 5): [(10, 15), (20, 30)],
        (0, 100): [],
    }
    for (start, size), left in parts.items():
        assert [(part.start, part.end) for part in whole.without(Extent(start, size, 0))] == left


@given(st.integers(1, 200), st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=60))
def test_live_extents_never_overlap_and_fit(capacity: int, requests: list[tuple[int, bool]]) -> None:
    ring, live = RingLedger(capacity), deque[Extent]()
    for size, release in requests:
        extent = ring.reserve(size)
        if extent is not None:
            assert extent.start >= 0 and extent.end <= capacity and extent.size == size
            assert not any(extent.overlaps(other) for other in live)
            live.append(extent)
        else:
            assert size > capacity or live, "an empty ring holds whatever fits into it"
        if release and live:
            ring.release(live.popleft())
    while live:
        ring.release(live.popleft())
    assert ring.used == 0
