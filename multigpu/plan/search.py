"""The search: try several selections in the ring simulator and keep the best.

Deterministic: the candidates come in a fixed order and a later one wins only if it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from .assignment import (
    Selection,
    Work,
    assign_links,
    even_blocks,
    first_blocks,
    largest_blocks,
    last_blocks,
    spread_blocks,
)
from .ring_model import RingModel

KEEP = (0.5, 0.75, 0.25, 1.0, 0.0)
BY_TIME = (1.0, 0.5, 0.0)
SIMPLE_RULES: tuple[Callable[[Work, int], Selection], ...] = (first_blocks, last_blocks, largest_blocks, even_blocks)
_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Donors:
    """The donors as columns: quotas, free bytes, and the links' bytes per second."""

    quotas: tuple[int, ...]
    free: tuple[int, ...]
    speeds: tuple[float, ...]


def quick_links(work: Work, donors: Donors) -> list[int]:
    """One good assignment without a search: low-intensity blocks stay, the rest is spread over the step's time."""
    need = sum(donors.quotas)
    return assign_links(work, spread_blocks(work, need, KEEP[0], BY_TIME[0]), donors.quotas, donors.free)


def best_links(work: Work, donors: Donors, ring: RingModel) -> list[int]:
    """The fastest assignment found; in the simulator it is never slower than any of `SIMPLE_RULES`.

    Stops early at an assignment that is as fast as `step_limit`, because no other can be faster.
    """
    limit = step_limit(work, donors)
    best: list[int] = []
    best_seconds = float("inf")
    for selection in _candidates(work, sum(donors.quotas)):
        links = assign_links(work, selection, donors.quotas, donors.free)
        seconds = ring.step_seconds(work.seconds, work.sizes, links)
        if seconds < best_seconds * (1.0 - _GAIN):
            best, best_seconds = links, seconds
        if best_seconds <= limit * (1.0 + _GAIN):
            break
    return best


def step_limit(work: Work, donors: Donors) -> float:
    """A lower limit for every assignment: the compute time, or the time that a link needs for its quota if longer."""
    transfers = (quota / speed for quota, speed in zip(donors.quotas, donors.speeds, strict=True))
    return max(sum(work.seconds), *transfers, 0.0)


def _candidates(work: Work, need: int) -> Iterator[Selection]:
    """Each selection once, however many rules make it."""
    spread = (spread_blocks(work, need, keep, by_time) for by_time in BY_TIME for keep in KEEP)
    seen: set[tuple[int, ...]] = set()
    for selection in chain(spread, (rule(work, need) for rule in SIMPLE_RULES)):
        key = tuple(selection)
        if key not in seen:
            seen.add(key)
            yield selection
