"""How far the reading of files has come, from what a whole process has read."""

from __future__ import annotations

ALMOST = 99
"""Percent. Only the loader knows when a file is read to its end."""


class Reading:
    """Turns samples of a byte counter, which other activity changes too, into percents of `total` that never fall."""

    def __init__(self, total: int, sample: int) -> None:
        self._total = max(total, 1)
        self._last = sample
        self._read = 0

    def percent(self, sample: int) -> int:
        """At most `ALMOST`. If the counter falls, because an earlier file was unmapped, counting goes on from there."""
        self._read += max(0, sample - self._last)
        self._last = sample
        return min(ALMOST, 100 * self._read // self._total)
