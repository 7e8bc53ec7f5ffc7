"""Another plan for the same memory, when compute times turn out to be others than were assumed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .forecast import foreseen
from .planner import make_plan
from .request import Expert, Mode, Part
from .types import Block, DeviceBudget, Plan, Reason, assumed_speed

_MOVABLE = (Reason.RESIDENT, Reason.LOW_INTENSITY, Reason.STREAMED, Reason.HOISTED)


def replanned(plan: Plan) -> Plan:
    """The fastest plan by the timing of `plan`, with as many bytes on each device, on donors up to one block more.

    `plan` itself if it streams nothing, or if the other one needs more memory of the compute device.
    """
    if not plan.streamed or plan.timing is None:
        return plan
    blocks = [
        Block(p.block, p.bytes, None, seconds, None if p.reason in _MOVABLE else p.reason, once=p.once)
        for p, seconds in zip(plan.placements, plan.timing.seconds, strict=True)
    ]
    held, speeds = plan.bytes_by_home(), dict(plan.timing.speeds)
    room = 2 * plan.total_bytes + plan.ring_bytes
    budgets = [DeviceBudget(home, room, room, speeds.get(home, assumed_speed(home))) for home in held]
    donors = (Part(home, count) for home, count in held.items() if home != plan.compute)
    request = Expert(Mode.BYTES, (*donors, Part(plan.compute, None, remainder=True)))
    other = make_plan(request, blocks, budgets, plan.compute, ring_bytes=plan.ring_bytes)
    return other if _needed(other) <= _needed(plan) else plan


def unhoisted(plan: Plan, blocks: Collection[str]) -> Plan:
    """The fastest plan for the same memory that hoists none of these blocks; `plan` itself if it does not."""
    if not any(placement.block in blocks for placement in plan.hoisted):
        return plan
    placements = tuple(
        replace(p, once=False, reason=Reason.STREAMED if p.reason is Reason.HOISTED else p.reason)
        if p.block in blocks
        else p
        for p in plan.placements
    )
    return replanned(foreseen(replace(plan, placements=placements), plan.timing))


def _needed(plan: Plan) -> int:
    return plan.bytes_on(plan.compute) + plan.ring_bytes
