"""Which streamed blocks stay on the compute device, when there is room beside what the plan uses."""

from __future__ import annotations

from collections.abc import Mapping

from .assignment import Selection, Work, even_blocks
from .forecast import step_seconds
from .search import candidates
from .types import Plan


def retained(plan: Plan, sizes: Mapping[str, int], room: int) -> frozenset[str]:
    """Of the blocks in `sizes`, those that stay: by these bytes they fit into `room`, and the step is the fastest.

    The simulator says how fast it is. All other streamed blocks of the plan that are not hoisted stay already. Without
    a timing blocks are taken evenly.
    """
    bytes_of = [sizes.get(placement.block, 0) for placement in plan.placements]
    seconds = bytes_of if plan.timing is None else plan.timing.seconds
    work = Work.of(bytes_of, seconds, [i for i, size in enumerate(bytes_of) if size])
    others = {placement.block for placement in plan.streamed if placement.block not in sizes}

    def staying(leaving: Selection) -> frozenset[str]:
        left = {plan.placements[i].block for i in leaving}
        return frozenset(block for block in sizes if block not in left)

    leaving = max(work.movable_bytes - room, 0)
    if plan.timing is None or not leaving:
        return staying(even_blocks(work, leaving))
    timing = plan.timing
    return min(map(staying, candidates(work, leaving)), key=lambda stays: step_seconds(plan, timing, others | stays))
