"""The search: try several selections in the ring simulator and keep the best.

Deterministic: the candidates come in a fixed order and a later one wins only if it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from .ring_model import RESIDENT, RingModel

KEEP = (0.5, 0.75, 0.25, 1.0, 0.0)
BY_TIME = (1.0, 0.5, 0.0)
SIMPLE_RULES: tuple[Callable[[Work, int], Selection], ...] = (first_blocks, last_blocks, largest_blocks, even_blocks)
_GAIN = 1e-9


RUN = 4
"""Blocks are hoisted if that makes a run of so many steps faster: its first step is slower, and copies them as well."""
WORTH = 0.98
"""So much faster: as a share of the run in which nothing is hoisted. Hoisting takes some memory, too."""
AHEAD = 0.005
"""Seconds that the first step takes longer for each coming one: for nine, Flux was measured with 0.042 s on an H200."""


@dataclass(frozen=True, slots=True)
class Donors:
    """The donors as columns: quotas, free bytes, and the links' bytes per second; which of them is the model file."""

    quotas: tuple[int, ...]
    free: tuple[int, ...]
    speeds: tuple[float, ...]
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The link of each block, or `RESIDENT`, and which of the blocks that leave are hoisted."""

    links: list[int]
    hoisted: frozenset[int] = frozenset()

    def seconds(self, work: Work, ring: RingModel) -> float:
        """Of a step in which what is hoisted is not copied."""
        copied = [RESIDENT if i in self.hoisted else link for i, link in enumerate(self.links)]
        return ring.step_seconds(work.seconds, work.sizes, copied)


def quick_links(work: Work, donors: Donors) -> Assignment:
    """One good assignment without a search: low-intensity blocks stay, the rest is spread over the step's time.

    Blocks that can be hoisted leave first.
    """
    rest, need, hoisted = _hoisting(work, donors)
    return _assigned(work, donors, spread_blocks(rest, need, KEEP[0], BY_TIME[0]), hoisted)


def best_links(work: Work, donors: Donors, ring: RingModel) -> Assignment:
    """The fastest assignment found; in the simulator it is never slower than any of `SIMPLE_RULES`.

    Blocks are hoisted only where copies that cannot be hidden would take longer.
    """
    plain, seconds = _fastest(work, donors, ring, work, sum(donors.quotas), frozenset(), step_limit(work, donors))
    computing = sum(work.seconds)
    if not work.once or seconds <= computing * (1.0 + _GAIN):
        return plain
    rest, need, hoisted = _hoisting(work, donors)
    ahead, later = _fastest(work, donors, ring, rest, need, hoisted, max(computing, need / sum(donors.speeds)))
    first = ring.step_seconds(work.seconds, work.sizes, ahead.links)
    first += (RUN - 1) * (AHEAD + sum(work.seconds[i] for i in ahead.hoisted))
    return ahead if first + (RUN - 1) * later < WORTH * RUN * seconds else plain


def _fastest(
    work: Work, donors: Donors, ring: RingModel, rest: Work, need: int, hoisted: frozenset[int], limit: float
) -> tuple[Assignment, float]:
    """The fastest assignment in which `need` bytes of the `rest` leave besides what is hoisted, and its seconds.

    Stops early at one that takes no longer than `limit`, because no other can be faster.
    """
    best, best_seconds = Assignment([]), float("inf")
    for selection in candidates(rest, need):
        assignment = _assigned(work, donors, selection, hoisted)
        seconds = assignment.seconds(work, ring)
        if seconds < best_seconds * (1.0 - _GAIN):
            best, best_seconds = assignment, seconds
        if best_seconds <= limit * (1.0 + _GAIN):
            break
    return best, best_seconds


def _hoisting(work: Work, donors: Donors) -> tuple[Work, int, frozenset[int]]:
    """What leaves besides the blocks that are hoisted: of which blocks, how many bytes; and those that are hoisted.

    All that can be hoisted leave, or as many as have to leave, spread over the step.
    """
    need = sum(donors.quotas)
    able = work.only(sorted(work.once))
    hoisted = frozenset(even_blocks(able, need))
    rest = work.only([i for i in work.movable if i not in hoisted])
    return rest, max(need - sum(work.sizes[i] for i in hoisted), 0), hoisted


def _assigned(work: Work, donors: Donors, selection: Iterable[int], hoisted: frozenset[int]) -> Assignment:
    slowest = sorted(range(len(donors.speeds)), key=lambda d: donors.speeds[d])
    leaving = sorted({*selection, *hoisted})
    links = assign_links(work, leaving, donors.quotas, donors.free, donors.disk, hoisted, slowest)
    return Assignment(links, hoisted)


def step_limit(work: Work, donors: Donors) -> float:
    """A lower limit for every assignment: the compute time, or the time that a link needs for its quota if longer."""
    transfers = (quota / speed for quota, speed in zip(donors.quotas, donors.speeds, strict=True))
    return max(sum(work.seconds), *transfers, 0.0)


def candidates(work: Work, need: int) -> Iterator[Selection]:
    """Each selection once, however many rules make it."""
    spread = (spread_blocks(work, need, keep, by_time) for by_time in BY_TIME for keep in KEEP)
    seen: set[tuple[int, ...]] = set()
    for selection in chain(spread, (rule(work, need) for rule in SIMPLE_RULES)):
        key = tuple(selection)
        if key not in seen:
            seen.add(key)
            yield selection
