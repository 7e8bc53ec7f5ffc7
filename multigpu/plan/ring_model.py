"""A discrete-event model of the staging ring: how long one step takes when some blocks are streamed.

The machine it models: one ring of `ring_bytes` on the compute device, addressed by bytes. Each streamed block needs one
contiguous extent; one that does not fit before the end of the ring starts again at the front and wastes the rest.
Copies are issued in order of execution as soon as there is room, one at a time on each link, and run ahead into the
next step. A block computes when the block before it is done and its own bytes have arrived; when it is done, its extent
is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESIDENT = -1
"""The link of a block that is not streamed."""
COPY_LATENCY = 3e-6
"""Fixed cost of one copy in seconds, in addition to its bytes divided by the speed."""
_MOST_STEPS = 6
_SAME = 1e-6


@dataclass(frozen=True, slots=True)
class RingModel:
    """A ring and the links that feed it: bytes per second of each source."""

    ring_bytes: int
    bandwidths: tuple[float, ...]
    latency: float = COPY_LATENCY

    def step_seconds(self, compute: Sequence[float], sizes: Sequence[int], links: Sequence[int]) -> float:
        """Seconds per step in the long run.

        One entry per block in order of execution: its compute seconds, its bytes, and the index of its link or
        `RESIDENT`. The first step, with an empty ring, does not count. A step differs from the next by where the
        extents fall in the ring, so the answer is the mean over the later steps unless they agree earlier.
        A block larger than the ring gets a ring of its own size.
        """
        gaps, own, extents, link_of, tail = _merge_residents(compute, sizes, links)
        if not own:
            return tail
        run = _Run(self, max(self.ring_bytes, max(extents)))
        ends = [0.0]
        for _ in range(_MOST_STEPS):
            run.step(gaps, own, extents, link_of)
            run.now += tail
            ends.append(run.now)
            last = ends[-1] - ends[-2]
            if len(ends) > 3 and abs(last - (ends[-2] - ends[-3])) <= _SAME * last:
                return last
        settled = _MOST_STEPS // 2
        return (ends[-1] - ends[settled]) / (_MOST_STEPS - settled)


def _merge_residents(
    compute: Sequence[float], sizes: Sequence[int], links: Sequence[int]
) -> tuple[list[float], list[float], list[int], list[int], float]:
    """Per streamed block: resident seconds before it, own seconds, bytes, link; and the resident seconds at the end."""
    gaps: list[float] = []
    own: list[float] = []
    extents: list[int] = []
    link_of: list[int] = []
    gap = 0.0
    for seconds, size, link in zip(compute, sizes, links, strict=True):
        if link == RESIDENT:
            gap += seconds
            continue
        gaps.append(gap)
        own.append(seconds)
        extents.append(size)
        link_of.append(link)
        gap = 0.0
    return gaps, own, extents, link_of, gap


class _Run:
    """The state of a run: the clock of the compute device, the ring, and when each link is free."""

    def __init__(self, model: RingModel, ring_bytes: int) -> None:
        self.now = 0.0
        self._capacity = ring_bytes
        self._seconds_per_byte = [1.0 / bandwidth for bandwidth in model.bandwidths]
        self._latency = model.latency
        self._link_free = [0.0] * len(model.bandwidths)
        self._live: list[tuple[int, float]] = []  # (bytes with those wasted before, end of use) in order
        self._oldest = 0
        self._head = 0
        self._used = 0
        self._room_since = 0.0

    def step(self, gaps: list[float], own: list[float], extents: list[int], links: list[int]) -> None:
        """Advance `now` to the end of the last streamed block of one step."""
        capacity, latency, per_byte, link_free = self._capacity, self._latency, self._seconds_per_byte, self._link_free
        live, oldest, head, used = self._live[self._oldest :], 0, self._head, self._used
        now, room_since = self.now, self._room_since
        for gap, seconds, size, link in zip(gaps, own, extents, links, strict=True):
            wasted, at = (capacity - head, 0) if head + size > capacity else (0, head)
            while used and used + wasted + size > capacity:
                freed, room_since = live[oldest]
                used -= freed
                oldest += 1
            if not used:
                wasted = at = 0
            head = at + size
            taken = wasted + size
            used += taken
            start = link_free[link]
            if room_since > start:
                start = room_since
            ready = start + size * per_byte[link] + latency
            link_free[link] = ready
            now += gap
            if ready > now:
                now = ready
            now += seconds
            live.append((taken, now))
        self._live, self._oldest, self._head, self._used = live, oldest, head, used
        self.now, self._room_since = now, room_since
