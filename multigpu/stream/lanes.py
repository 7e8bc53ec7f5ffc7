"""Lanes: ordered asynchronous copies from one home device into memory of the compute device.

A lane owns its streams. `copy` promises: it starts after every event in `after`, and the event it returns completes
when the destination may be read. On devices without streams a copy is done when `copy` returns, and its event is None.
A lane with a thread of its own (`file_lane`) returns an `Arrival` instead: an event that is recorded later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch

from .arena import allocate
from .trials import burst

Event = Any
"""A device event, or None where everything is synchronous."""

BOUNCE_BYTES = 16 << 20
TRIAL_BYTES = 32 << 20
"""What one copy has that is timed to measure a lane."""


class Arrival:
    """An event that another thread will record. Who needs it waits until then."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._event: Event = None
        self._error: BaseException | None = None

    def over(self, event: Event, error: BaseException | None) -> None:
        """It is recorded now; `error` says that not all bytes have arrived."""
        self._event, self._error = event, error
        self._is_over.set()

    def event(self) -> Event:
        """Wait until it is recorded."""
        self._is_over.wait()
        return self._event

    def check(self) -> None:
        """Raises what has kept bytes from arriving."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error


def wait_for(stream: Any, event: Event) -> None:
    """Let a stream wait for a copy, whether or not its bytes have arrived."""
    recorded = event.event() if isinstance(event, Arrival) else event
    if recorded is not None:
        stream.wait_event(recorded)


def check(event: Event) -> None:
    """Raises what has kept the bytes of a copy from arriving."""
    if isinstance(event, Arrival):
        event.check()


class Lane(Protocol):
    def copy(self, target: torch.Tensor, source: Any, after: Iterable[Event]) -> Event:
        """`source` is a tensor, or what the lane reads from."""

    def current(self) -> AbstractContextManager[Any]:
        """Makes its stream on the compute device the current one: memory that is allocated meanwhile belongs to it."""

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

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

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
            wait_for(self._stream, event)
        with ExitStack() as current:
            if self._home_stream is not None:
                current.enter_context(self._module.stream(self._home_stream))
            current.enter_context(self._module.stream(self._stream))
            target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record(self._stream)
        return event

    def current(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

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
            wait_for(self._in, event)
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

    def current(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._in)  # type: ignore[no-any-return]

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
    best = min(lanes, key=lambda lane: min(seconds_per_copy(lane, source, target)))
    for lane in lanes:
        if lane is not best:
            lane.close()
    return best


def peer_access(compute: torch.device, home: torch.device) -> bool:
    """Whether `compute` can read `home`'s memory directly. True if the backend has no function to ask."""
    ask = getattr(device_module(compute), "can_device_access_peer", None)
    return True if ask is None else bool(ask(compute.index, home.index))


def seconds_per_copy(lane: Lane, source: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Seconds of each of a few copies of `source` to `target` in a row, on a device with streams."""
    module = device_module(target.device)
    for device in {source.device, target.device}:
        if device.type != "cpu":
            module.synchronize(device)
    stream = module.current_stream(target.device)
    return burst(module, stream, lambda: stream.wait_event(lane.copy(target, source, ())))
