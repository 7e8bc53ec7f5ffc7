"""What the steps of one model took, and the plans and forecasts that follow from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ...plan import Forecast, Plan, explain
from ...plan.forecast import foreseen, measured_seconds
from ...plan.replan import replanned
from ...plan.types import Timing

if TYPE_CHECKING:
    from ...stream.step_times import StepTime, StepTimes

log = logging.getLogger("multigpu")

_Key = TypeVar("_Key")
_Thing = TypeVar("_Thing")

OFF = 0.05
"""If a step takes longer or shorter than forecast by more than this share, another plan is looked for. That one has to
be faster by the same share, by the simulator: changing plans moves weights."""
_CHANGES = 3
"""How often plans are changed for a model at most."""
_LATEST = 8
"""Of how many sizes of its input, and for how many plans, the latest ones, something is remembered of a model."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """A measured step, and the compute seconds of every block that follow from it."""

    time: StepTime
    seconds: dict[str, float]


class MeasuredSteps:
    """Of one model. The steps of a prompt are read before the next one; a plan changes only between prompts."""

    def __init__(self) -> None:
        self._facts: dict[int, _Facts] = {}
        self._followed: dict[int | None, int] = {}
        self._latest: int | None = None
        self._news: tuple[_Facts, Forecast] | None = None
        self._instead: dict[Plan, Plan] = {}
        self._changes = 0

    def learn(self, times: StepTimes) -> None:
        """Take in what was timed since the last call."""
        time = times.read()
        forecast = None if time is None else self.foreseen(time.plan).forecast
        if time is None or forecast is None:
            return
        facts = _Facts(time, measured_seconds(time.plan, time.computing))
        self._followed[self._latest] = self._latest = time.activations
        _remember(self._facts, time.activations, facts)
        if abs(forecast.step - time.seconds) > OFF * time.seconds:
            self._news = facts, forecast

    def foreseen(self, plan: Plan) -> Plan:
        """A plan with the forecast for the next steps: as measured, once there is a measurement of this model."""
        facts = self._expected(plan)
        if facts is None:
            return plan
        expected = _simulated(plan, facts)
        if plan == facts.time.plan and expected.forecast is not None:
            forecast = replace(expected.forecast, step=facts.time.seconds, simulated=expected.forecast.step)
            return replace(expected, forecast=forecast)
        return expected

    def plan_for(self, asked: Plan, model: str) -> Plan:
        """The plan to load a model by when a node asked for `asked`: another one if steps have shown that it is faster.

        Both need the same memory. `model` is for the log.
        """
        facts, news, self._news = self._expected(asked), self._news, None
        plan = self._instead.get(asked, asked)
        if facts is not None and news is not None:
            faster = self._faster(plan, news[0]) if self._changes < _CHANGES else None
            self._changes += faster is not None
            _tell(model, *news, changes=faster is not None)
            plan = faster or plan
        elif facts is not None and asked not in self._instead:  # made by estimates, and not loaded yet
            plan = self._faster(plan, facts) or plan
        _remember(self._instead, asked, plan)
        return self.foreseen(plan)

    def _expected(self, plan: Plan) -> _Facts | None:
        """What is known of the next steps with a plan.

        What they will be given is not known yet. They are expected to be like those that followed the latest ones
        before, so that a workflow that samples in two sizes has two forecasts.
        """
        facts = self._facts.get(self._followed.get(self._latest, self._latest or 0))
        fits = facts is not None and plan.timing is not None and facts.time.plan.compute == plan.compute
        return facts if fits else None

    def _faster(self, plan: Plan, facts: _Facts) -> Plan | None:
        """A plan that is faster with these times, and not slower with others that were measured; None without one.

        The simulator has to find it faster than `plan`, and than what was measured of `plan`.
        """
        other, now = replanned(_simulated(plan, facts)), _step(plan, facts)
        if facts.time.plan == plan:
            now = min(now, facts.time.seconds)
        if _step(other, facts) >= (1.0 - OFF) * now:
            return None
        return other if all(_step(other, its) <= _step(plan, its) for its in self._facts.values()) else None


def _remember(things: dict[_Key, _Thing], key: _Key, thing: _Thing) -> None:
    things.pop(key, None)
    things[key] = thing
    if len(things) > _LATEST:
        del things[next(iter(things))]


def _tell(model: str, facts: _Facts, forecast: Forecast, *, changes: bool) -> None:
    known = "expected" if forecast.measured else "estimated"
    then = "other blocks are streamed from now on, which is faster" if changes else "the plan stays"
    words = "[MultiGPU] %s: a step takes %s, not %s as %s; %s"
    log.info(words, model, explain.seconds(facts.time.seconds), explain.seconds(forecast.step), known, then)


def _simulated(plan: Plan, facts: _Facts) -> Plan:
    assert plan.timing is not None
    assumed = zip(plan.placements, plan.timing.seconds, strict=True)
    seconds = tuple(facts.seconds.get(placement.block, before) for placement, before in assumed)
    return foreseen(plan, Timing(seconds, plan.timing.speeds, measured=True))


def _step(plan: Plan, facts: _Facts) -> float:
    forecast = _simulated(plan, facts).forecast
    assert forecast is not None
    return forecast.step
