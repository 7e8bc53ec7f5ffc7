"""A plan with fewer bytes on a device than the user asked for, when there is less room than that."""

from __future__ import annotations

from dataclasses import replace

from .planner import default_ring
from .types import CPU, DeviceId, Plan, Reason

_MOVABLE = (Reason.RESIDENT, Reason.LOW_INTENSITY)


def spilled(plan: Plan, excess: float) -> Plan:
    """`plan` with resident blocks moved to RAM until the compute device needs at least `excess` bytes less.

    The largest blocks go first; blocks with little compute time per byte go last. If all of them are not enough, all
    go. A ring that becomes necessary, or has to grow for a larger block, is counted as needed memory.
    """
    if excess <= 0 or plan.compute.is_cpu:
        return plan
    candidates = [p for p in plan.placements if p.home == plan.compute and p.reason in _MOVABLE]
    candidates.sort(key=lambda p: (p.reason is Reason.LOW_INTENSITY, -p.bytes))
    leaving: set[str] = set()
    freed, ring = 0, plan.ring_bytes
    for placement in candidates:
        if freed - (ring - plan.ring_bytes) >= excess:
            break
        leaving.add(placement.block)
        freed += placement.bytes
        ring = max(ring, placement.bytes) if plan.ring_bytes else default_ring(candidates[0].bytes, freed)
    placements = tuple(
        replace(p, home=CPU, reason=Reason.STREAMED) if p.block in leaving else p for p in plan.placements
    )
    return Plan(plan.compute, placements, ring)


def relieved(plan: Plan, donor: DeviceId, excess: float) -> Plan:
    """`plan` with blocks moved from a donor to RAM, the largest first, until it holds at least `excess` bytes less."""
    resting = sorted((p for p in plan.placements if p.home == donor != plan.compute), key=lambda p: -p.bytes)
    leaving: set[str] = set()
    for placement in resting:
        if excess <= 0:
            break
        leaving.add(placement.block)
        excess -= placement.bytes
    placements = tuple(replace(p, home=CPU) if p.block in leaving else p for p in plan.placements)
    return replace(plan, placements=placements, forecast=None) if leaving else plan
