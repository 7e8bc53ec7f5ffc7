"""Forecasts of plans that were not made by the planner, and other plans when compute times turn out to be others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multigpu.plan import CPU, Placement, Plan, Reason, explain, make_plan, parse_request
from multigpu.plan.forecast import foreseen, measured_seconds
from multigpu.plan.replan import replanned
from multigpu.plan.spill import relieved, spilled
from multigpu.plan.types import RAM_BANDWIDTH, Timing

from .shapes import FLUX_LINK, GPU0, GPU1, blocks_of, budget, flux_blocks, roomy

GB = 10**9


def plan_of(*blocks: tuple[str, int, float], ring: int = 0) -> Plan:
    """Blocks with home, bytes and seconds, called b0, b1, ..."""
    homes = {"gpu": GPU0, "cpu": CPU}
    placements = tuple(
        Placement(f"b{i}", size, homes[home], GPU0, Reason.RESIDENT if home == "gpu" else Reason.STREAMED)
        for i, (home, size, _) in enumerate(blocks)
    )
    return Plan(GPU0, placements, ring, timing=Timing(tuple(seconds for *_, seconds in blocks), ((CPU, 10e9),)))


def test_a_forecast_needs_a_timing() -> None:
    plan = plan_of(("gpu", GB, 1.0), ("cpu", GB, 1.0), ring=2 * GB)
    told = foreseen(plan, plan.timing).forecast
    assert told is not None and not told.measured
    assert told.step == told.compute == 2.0
    assert told.links == ((CPU, 0.1),)
    assert foreseen(plan, None).forecast is None


def test_a_link_that_nobody_knows_has_the_speed_that_is_assumed() -> None:
    plan = plan_of(("cpu", GB, 0.0), ring=GB)
    told = foreseen(plan, Timing((0.0,))).forecast
    assert told is not None and told.links == ((CPU, GB / RAM_BANDWIDTH),)


def test_what_is_spilled_or_relieved_has_a_forecast_of_its_own() -> None:
    budgets = [budget(GPU0, 100 * GB), budget(GPU1, 100 * GB, 20e9), budget(CPU, 100 * GB, 5e9)]
    plan = make_plan(parse_request("cuda:0,50%;cuda:1,*"), blocks_of(*[GB] * 8, seconds=0.1), budgets, GPU0)
    assert plan.forecast is not None and dict(plan.forecast.links) == {GPU1: pytest.approx(0.2)}
    less = spilled(plan, 2 * GB)
    assert less.forecast is not None
    assert dict(less.forecast.links) == {GPU1: pytest.approx(0.2), CPU: pytest.approx(less.bytes_on(CPU) / 5e9)}
    back = relieved(plan, GPU1, 1)
    assert back.forecast is not None
    assert dict(back.forecast.links) == {GPU1: pytest.approx(0.15), CPU: pytest.approx(0.2)}


def test_measured_times_are_divided_among_the_blocks_that_they_cover() -> None:
    """b1 was measured with b2, b3 with b0 of the next step: 6 s and 5 s, where 3 s and 1 s were assumed."""
    plan = plan_of(("gpu", 1, 1.0), ("cpu", 1, 1.0), ("gpu", 1, 2.0), ("cpu", 1, 0.0))
    assert measured_seconds(plan, {"b1": 6.0, "b3": 5.0}) == {"b0": 5.0, "b1": 2.0, "b2": 4.0, "b3": 0.0}


def test_blocks_that_were_assumed_to_take_no_time() -> None:
    plan = plan_of(("gpu", 1, 0.0), ("cpu", 1, 0.0), ("gpu", 1, 0.0))
    assert measured_seconds(plan, {"b1": 3.0}) == {"b0": 0.0, "b1": 3.0, "b2": 0.0}
    assert measured_seconds(plan, {}) == {"b0": 0.0, "b1": 0.0, "b2": 0.0}


def test_another_plan_for_the_times_that_were_measured() -> None:
    """The estimate takes all layers for equally fast; with the true times the search finds as good a plan as ever."""
    budgets = [budget(GPU0, 100 * GB), budget(CPU, 100 * GB, FLUX_LINK)]
    request, true = parse_request("cuda:0,50%;cpu,*"), flux_blocks()
    wrong = [replace(block, compute=block.bytes * 1e-9) for block in true]
    plan, best = (make_plan(request, blocks, budgets, GPU0) for blocks in (wrong, true))
    assert best.timing is not None and best.forecast is not None
    now = foreseen(plan, replace(best.timing, measured=True))
    other = replanned(now)
    assert now.forecast is not None and other.forecast is not None
    assert other.forecast.step < 0.97 * now.forecast.step
    assert other.forecast.step == pytest.approx(best.forecast.step, rel=0.01)
    largest = max(block.bytes for block in true)
    assert 0 <= plan.bytes_on(GPU0) - other.bytes_on(GPU0) < largest
    assert other.ring_bytes == plan.ring_bytes
    assert [p.block for p in other.placements] == [p.block for p in plan.placements]


def test_plans_that_stay() -> None:
    resident = make_plan(parse_request("cuda:0,100%"), blocks_of(GB), roomy(), GPU0)
    assert replanned(resident) is resident
    unknown = replace(plan_of(("cpu", GB, 1.0), ring=GB), timing=None)
    assert replanned(unknown) is unknown
    tight = plan_of(("gpu", 100 * GB, 1.0), ("cpu", GB, 1.0), ring=1)
    assert replanned(tight) is tight, "a ring of the size that the planner wants has no room"


def test_words_say_whether_a_step_was_measured() -> None:
    plan = plan_of(("gpu", GB, 1.0), ("cpu", GB, 1.0), ring=2 * GB)
    timing = plan.timing
    assert timing is not None
    estimated, measured = foreseen(plan, timing), foreseen(plan, replace(timing, measured=True))
    assert "; step about 2.000 s (an estimate), as fast as" in explain.one_line(estimated)
    assert "; step 2.000 s, as fast as" in explain.one_line(measured)
    assert "\nPredicted step: 2.000 s, as fast as" in explain.table(estimated)
    assert "\nMeasured step: 2.000 s, as fast as" in explain.table(measured)
