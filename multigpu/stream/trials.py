"""Timing of work on a device, by the device's own clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

PIECES = 4
"""How many pieces of work are timed in one burst."""
STEADY = 0.02
"""Bursts are repeated until one is faster than those before it by no more than this share."""
AT_LEAST, AT_MOST = 0.02, 0.1
"""Seconds of work in all bursts together."""


def burst(module: Any, stream: Any, work: Callable[[], Any]) -> list[float]:
    """Seconds of each of `PIECES` pieces of work, which `work` queues on a stream and which follow without a pause.

    One more goes before them and is not timed: while it runs, the others are queued. Otherwise the time that this
    process takes to queue them would count, and it is as long as the work itself.
    """
    marks: list[Any] = []
    for _ in range(PIECES + 1):
        work()
        mark = module.Event(enable_timing=True)
        mark.record(stream)
        marks.append(mark)
    marks[-1].synchronize()
    return [float(begin.elapsed_time(end)) / 1e3 for begin, end in pairwise(marks)]


def steady(next_burst: Callable[[], list[float]]) -> float:
    """Seconds of the fastest piece in bursts that are repeated until they get no faster; 0 if the clock stands still.

    A device that was idle is slow at first: its clocks and its link leave a state of low power while it works.
    """
    best, spent = math.inf, 0.0
    while True:
        times = next_burst()
        before, best = best, min(best, *times)
        spent += sum(times)
        if not best or spent >= AT_MOST or (spent >= AT_LEAST and best >= before * (1.0 - STEADY)):
            return best
