"""What to expect of a plan: the simulator's step, by the compute times of the blocks and the speeds of the links."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from .ring_model import RESIDENT, RingModel
from .types import DeviceId, Forecast, Plan, Reason, Timing, assumed_speed


def foreseen(plan: Plan, timing: Timing | None) -> Plan:
    """`plan` with this timing, and the forecast that follows from it; with neither if there is no timing."""
    return replace(plan, timing=timing, forecast=None if timing is None else _forecast(plan, timing))


def link_speeds(plan: Plan, timing: Timing) -> dict[DeviceId, float]:
    """Bytes per second from each home away from the compute device."""
    held = plan.bytes_by_home()
    speeds = {home: speed for home, speed in timing.speeds if held.get(home)}
    for home in held:
        speeds.setdefault(home, assumed_speed(home))
    del speeds[plan.compute]
    return speeds


def step_seconds(plan: Plan, timing: Timing, retained: Container[str] = ()) -> float:
    """Of a step in which neither hoisted blocks are copied, as in every step but the first of a run, nor `retained`."""
    speeds = link_speeds(plan, timing)
    link_of = {home: link for link, home in enumerate(speeds)}
    return RingModel(plan.ring_bytes, tuple(speeds.values())).step_seconds(
        timing.seconds,
        [placement.bytes for placement in plan.placements],
        [
            RESIDENT if p.reason is Reason.HOISTED or p.block in retained else link_of.get(p.home, RESIDENT)
            for p in plan.placements
        ],
    )


def _forecast(plan: Plan, timing: Timing) -> Forecast:
    held, speeds = plan.bytes_by_home(), link_speeds(plan, timing)
    step = step_seconds(plan, timing)
    for placement in plan.hoisted:
        held[placement.home] -= placement.bytes
    links = tuple((home, held[home] / speed) for home, speed in speeds.items())
    return Forecast(step, sum(timing.seconds), links, timing.measured)


def measured_seconds(plan: Plan, measured: Mapping[str, float]) -> dict[str, float]:
    """Compute seconds of every block, by name, from those that were measured: each for a block and all that follow it.

    A measured time is divided among these blocks in proportion to what was assumed of them. Blocks before the first
    that was measured follow the last one, of the step before.
    """
    assert plan.timing is not None
    assumed = {p.block: seconds for p, seconds in zip(plan.placements, plan.timing.seconds, strict=True)}
    first = next((i for i, p in enumerate(plan.placements) if p.block in measured), 0)
    groups: list[list[str]] = []
    for placement in (*plan.placements[first:], *plan.placements[:first]):
        if placement.block in measured:
            groups.append([])
        if groups:
            groups[-1].append(placement.block)
    seconds = dict(assumed)
    for group in groups:
        whole = sum(assumed[block] for block in group)
        for block in group:
            share = assumed[block] / whole if whole else float(block == group[0])
            seconds[block] = measured[group[0]] * share
    return seconds
