"""Which blocks leave the compute device, and which donor takes each.

A selection is a set of blocks that leave. It has at least the bytes that must leave; without its smallest block it
would have too few. Each rule below makes one selection; `search` compares them with the ring simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .ring_model import RESIDENT


@dataclass(frozen=True, slots=True)
class Work:
    """The blocks of a model as columns, in order of execution.

    `movable` holds the indices of the blocks that may leave, each of at least one byte. `by_intensity` holds the same
    indices, sorted by compute time per byte; of equal blocks the later one comes first. `progress` is the share of the
    step's time that has passed after each block. `in_file` holds the indices of the blocks that may rest in the file,
    `once` those of the movable blocks that can be hoisted.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    movable: tuple[int, ...]
    movable_bytes: int
    by_intensity: tuple[int, ...]
    progress: tuple[float, ...]
    in_file: frozenset[int]
    once: frozenset[int]

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        seconds: Sequence[float],
        movable: Sequence[int],
        in_file: Iterable[int] = (),
        once: Iterable[int] = (),
    ) -> Work:
        whole = sum(seconds) or 1.0
        return cls(
            tuple(sizes),
            tuple(seconds),
            tuple(movable),
            sum(sizes[i] for i in movable),
            tuple(sorted(reversed(movable), key=lambda i: seconds[i] / sizes[i])),
            tuple(done / whole for done in accumulate(seconds)),
            frozenset(in_file),
            frozenset(once) & frozenset(movable),
        )

    def only(self, movable: Sequence[int]) -> Work:
        """The same work, of which only these blocks may leave, and none can be hoisted."""
        return Work.of(self.sizes, self.seconds, movable, self.in_file)


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
    """Blocks spread evenly over the bytes of the movable blocks."""
    return spread_blocks(work, need, keep=0.0, by_time=0.0)


def spread_blocks(work: Work, need: int, keep: float, by_time: float) -> Selection:
    """Blocks spread over a step, low-intensity ones left out.

    Of the movable bytes that need not leave, the share `keep` (0 to 1) is reserved for the blocks with the least
    compute time per byte: these stay. Of the other blocks, going through the step, one is selected whenever the
    selected bytes are behind the progress of the step, which is measured in time (`by_time` 1), in bytes of these
    blocks (0), or a mixture.
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
    """The blocks with the least compute time per byte, as many as fit into `budget` bytes."""
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
    """Add blocks in the order of `more` until `need` is reached, then drop those that are not needed, largest first."""
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


def assign_links(
    work: Work,
    selection: Selection,
    quotas: Sequence[int],
    free: Sequence[int],
    disk: int | None = None,
    hoisted: frozenset[int] = frozenset(),
    slowest: Sequence[int] = (),
) -> list[int]:
    """The donor of each block: an index into `quotas`, or `RESIDENT`.

    Donors take turns in proportion to their quotas, so that each link is busy during the whole step. The last block of
    a donor may exceed its quota by less than the block; if the donor's `free` bytes are too few for that, another donor
    that has room takes the block. Blocks that cannot rest in the file never go to `disk`, the file's place among the
    donors; then there must be another donor. Blocks of the selection that are `hoisted` are copied so rarely that the
    `slowest` donors take them first.
    """
    links = [RESIDENT] * len(work.sizes)
    held = [0] * len(quotas)
    every = range(len(quotas))
    others = [d for d in every if d != disk]
    for i in sorted(selection, key=lambda i: i not in hoisted):
        size = work.sizes[i]
        donors: Sequence[int] = every if disk is None or i in work.in_file else others
        if i in hoisted:
            roomy = [d for d in slowest if d in donors and held[d] < quotas[d] and held[d] + size <= free[d]]
            donors = roomy[:1] or donors
        best, best_key = donors[0], (3, 0.0)
        for d in donors:
            over_quota = held[d] >= quotas[d]
            over_free = held[d] + size > free[d]
            key = (over_quota * 2 + over_free, (held[d] + size / 2) / quotas[d] if quotas[d] else float("inf"))
            if key < best_key:
                best, best_key = d, key
        links[i] = best
        held[best] += size
    return links
