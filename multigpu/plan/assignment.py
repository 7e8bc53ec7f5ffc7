"""Which blocks leave the compute device, and which donor takes each.

A selection is the set of blocks that leave, together at least the bytes that must leave and over that by less than the
smallest block selected. The rules below each make one; `search` compares them with the ring simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .ring_model import RESIDENT


@dataclass(frozen=True, slots=True)
class Work:
    """The blocks of a model as columns, in order of execution.

    `movable` holds the indices of the blocks that may leave, each of at least one byte; `by_intensity` the same, those
    that compute least for their bytes first, the later of equal ones first. `progress` is the share of the step's time
    done after each block.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    movable: tuple[int, ...]
    movable_bytes: int
    by_intensity: tuple[int, ...]
    progress: tuple[float, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], seconds: Sequence[float], movable: Sequence[int]) -> Work:
        whole = sum(seconds) or 1.0
        return cls(
            tuple(sizes),
            tuple(seconds),
            tuple(movable),
            sum(sizes[i] for i in movable),
            tuple(sorted(reversed(movable), key=lambda i: seconds[i] / sizes[i])),
            tuple(done / whole for done in accumulate(seconds)),
        )


Selection = list[int]
"""Indices of the blocks that leave, ascending."""


def first_blocks(work: Work, need: int) -> Selection:
    """The first blocks of a step."""
    return _settle(work, need, (), work.movable)


def last_blocks(work: Work, need: int) -> Selection:
    """The last blocks of a step."""
    return _settle(work, need, (), reversed(work.movable))


def largest_blocks(work: Work, need: int) -> Selection:
    """The largest blocks, the earlier of two equal ones first."""
    return _settle(work, need, (), sorted(work.movable, key=lambda i: -work.sizes[i]))


def even_blocks(work: Work, need: int) -> Selection:
    """Every so-many-th byte of the movable blocks."""
    return spread_blocks(work, need, keep=0.0, by_time=0.0)


def spread_blocks(work: Work, need: int, keep: float, by_time: float) -> Selection:
    """Blocks spread over a step, low-intensity ones left out.

    Of the movable bytes that need not leave, the share `keep` (0 to 1) is held back for the blocks that compute least
    for their bytes. The rest is taken wherever the selected bytes lag behind the progress of the step, measured as
    time (`by_time` 1), as eligible bytes (0), or a mixture.
    """
    held = _held_back(work, int(keep * (work.movable_bytes - need)))
    eligible = [i for i in work.movable if i not in held]
    progress = _progress(work, eligible, by_time)
    chosen: list[int] = []
    taken = 0
    for i, share in zip(eligible, progress, strict=True):
        if share * need - taken >= work.sizes[i] / 2:
            chosen.append(i)
            taken += work.sizes[i]
    return _settle(work, need, chosen, reversed(work.by_intensity))


def _held_back(work: Work, budget: int) -> set[int]:
    """As many of the blocks that compute least for their bytes as fit into `budget` bytes."""
    held: set[int] = set()
    for i in work.by_intensity:
        budget -= work.sizes[i]
        if budget < 0:
            break
        held.add(i)
    return held


def _progress(work: Work, eligible: Sequence[int], by_time: float) -> list[float]:
    """How far the step is, 0 to 1, when each eligible block has run."""
    seen = list(accumulate(work.sizes[i] for i in eligible))
    return [
        by_time * work.progress[i] + (1.0 - by_time) * count / seen[-1] for i, count in zip(eligible, seen, strict=True)
    ]


def _settle(work: Work, need: int, chosen: Iterable[int], more: Iterable[int]) -> Selection:
    """Add blocks in the order of `more` until `need` is reached, then drop what is not needed, smallest last."""
    selected = set(chosen)
    taken = sum(work.sizes[i] for i in selected)
    for i in more:
        if taken >= need:
            break
        if i not in selected:
            selected.add(i)
            taken += work.sizes[i]
    spare = taken - need
    for i in sorted((i for i in selected if work.sizes[i] <= spare), key=lambda i: (-work.sizes[i], i)):
        if work.sizes[i] <= spare:
            spare -= work.sizes[i]
            selected.discard(i)
    return sorted(selected)


def assign_links(work: Work, selection: Selection, quotas: Sequence[int], free: Sequence[int]) -> list[int]:
    """The donor of each block: an index into `quotas`, or `RESIDENT`.

    Donors take turns in proportion to their quotas, so each one's link is busy all through the step. A donor below its
    quota may go over it by less than one block; one whose `free` bytes would not hold that passes the block on where
    another can take it.
    """
    links = [RESIDENT] * len(work.sizes)
    held = [0] * len(quotas)
    donors = range(len(quotas))
    for i in selection:
        size = work.sizes[i]
        best, best_key = 0, (3, 0.0)
        for d in donors:
            over_quota = held[d] >= quotas[d]
            over_free = held[d] + size > free[d]
            key = (over_quota * 2 + over_free, (held[d] + size / 2) / quotas[d] if quotas[d] else float("inf"))
            if key < best_key:
                best, best_key = d, key
        links[i] = best
        held[best] += size
    return links
