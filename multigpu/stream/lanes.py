"""Lanes: ordered asynchronous copies from one home device into memory of the compute device.

A lane owns its streams. `copy` promises: it starts after every event in `after`, and the event it returns completes
when the destination may be read. On devices without streams a copy is done when `copy` returns, and its event is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from .arena import allocate

Event = Any
"""A device event, or None where everything is synchronous."""

BOUNCE_BYTES = 16 << 20
TRIAL_BYTES = 32 << 20
"""What is copied to measure a lane."""


class Lane(Protocol):
    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event: ...

    def synchronize(self) -> None:
        """Wait until no copy is under way."""

    def close(self) -> None:
        """Synchronize and give back what the lane allocated."""


def device_module(device: torch.device) -> Any:
    """torch.cuda, torch.xpu, torch.npu ... if it has streams and events; None for all other devices."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if all(hasattr(module, name) for name in ("Stream", "Event", "stream", "synchronize")) else None


class SynchronousLane:
    """For devices without streams."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event:
        target.copy_(source)
        return None

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""


class StreamLane:
    """Copies on a stream of the compute device; from an accelerator also on a stream of its own there.

    Torch orders a copy between two accelerators against the current streams of both, so both are made current:
    neither the donor's nor the compute device's other work is waited for.
    """

    def __init__(self, home: torch.device, compute: torch.device) -> None:
        self._module = device_module(compute)
        self._stream = self._module.Stream(device=compute, priority=-1)
        self._home_stream = None if home.type == "cpu" else device_module(home).Stream(device=home)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event:
        for event in after:
            self._stream.wait_event(event)
        with ExitStack() as current:
            if self._home_stream is not None:
                current.enter_context(self._module.stream(self._home_stream))
            current.enter_context(self._module.stream(self._stream))
            target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class BounceLane:
    """From an accelerator without peer access: through two pinned buffers in RAM, with both links busy at once."""

    def __init__(self, home: torch.device, compute: torch.device) -> None:
        self._module = device_module(compute)
        self._out = self._module.Stream(device=home)
        self._in = self._module.Stream(device=compute, priority=-1)
        self._buffers = [torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free: list[Event] = [None, None]
        self._turn = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event:
        for event in after:
            self._in.wait_event(event)
        for start in range(0, source.numel(), BOUNCE_BYTES):
            part = source[start : start + BOUNCE_BYTES]
            buffer = self._buffers[self._turn][: part.numel()]
            if self._free[self._turn] is not None:
                self._out.wait_event(self._free[self._turn])
            with self._module.stream(self._out):
                buffer.copy_(part, non_blocking=True)
            arrived = self._module.Event()
            arrived.record(self._out)
            self._in.wait_event(arrived)
            with self._module.stream(self._in):
                target[start : start + part.numel()].copy_(buffer, non_blocking=True)
            self._free[self._turn] = self._module.Event()
            self._free[self._turn].record(self._in)
            self._turn = 1 - self._turn
        event = self._module.Event()
        event.record(self._in)
        return event

    def synchronize(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._buffers.clear()


def open_lane(home: torch.device, compute: torch.device) -> Lane:
    """The fastest lane from `home` to `compute`; between accelerators without peer access it is measured."""
    if device_module(compute) is None or (home.type != "cpu" and home.type != compute.type):
        return SynchronousLane()
    if home.type == "cpu" or peer_access(compute, home):
        return StreamLane(home, compute)
    lanes: list[Lane] = [StreamLane(home, compute), BounceLane(home, compute)]
    source, target = allocate(TRIAL_BYTES, home), allocate(TRIAL_BYTES, compute)
    best = min(lanes, key=lambda lane: seconds_per_copy(lane, source, target))
    for lane in lanes:
        if lane is not best:
            lane.close()
    return best


def peer_access(compute: torch.device, home: torch.device) -> bool:
    """Whether `compute` can read `home`'s memory directly. True if the backend has no function to ask."""
    ask = getattr(device_module(compute), "can_device_access_peer", None)
    return True if ask is None else bool(ask(compute.index, home.index))


def seconds_per_copy(lane: Lane, source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds to copy `source` to `target`, on a device with streams: the fastest of three tries."""
    module = device_module(target.device)
    for device in {source.device, target.device}:
        if device.type != "cpu":
            module.synchronize(device)
    stream = module.current_stream(target.device)
    elapsed = (
        timed(module, stream, lambda began: stream.wait_event(lane.copy(target, source, [began]))) for _ in range(3)
    )
    return min(elapsed)


def timed(module: Any, stream: Any, work: Callable[[Event], Any]) -> float:
    """Seconds that `work` takes on a stream, by the device's own clock. `work` gets the event at which they begin."""
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record(stream)
    work(begin)
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
