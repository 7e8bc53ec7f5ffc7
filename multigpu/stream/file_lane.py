"""The lane from the model file: blocks are read by several threads, through a few pinned buffers, ahead of their use.

A thread of the lane's own does it, in the order of issue. So a copy is under way when `copy` returns, and its `Arrival`
is over when all bytes have been read and queued for the device; only a block that is used before that waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from . import file_reader
from .lanes import Arrival, Event, Lane, device_module, wait_for
from .pages import Page, PagedLeaf
from .threads import Threads

AHEAD = 2
"""Buffers for each reading thread."""
PART = 8 << 20
"""The size of a buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class FileSource:
    """Where a block's bytes are: `flat` has those in RAM, which come first; those of `pages` follow.

    `leaves` are the tensors in the pages, each with its place in the block. There is at least one.
    """

    name: str
    flat: torch.Tensor
    pages: Sequence[Page]
    leaves: Sequence[tuple[int, PagedLeaf]]

    def check(self) -> None:
        """Raises HostError if a file has changed since it was loaded."""
        for page in {page.descriptor: page for page in self.pages}.values():
            page.check(self.name)

    def parts(self, most: int) -> Iterator[tuple[int, PagedLeaf, int, int]]:
        """Pieces of at most `most` bytes: place in the block, tensor, place in the tensor, bytes."""
        for offset, leaf in self.leaves:
            for begin in range(0, leaf.nbytes, most):
                yield offset + begin, leaf, begin, min(most, leaf.nbytes - begin)

    def copy_into(self, target: torch.Tensor) -> None:
        """Copy the block at once. Raises HostError if its file has changed."""
        target[: self.flat.numel()].copy_(self.flat)
        for offset, leaf in self.leaves:
            target[offset : offset + leaf.nbytes].copy_(leaf.flat)
        self.check()


class SynchronousFileLane:
    """For devices without streams."""

    def copy(self, target: torch.Tensor, source: FileSource, after: Iterable[Event]) -> Event:
        arrival = Arrival()
        try:
            source.copy_into(target)
        except Exception as error:  # noqa: BLE001  raised by the use of the block
            arrival.over(None, error)
            return arrival
        return None

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True, eq=False)
class _Copy:
    """One block on its way. `left` counts its parts that have not been queued for the device."""

    target: torch.Tensor
    source: FileSource
    after: Sequence[Event]
    arrival: Arrival = field(default_factory=Arrival)
    left: int = 0
    begun: bool = False
    error: BaseException | None = None


class FileLane:
    """Reads on threads, copies on a stream of the compute device."""

    def __init__(self, compute: torch.device) -> None:
        self._module = device_module(compute)
        self._stream = self._module.Stream(device=compute, priority=-1)
        self._pool = Threads(file_reader.THREADS, "multigpu-stream")
        self._part = PART
        self._buffers = deque(_Buffer(PART) for _ in range(AHEAD * file_reader.THREADS))
        self._reading: deque[tuple[_Copy, _Buffer, int, int, Future[None]]] = deque()
        self._copies: SimpleQueue[_Copy | None] = SimpleQueue()
        self._last: Arrival | None = None
        self._thread = threading.Thread(target=self._run, name="multigpu-file-lane", daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: FileSource, after: Iterable[Event]) -> Event:
        copy = _Copy(target, source, [*after])
        self._last = copy.arrival
        self._copies.put(copy)
        return copy.arrival

    def current(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._stream)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.event()
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._copies.put(None)
        self._thread.join()
        self._pool.close()
        self._buffers.clear()

    # -- on the lane's own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Begin to read one copy after another; while there is no new one, finish what is being read."""
        while True:
            try:
                copy = self._copies.get(block=not self._reading)
            except Empty:
                self._finish_oldest()
                continue
            if copy is None:
                return
            self._begin(copy)

    def _begin(self, copy: _Copy) -> None:
        """Have all parts read into buffers; when none is free, the oldest part is finished first."""
        parts = [*copy.source.parts(self._part)]
        copy.left = len(parts)
        for place, leaf, begin, count in parts:
            if not self._buffers:
                self._finish_oldest()
            buffer = self._buffers.popleft()
            read = self._pool.submit(buffer.read, leaf, begin, count)
            self._reading.append((copy, buffer, place, count, read))

    def _finish_oldest(self) -> None:
        """Queue the oldest part for the device as soon as it has been read."""
        copy, buffer, place, count, read = self._reading.popleft()
        try:
            read.result()
            if copy.error is None:
                with self._module.stream(self._stream), torch.no_grad():
                    if not copy.begun:
                        self._enter(copy)
                    buffer.send(copy.target[place : place + count], self._module, self._stream)
            if copy.left == 1:
                copy.source.check()
        except Exception as error:  # noqa: BLE001  raised by the use of the block
            copy.error = copy.error or error
        self._buffers.append(buffer)
        copy.left -= 1
        if not copy.left:
            event = None
            try:
                event = self._module.Event()
                event.record(self._stream)
            except Exception as error:  # noqa: BLE001  as above; nobody may wait for ever
                copy.error = copy.error or error
            copy.arrival.over(event, copy.error)

    def _enter(self, copy: _Copy) -> None:
        """Before the first part: wait until the memory may be written, and copy what is in RAM."""
        copy.begun = True
        for event in copy.after:
            wait_for(self._stream, event)
        copy.target[: copy.source.flat.numel()].copy_(copy.source.flat, non_blocking=True)


class _Buffer:
    """Pinned memory for one part, and the copy that is under way from it."""

    def __init__(self, count: int) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        self._sent: Any = None

    def read(self, leaf: PagedLeaf, begin: int, count: int) -> None:
        """Fill it, once the last copy from it is done."""
        if self._sent is not None:
            self._sent.synchronize()
        leaf.read_into(self._memory[:count].numpy().data, begin)

    def send(self, target: torch.Tensor, module: Any, stream: Any) -> None:
        target.copy_(self._memory[: target.numel()], non_blocking=True)
        self._sent = module.Event()
        self._sent.record(stream)


def open_file_lane(compute: torch.device) -> Lane:
    """The lane from the model file to `compute`."""
    return SynchronousFileLane() if device_module(compute) is None else FileLane(compute)
