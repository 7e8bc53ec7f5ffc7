"""What is learnt from measured steps: forecasts that are right, and another plan where that is faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from multigpu.host.engine.measured_steps import MeasuredSteps
from multigpu.plan import CPU, Block, Forecast, Plan, make_plan, parse_request
from multigpu.plan.forecast import foreseen
from multigpu.plan.types import Timing
from multigpu.stream.step_times import StepTime
from tests.unit.plan.shapes import FLUX_LINK, GPU0, budget, flux_blocks

GB = 10**9
BUDGETS = [budget(GPU0, 100 * GB), budget(CPU, 100 * GB, FLUX_LINK)]


class Timed:
    """Steps of a model whose blocks take these seconds, as the simulator runs them."""

    def __init__(self, blocks: Sequence[Block], size: int = 4096) -> None:
        self.seconds = {block.name: block.compute or 0.0 for block in blocks}
        self.size = size
        self.plan: Plan | None = None

    def step(self, plan: Plan) -> Forecast:
        assert plan.timing is not None
        timing = Timing(tuple(self.seconds[p.block] for p in plan.placements), plan.timing.speeds)
        forecast = foreseen(plan, timing).forecast
        assert forecast is not None
        return forecast

    def run(self, plan: Plan) -> Any:
        """A prompt is drawn by this plan, and timed."""
        self.plan = plan
        return self

    def read(self) -> StepTime | None:
        plan, self.plan = self.plan, None
        if plan is None:
            return None
        streamed = {p.block for p in plan.streamed}
        computing: dict[str, float] = {}
        block = next(reversed([p.block for p in plan.streamed]))
        for placement in plan.placements:
            block = placement.block if placement.block in streamed else block
            computing[block] = computing.get(block, 0.0) + self.seconds[placement.block]
        return StepTime(plan, self.step(plan).step, computing, self.size)


def planned(blocks: Sequence[Block], request: str = "cuda:0,50%;cpu,*") -> Plan:
    return make_plan(parse_request(request), blocks, BUDGETS, GPU0)


def forecast(steps: MeasuredSteps, plan: Plan) -> Forecast:
    told = steps.foreseen(plan).forecast
    assert told is not None
    return told


@pytest.mark.parametrize("factor", [0.04, 0.25, 4.0, 30.0])
def test_a_forecast_that_was_far_off_is_right_after_the_first_prompt(factor: float) -> None:
    true = flux_blocks()
    asked, run = planned([replace(block, compute=(block.compute or 0) * factor) for block in true]), Timed(true)
    steps = MeasuredSteps()
    assert not forecast(steps, asked).measured
    steps.learn(run.run(asked))
    for plan in (asked, planned(true, "cuda:0,30%;cpu,*"), planned(true, "cuda:0,80%;cpu,*")):
        told = forecast(steps, plan)
        assert told.measured
        assert told.step == pytest.approx(run.step(plan).step, rel=0.1)
    assert forecast(steps, asked).step == run.step(asked).step


def test_the_plan_changes_once_if_another_one_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multigpu")
    true = flux_blocks()
    asked, run, steps = planned([replace(b, compute=b.bytes * 1e-9) for b in true]), Timed(true), MeasuredSteps()
    assert steps.plan_for(asked, "Flux") is asked
    plans = [asked]
    for _ in range(5):
        steps.learn(run.run(plans[-1]))
        plans.append(steps.plan_for(asked, "Flux"))
    settled = plans[-1]
    assert settled != asked and plans[2:] == [settled] * 4
    assert run.step(settled).step < 0.95 * run.step(asked).step
    assert settled.bytes_on(GPU0) + settled.ring_bytes <= asked.bytes_on(GPU0) + asked.ring_bytes
    (line, *more) = [record.getMessage() for record in caplog.records]
    assert line == (
        "[MultiGPU] Flux: a step takes 0.303 s, not 23.803 s as estimated; "
        "other blocks are streamed from now on, which is faster"
    )
    assert more == []


def test_a_plan_that_is_asked_for_later_goes_by_the_facts_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multigpu")
    true = flux_blocks()
    wrong, run, steps = [replace(b, compute=b.bytes * 1e-9) for b in true], Timed(true), MeasuredSteps()
    first, second = planned(wrong, "cuda:0,80%;cpu,*"), planned(wrong)
    steps.learn(run.run(first))
    steps.plan_for(first, "Flux")
    caplog.clear()
    plan = steps.plan_for(second, "Flux")
    assert run.step(plan).step < 0.95 * run.step(second).step
    assert steps.plan_for(second, "Flux") == plan
    assert caplog.records == []


def test_the_plan_stays_if_no_other_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multigpu")
    true = [Block(f"b{i}", GB, compute=0.1) for i in range(8)]
    asked, run, steps = planned([replace(b, compute=1.0) for b in true]), Timed(true), MeasuredSteps()
    for _ in range(3):
        steps.learn(run.run(asked))
        assert steps.plan_for(asked, "Model") == asked
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "[MultiGPU] Model: a step takes 0.800 s, not 8.000 s as estimated; the plan stays"


def test_a_forecast_that_was_right_takes_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multigpu")
    true = flux_blocks()
    asked, steps = planned(true), MeasuredSteps()
    steps.learn(Timed(true).run(asked))
    assert steps.plan_for(asked, "Flux") == asked
    assert caplog.records == []


def test_a_workflow_that_samples_in_two_sizes_has_two_forecasts() -> None:
    small, large = Timed(flux_blocks(0.2), 4096), Timed(flux_blocks(1.1), 4 * 4096)
    asked, steps = planned(flux_blocks(0.2)), MeasuredSteps()
    for prompt in range(4):
        for run in (small, large):
            plan = steps.plan_for(asked, "Flux")
            assert plan == asked and plan.forecast is not None
            if prompt > 1:
                assert plan.forecast.measured and plan.forecast.step == pytest.approx(run.step(plan).step)
            steps.learn(run.run(plan))


def test_only_the_latest_sizes_are_remembered() -> None:
    asked, steps = planned(flux_blocks()), MeasuredSteps()
    for size in range(100):
        steps.learn(Timed(flux_blocks(0.2 + size), size).run(asked))
    assert forecast(steps, asked).step == pytest.approx(99.2)
    assert len(steps._facts) == 8


def test_times_of_another_compute_device_do_not_count() -> None:
    true = flux_blocks()
    asked, steps = planned(true), MeasuredSteps()
    steps.learn(Timed(flux_blocks(5.0)).run(replace(asked, compute=CPU)))
    assert not forecast(steps, asked).measured
    assert steps.plan_for(asked, "Flux") is asked


def test_a_plan_without_a_timing_is_left_alone() -> None:
    asked, steps = planned(flux_blocks()), MeasuredSteps()
    bare = replace(asked, timing=None, forecast=None)
    read = Timed(flux_blocks()).run(asked).read()
    assert read is not None

    class Bare:
        def read(self) -> StepTime | None:
            return replace(read, plan=bare)

    steps.learn(Bare())  # type: ignore[arg-type]
    assert steps.foreseen(asked) is asked
    steps.learn(Timed(flux_blocks()).run(asked))
    assert steps.foreseen(bare) is bare
