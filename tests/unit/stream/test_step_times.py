"""Steps are timed by events: waiting for bytes apart from computing, and only whole steps count."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigpu.plan import CPU, DeviceId, Placement, Plan, Reason
from multigpu.stream import step_times
from multigpu.stream.step_times import STEPS, StepTimes

GPU = DeviceId("cuda", 0)
PLAN = Plan(GPU, (Placement("a", 1, CPU, GPU, Reason.STREAMED),))
DEVICE = torch.device("cuda", 0)


class Clock:
    """A device whose clock goes on when a module computes, or waits for its bytes."""

    now = 0.0
    done = tells = True

    def module(self) -> Any:
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at = clock.now

            def query(self) -> bool:
                return clock.done

            def elapsed_time(self, end: Event) -> float:
                if not clock.tells:
                    raise NotImplementedError("elapsed_time is not supported by XPUEvent.")
                return 1e3 * (end.at - self.at)

        return SimpleNamespace(Event=Event, current_stream=lambda device: None)


class Layer(torch.nn.Module):
    def __init__(self, clock: Clock, waits: float, computes: float) -> None:
        super().__init__()
        self.clock, self.waits, self.computes = clock, waits, computes
        self.register_forward_pre_hook(self.wait)  # as the streamer's

    @staticmethod
    def wait(module: Any, given: Any) -> None:
        module.clock.now += module.waits

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.computes
        return given


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    module = clock.module()
    monkeypatch.setattr(step_times, "device_module", lambda device: module if device == DEVICE else None)
    return clock


def blocks_of(**layers: torch.nn.Module) -> list[Any]:
    return [SimpleNamespace(name=name, module=layer) for name, layer in layers.items()]


def model(clock: Clock) -> tuple[dict[str, Layer], list[Any]]:
    """a and b are streamed, r is resident."""
    layers = {"a": Layer(clock, 0.5, 1.0), "r": Layer(clock, 0.0, 3.0), "b": Layer(clock, 0.25, 2.0)}
    return layers, blocks_of(a=layers["a"], b=layers["b"])


def step(layers: dict[str, Layer], values: int = 7, names: str = "arb") -> None:
    given = torch.zeros(values)
    for name in names:
        layers[name](given)


def test_a_step_with_waiting_and_computing_apart(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    for _ in range(STEPS + 2):
        step(layers)
    read = times.read()
    assert read is not None and read.plan is PLAN
    assert read.seconds == pytest.approx(6.75)
    assert read.computing == pytest.approx({"a": 4.0, "b": 2.0})
    assert read.activations == 14
    assert times.read() is None, "each is read once"


def test_the_median_counts_and_a_cold_first_step_does_not(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=True)
    for seconds in (100.0, 3.0, 50.0, 4.0, 60.0):
        layers["r"].computes = seconds
        step(layers)
    read = times.read()
    assert read is not None and read.computing["a"] == pytest.approx(5.0)


def test_one_step_is_none_and_the_next_prompt_begins_anew(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    for _ in range(3):
        times.begin(PLAN, blocks, DEVICE, cold=False)
        step(layers)
        clock.now += 1000.0  # between two prompts
    assert times.read() is None


def test_a_device_that_is_not_done_is_not_waited_for(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    step(layers)
    step(layers)
    clock.done = False
    assert times.read() is None
    clock.done = True
    assert times.read() is not None


def test_a_clock_that_stands_still_tells_nothing(clock: Clock) -> None:
    layers = {"a": Layer(clock, 0.0, 0.0)}
    times = StepTimes()
    times.begin(PLAN, blocks_of(**layers), DEVICE, cold=False)
    for _ in range(STEPS):
        step(layers, names="a")
    assert times.read() is None


def test_events_that_do_not_tell_the_time_are_used_once(clock: Clock) -> None:
    """Intel's before torch 2.6: that shows when they are asked."""
    layers, blocks = model(clock)
    hooks = len(layers["a"]._forward_pre_hooks)
    times = StepTimes()
    clock.tells = False
    for _ in range(2):
        times.begin(PLAN, blocks, DEVICE, cold=False)
        for _ in range(STEPS):
            step(layers)
        assert times.read() is None
        assert len(layers["a"]._forward_pre_hooks) == hooks, "nothing more is timed"


def test_steps_that_leave_blocks_out_do_not_count(clock: Clock) -> None:
    """As when a guider runs the model once more without some blocks."""
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    for names in ("ar", "arb", "ar", "arb"):
        step(layers, names=names)
    read = times.read()
    assert read is not None and read.computing == pytest.approx({"a": 4.0, "b": 2.0})


def test_a_first_block_that_runs_twice_in_a_step_makes_no_step(clock: Clock) -> None:
    layers, blocks = model(clock)
    blocks += blocks_of(r=layers["r"])
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    for _ in range(4):
        step(layers, names="abar")
    assert times.read() is None


def test_a_model_without_steps_is_given_up(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    step(layers, names="a" + "b" * 1000 + "a")
    assert times.read() is None


def test_a_block_that_fails_before_it_runs(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    layers["b"].waits = None  # type: ignore[assignment]
    step(layers, names="ar")
    with pytest.raises(TypeError):
        step(layers, names="b")
    step(layers, names="a")
    assert times.read() is None


def test_hooks_are_there_as_long_as_they_are_needed_and_once(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    for _ in range(3):
        times.begin(PLAN, blocks, DEVICE, cold=False)
        assert len(layers["a"]._forward_pre_hooks) == 3
    step(layers)
    step(layers)
    times.detach()
    assert len(layers["a"]._forward_pre_hooks) == 1 and len(layers["r"]._forward_pre_hooks) == 1
    assert times.read() is not None


def test_a_copy_of_a_module_is_not_timed(clock: Clock) -> None:
    layers, blocks = model(clock)
    times = StepTimes()
    times.begin(PLAN, blocks, DEVICE, cold=False)
    twin = {name: copy.deepcopy(layer) for name, layer in layers.items()}
    step(twin)
    step(twin)
    assert times.read() is None


@pytest.mark.parametrize("broken", [False, True])
def test_without_events_nothing_is_timed_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    module = SimpleNamespace(Event=lambda: None)  # without timing
    monkeypatch.setattr(step_times, "device_module", lambda device: module if broken else None)
    layer = torch.nn.Linear(2, 2)
    times = StepTimes()
    times.begin(PLAN, blocks_of(a=layer), DEVICE, cold=False)
    layer(torch.zeros(2))
    layer(torch.zeros(2))
    assert times.read() is None
    assert not layer._forward_pre_hooks
