"""Byte accounting of the staging ring. PURE.

Extents are reserved at the head and reclaimed from the tail in the order they were reserved; an extent is never
split, so the bytes before the end of the ring that are too short for it are skipped and come back with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Extent:
    """`size` bytes at `start`. `skipped` bytes before it belong to its footprint."""

    start: int
    size: int
    skipped: int
    done: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size

    def overlaps(self, other: Extent) -> bool:
        return self.start < other.end and other.start < self.end

    def without(self, other: Extent) -> list[Extent]:
        """What is left of it when `other`'s bytes are taken out: nothing, one part or two."""
        parts = ((self.start, min(self.end, other.start)), (max(self.start, other.end), self.end))
        return [Extent(start, end - start, 0) for start, end in parts if start < end]


class RingLedger:
    """Who holds which bytes of a ring of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._used = 0
        self._live: deque[Extent] = deque()

    @property
    def used(self) -> int:
        return self._used

    def reserve(self, size: int) -> Extent | None:
        """The next `size` bytes, contiguous; None (and no change) if they are not free now."""
        if not self._live:
            self._head = 0
        skipped = self.capacity - self._head if self._head + size > self.capacity else 0
        if self._used + skipped + size > self.capacity:
            return None
        extent = Extent((self._head + skipped) % self.capacity, size, skipped)
        self._live.append(extent)
        self._used += skipped + size
        self._head = extent.end % self.capacity
        return extent

    def release(self, extent: Extent) -> None:
        """The holder is done with it. Its bytes become free once all older extents are done too."""
        extent.done = True
        while self._live and self._live[0].done:
            oldest = self._live.popleft()
            self._used -= oldest.skipped + oldest.size
