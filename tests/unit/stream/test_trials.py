"""A speed is that of the device, whatever the process, the first copies, or other work did to single trials."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from multigpu.stream.trials import AT_LEAST, AT_MOST, PIECES, burst, steady

PIECE = 0.6e-3
"""Seconds of one piece of work: 32 MiB at 55 GB/s."""


class Machine:
    """A device with one stream, and a process that queues work for it, each with a clock of its own."""

    def __init__(self, seconds: Callable[[int], float], to_queue: Callable[[], float]) -> None:
        """The n-th piece of work takes `seconds(n)`; queueing one takes the process `to_queue()`."""
        self.seconds, self.to_queue = seconds, to_queue
        self.process = self.device = 0.0
        self.pieces = 0
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

            def record(self, stream: object) -> None:
                self.at = max(machine.device, machine.process)

            def synchronize(self) -> None:
                machine.process = max(machine.process, self.at)

            def elapsed_time(self, end: Event) -> float:
                return 1e3 * (end.at - self.at)

        self.module = SimpleNamespace(Event=Event)

    def work(self) -> None:
        self.process += self.to_queue()
        self.device = max(self.device, self.process) + self.seconds(self.pieces)
        self.pieces += 1

    def burst(self) -> list[float]:
        return burst(self.module, None, self.work)


def test_the_time_to_queue_work_does_not_count() -> None:
    machine = Machine(lambda piece: PIECE, lambda: 0.5e-3)
    assert machine.burst() == pytest.approx([PIECE] * PIECES)


@pytest.mark.parametrize("seed", range(20))
def test_processes_that_are_disturbed_agree(seed: int) -> None:
    """A link that wakes up over 12 ms, a process that is now and then late, other work that takes half of the link."""
    chance = random.Random(seed)

    def seconds(piece: int) -> float:
        asleep = 2.0 if piece < 8 else 1.4 if piece < 16 else 1.0
        return PIECE * asleep * (2.0 if chance.random() < 0.25 else chance.uniform(1.0, 1.02))

    machine = Machine(seconds, lambda: 2e-3 if chance.random() < 0.1 else chance.uniform(0.02e-3, 0.1e-3))
    assert steady(machine.burst) == pytest.approx(PIECE, rel=0.025)


def test_a_device_that_gets_faster_is_measured_until_it_does_not() -> None:
    machine = Machine(lambda piece: PIECE * max(1.0, 3.0 - 0.05 * piece), lambda: 0.0)
    assert steady(machine.burst) == pytest.approx(PIECE)


def test_bursts_take_neither_too_little_nor_too_much() -> None:
    fast = Machine(lambda piece: PIECE, lambda: 0.0)
    steady(fast.burst)
    assert AT_LEAST < fast.process < 1.5 * AT_LEAST
    slow = Machine(lambda piece: 0.04, lambda: 0.0)
    assert steady(slow.burst) == pytest.approx(0.04)
    assert slow.pieces == PIECES + 1
    never_steady = Machine(lambda piece: PIECE * 0.99**piece, lambda: 0.0)
    steady(never_steady.burst)
    assert never_steady.process < 1.5 * AT_MOST


def test_a_clock_that_stands_still_is_noticed_at_once() -> None:
    machine = Machine(lambda piece: 0.0, lambda: 0.0)
    assert steady(machine.burst) == 0.0
    assert machine.pieces == PIECES + 1
