"""A plan with fewer bytes on a device than the user asked for, when there is less room than that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .forecast import foreseen
from .planner import default_ring
from .types import CPU, DISK, DeviceId, Plan, Reason

_MOVABLE = (Reason.RESIDENT, Reason.LOW_INTENSITY)


def spilled(plan: Plan, excess: float, in_file: Collection[str] = ()) -> Plan:
    """`plan` with resident blocks moved to RAM until the compute device needs at least `excess` bytes less.

    If the plan has blocks on disk, there is no room in RAM: then those that `in_file` names go to disk, too.

    Blocks that can be hoisted go first, then the largest; blocks with little compute time per byte go last. If all of
    them are not enough, all go. A ring that becomes necessary, or has to grow for a larger block, is counted as needed
    memory.
    """
    if excess <= 0 or plan.compute.is_cpu:
        return plan
    candidates = [p for p in plan.placements if p.home == plan.compute and p.reason in _MOVABLE]
    candidates.sort(key=lambda p: (not p.once, p.reason is Reason.LOW_INTENSITY, -p.bytes))
    largest = max((p.bytes for p in candidates), default=0)
    leaving: set[str] = set()
    freed, ring = 0, plan.ring_bytes
    for placement in candidates:
        if freed - (ring - plan.ring_bytes) >= excess:
            break
        leaving.add(placement.block)
        freed += placement.bytes
        ring = max(ring, placement.bytes) if plan.ring_bytes else default_ring(largest, freed)
    to_disk = in_file if plan.bytes_on(DISK) else ()
    placements = tuple(
        replace(p, home=DISK if p.block in to_disk else CPU, reason=Reason.HOISTED if p.once else Reason.STREAMED)
        if p.block in leaving
        else p
        for p in plan.placements
    )
    return foreseen(Plan(plan.compute, placements, ring), plan.timing)


def relieved(plan: Plan, donor: DeviceId, excess: float, in_file: Collection[str] = ()) -> Plan:
    """`plan` with blocks moved from a donor to RAM, the largest first, until it holds at least `excess` bytes less.

    From RAM itself, blocks that `in_file` names move to disk; the others stay.
    """
    resting = sorted((p for p in plan.placements if p.home == donor != plan.compute), key=lambda p: -p.bytes)
    if donor.is_cpu:
        resting = [placement for placement in resting if placement.block in in_file]
    leaving: set[str] = set()
    for placement in resting:
        if excess <= 0:
            break
        leaving.add(placement.block)
        excess -= placement.bytes
    return _with_home(plan, leaving, DISK if donor.is_cpu else CPU)


def off_disk(plan: Plan, blocks: Collection[str]) -> Plan:
    """`plan` with these blocks in RAM where it has them on disk."""
    return _with_home(plan, {p.block for p in plan.placements if p.home.is_disk and p.block in blocks}, CPU)


def _with_home(plan: Plan, blocks: Collection[str], home: DeviceId) -> Plan:
    placements = tuple(replace(p, home=home) if p.block in blocks else p for p in plan.placements)
    return foreseen(replace(plan, placements=placements), plan.timing) if blocks else plan
