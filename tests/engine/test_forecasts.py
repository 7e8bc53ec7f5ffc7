"""Forecasts are right for every model once it has run, whatever had been estimated, and nothing moves for it twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio

pytestmark = pytest.mark.accelerator

LINK = 25e9
"""What the planner assumes of RAM where nothing was measured, as in these tests."""


def step_seconds(studio: Studio, draw: Callable[[int], Any]) -> float:
    """Virtual seconds of a step: what four more of them take."""
    clock = studio.world.clock
    begin = clock()
    draw(4)
    between = clock()
    draw(8)
    return float(clock() - 2 * between + begin) / 4


def model_of(studio: Studio, family: str) -> tuple[Any, Callable[[Any, int], Any]]:
    """A model, and how to draw so many steps with it."""
    if family == "flux":
        return studio.flux(), lambda model, steps: studio.latent(model, steps=steps)
    model, clip, empty = studio.wan(), studio.clip(), torch.zeros(1, 16, 2, 8, 8)
    if family == "sd15":
        (model, clip, _), empty = studio.sd15(), torch.zeros(1, 4, 8, 8)
    words = studio.text(clip, "a house by the sea")
    return model, lambda model, steps: studio.latent(model, words, steps=steps, empty=empty)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if " a step takes " in (line := record.getMessage())]


@pytest.mark.parametrize("family", ["flux", "wan", "sd15"])
@pytest.mark.parametrize("flops", [1e8, 1e14])
def test_the_forecast_after_the_first_prompt(
    studio: Studio, caplog: pytest.LogCaptureFixture, family: str, flops: float
) -> None:
    """At 1e8 the model computes for much longer than estimated, at 1e14 its link decides."""
    from multigpu.plan import explain

    caplog.set_level(logging.INFO, "multigpu")
    zero = studio.accelerators[0]
    studio.world.set_bandwidth("cpu", zero, LINK)
    studio.world.set_compute_rate(zero, flops=flops)
    model, draw = model_of(studio, family)
    placed = studio.place(model, f"{zero},40%;cpu,*")
    state = studio.states.of(placed)
    assert "(an estimate)" in explain.one_line(placed.placed.plan)
    draw(placed, 4)
    first = state.forecast()
    assert first is not None and first.measured
    draw(placed, 4)  # blocks may be moved before it
    changed, second = state.residence.plan != placed.placed.plan, state.forecast()
    true = step_seconds(studio, lambda steps: draw(placed, steps))
    for told in (second, state.forecast(), second if changed else first):
        assert told is not None and told.step == pytest.approx(true, rel=0.1)
    assert len(lines(caplog)) <= 1


def test_the_same_prompt_twice_moves_no_byte(studio: Studio) -> None:
    """After the second prompt, before which the plan may have changed."""
    zero = studio.accelerators[0]
    studio.world.set_bandwidth("cpu", zero, LINK)
    studio.world.set_compute_rate(zero, flops=1e9)
    placed = studio.place(studio.flux(), f"{zero},40%;cpu,*")
    state = studio.states.of(placed)
    pictures = [studio.latent(placed, steps=5) for _ in range(2)]
    streamer, homes = state.residence.streamer, {p.block: p.home for p in state.residence.plan.placements}
    resting = {name: tensor.data_ptr() for name, tensor in placed.model.named_parameters()}
    pictures += [studio.latent(placed, steps=5) for _ in range(3)]
    assert state.residence.streamer is streamer
    assert {p.block: p.home for p in state.residence.plan.placements} == homes
    assert {name: tensor.data_ptr() for name, tensor in placed.model.named_parameters()} == resting
    assert all(torch.equal(picture, pictures[0]) for picture in pictures)


def test_blocks_are_exchanged_between_prompts_if_that_is_faster(
    studio: Studio, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner is told that the last blocks compute all the time, so it streams those; they come all at once."""
    from multigpu.devices.inventory import Inventory
    from multigpu.host.placing import placer

    caplog.set_level(logging.INFO, "multigpu")
    zero, real = studio.accelerators[0], placer.blocks_of

    def late(*given: Any, **how: Any) -> Any:
        blocks = real(*given, **how)
        return [replace(b, compute=1.0 if (b.order or 0) > 0.7 * len(blocks) else 1e-6) for b in blocks]

    studio.world.set_bandwidth("cpu", zero, 0.6e9)
    studio.world.set_compute_rate(zero, flops=2e10)
    studio.placer = replace(studio.placer, inventory=Inventory(measure_link=lambda *link: 0.6e9))
    monkeypatch.setattr(placer, "blocks_of", late)
    placed = studio.place(studio.flux(), f"{zero},50%;cpu,*")
    before = studio.latent(placed, steps=5)
    state = studio.states.of(placed)
    assert state.residence.plan == placed.placed.plan
    slow = state.forecast()
    assert torch.equal(studio.latent(placed, steps=5), before)
    fast = state.forecast()
    (line,) = lines(caplog)
    assert slow is not None and fast is not None
    assert line.endswith("which is faster")
    assert state.residence.plan != placed.placed.plan
    assert fast.step < slow.step
    settled = state.residence.streamer
    for _ in range(2):
        assert torch.equal(studio.latent(placed, steps=5), before)
    assert state.residence.streamer is settled
    assert all(line.endswith("the plan stays") for line in lines(caplog)[1:])


def test_the_memory_report_says_how_long_a_step_takes(studio: Studio) -> None:
    from multigpu.telemetry.report import report

    zero = studio.accelerators[0]
    studio.world.set_bandwidth("cpu", zero, LINK)
    studio.world.set_compute_rate(zero, flops=1e9)
    placed = studio.place(studio.flux(), f"{zero},40%;cpu,*")
    studio.latent(placed, steps=1)

    def step() -> str:
        return report(studio.snapshot()).splitlines()[-2].rpartition("; ")[2]

    def told() -> dict[str, float]:
        return dict(studio.snapshot().to_json()["models"][0]["step"])

    assert step().endswith("(an estimate)")
    assert told()["forecast"] > 0 and told()["measured"] is None
    studio.latent(placed, steps=4)
    assert step().startswith("step ") and "estimate" not in step()
    true = step_seconds(studio, lambda steps: studio.latent(placed, steps=steps))
    assert told()["measured"] == pytest.approx(true, rel=0.1) == told()["forecast"], "both, by the simulator, too"
