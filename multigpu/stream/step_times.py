"""Times steps while a model runs, by events of the compute device: nothing waits for it, and nothing is read in a step.

    arrives     runs               arrives     runs
       |- waits -|--- computes ---...--|- waits -|--- computes ---...
    a streamed block                the next one

Two hooks on each streamed module, before and after those of the streamer, mark when the compute device gets to the
block and when its bytes are there. What lies between is waiting. The rest, up to the next streamed block, is computing,
that of the resident blocks in between included. A step lasts from one use of a block to its next one.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..plan import Plan
from .homes import HomedBlock
from .lanes import Event, device_module

log = logging.getLogger("multigpu")

STEPS = 3
"""How many steps are timed."""
_USES = 64
"""Of every block, how many uses there may be in them. A model that has more has no steps."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step of a model that is loaded by `plan`.

    `computing` are the seconds from the start of each streamed block to the next one, without waiting. `activations` is
    how many values all of them were given, which tells resolutions and batches apart.
    """

    plan: Plan
    seconds: float
    computing: dict[str, float]
    activations: int


@dataclass(slots=True, eq=False)
class _Use:
    block: str
    given: int
    arrives: Event
    runs: Event = None


class StepTimes:
    """Times the first steps after each `begin`. Does nothing on a device without events that tell the time."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._blocks: Sequence[HomedBlock] = ()
        self._compute = torch.device("cpu")
        self._uses: list[_Use] = []
        self._handles: list[Any] = []
        self._timing = False
        self._tells = True
        """False once the device's events have turned out not to tell the time."""
        self.paused = False
        """While set, blocks that run are no part of a step."""
        self._first = ""
        self._begun = self._skipped = 0

    def begin(self, plan: Plan, blocks: Sequence[HomedBlock], compute: torch.device, *, cold: bool) -> None:
        """Time the next steps; what was timed before is forgotten. `cold`: the first step is not like the others."""
        if blocks is not self._blocks:
            self.detach()
            self._blocks, self._compute = blocks, compute
            if self._tells and self._can_time():
                for block in blocks:
                    self._watch(block.name, block.module)
        self._plan, self._uses = plan, []
        self._begun, self._skipped, self._timing = 0, int(cold), True

    def detach(self) -> None:
        """Remove the hooks. What was timed can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._blocks, self._timing = (), False

    def _can_time(self) -> bool:
        try:
            return device_module(self._compute) is not None and self._mark() is not None
        except Exception:  # a vendor's module may raise anything
            log.debug("[MultiGPU] steps cannot be timed on %s", self._compute, exc_info=True)
            return False

    def read(self) -> StepTime | None:
        """The median of the steps that were timed; None if there are none, or the device is not done with them.

        Each is read once. Steps that leave out blocks which others use do not count.
        """
        uses = self._uses
        begins = [number for number, use in enumerate(uses) if use.block == self._first]
        if self._plan is None or len(begins) < 2 or not uses[begins[-1]].arrives.query():
            return None
        self._uses, every = [], {use.block for use in uses}
        steps = [uses[begin : end + 1] for begin, end in pairwise(begins)]
        whole = [step for step in steps if {use.block for use in step} == every and all(use.runs for use in step[:-1])]
        if not whole:
            return None
        try:
            return _median(self._plan, whole)
        except Exception:  # Intel's events in torch before 2.6 cannot; a vendor's may raise anything
            log.debug("[MultiGPU] steps are not timed on %s from now on", self._compute, exc_info=True)
            self._tells = False
            self.detach()
            return None

    # -- the hooks ------------------------------------------------------------------------------------------------

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        own = weakref.ref(module)  # a copy of the module has its hooks, too

        def arrives(its: torch.nn.Module, given: tuple[Any, ...]) -> None:
            if self._timing and not self.paused and its is own():
                self._arrives(name, given)

        def runs(its: torch.nn.Module, given: tuple[Any, ...]) -> None:
            if self._timing and not self.paused and its is own() and self._uses and self._uses[-1].block == name:
                self._uses[-1].runs = self._mark()

        self._handles += [
            module.register_forward_pre_hook(arrives, prepend=True),
            module.register_forward_pre_hook(runs),
        ]

    def _arrives(self, name: str, given: tuple[Any, ...]) -> None:
        if not self._begun:
            self._first = name
        self._begun += name == self._first
        if self._begun > self._skipped:
            values = given[0].numel() if given and isinstance(given[0], torch.Tensor) else 0
            self._uses.append(_Use(name, values, self._mark()))
        if self._begun > self._skipped + STEPS or len(self._uses) > _USES * len(self._blocks):
            self._timing = False

    def _mark(self) -> Event:
        module = device_module(self._compute)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._compute))
        return event


def _median(plan: Plan, steps: list[list[_Use]]) -> StepTime | None:
    """The time of the median of these steps; None if the clock stands still."""
    steps.sort(key=lambda step: _seconds(step[0].arrives, step[-1].arrives))
    step = steps[(len(steps) - 1) // 2]
    seconds = _seconds(step[0].arrives, step[-1].arrives)
    if not seconds > 0:
        return None
    computing: defaultdict[str, float] = defaultdict(float)
    for use, after in pairwise(step):
        computing[use.block] += _seconds(use.runs, after.arrives)
    return StepTime(plan, seconds, dict(computing), sum(use.given for use in step[:-1]))


def _seconds(begin: Event, end: Event) -> float:
    return float(begin.elapsed_time(end)) / 1e3
