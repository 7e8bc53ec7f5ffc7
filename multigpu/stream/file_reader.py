"""Bytes of model files, read by several threads straight into the memory where they are used.

For RAM that is the room of a block. For a GPU they are read into a few pinned buffers, which the threads copy to the
device on a stream of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from .pages import Page

THREADS = min(12, os.cpu_count() or 1)
PART = 8 << 20
"""Bytes that one thread reads at once, and the size of a buffer."""
BUFFERS = 2 * THREADS
WORTH_IT = 1 << 20
"""Smaller weights are copied as they are."""


class FileReader:
    """`with FileReader(device) as reader:` the threads, and the buffers if anything is read for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(THREADS, "multigpu-read")
        self._stream: Any = None
        self._free: deque[_Buffer] = deque()
        self._expected: deque[_Part] = deque()
        self._under_way: deque[tuple[_Part, _Buffer, Future[None]]] = deque()
        self._arriving: deque[torch.Tensor] = deque()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._expected.clear()
        self._pool.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()  # a copy that nobody has asked for may be under way

    def reads(self, page: Page) -> bool:
        """Whether a weight is large enough for this to be worth it."""
        return page.tensor.nbytes >= WORTH_IT

    def fill(self, memory: torch.Tensor, page: Page) -> list[Future[None]]:
        """Fill bytes in RAM, as many as the weight has. Done when all that is returned is done."""
        room = memory.numpy().data
        return [self._pool.submit(page.read_into, room[p.begin : p.end], p.begin) for p in _parts(page)]

    def expect(self, pages: Iterable[Page]) -> None:
        """These weights will be asked for next, in this order.

        They are read ahead, and copied to the device, as far as the buffers reach.
        """
        if self._device.type == "cuda":
            self._expected.extend(part for page in pages if self.reads(page) for part in _parts(page))
            self._read_ahead()

    def on_device(self, page: Page) -> torch.Tensor:
        """A copy of the weight on the device. What is queued on the device after this call sees all of it."""
        if self._device.type != "cuda":
            return page.tensor.to(self._device)
        if next(self._coming(), None) is not page:
            self._forget()
            self._expected.extend(_parts(page))
            self._read_ahead()
        current = torch.cuda.current_stream(self._device)
        while next(self._coming(), None) is page:
            _, buffer, done = self._under_way.popleft()
            self._free.append(buffer)
            done.result()
            current.wait_event(buffer.sent)
            self._read_ahead()
        result = self._arriving.popleft()
        result.record_stream(self._stream)
        return result

    def _coming(self) -> Iterator[Page]:
        """The pages of the parts that are being read or will be, in order."""
        yield from (part.page for part, _, _ in self._under_way)
        yield from (part.page for part in self._expected)

    def _read_ahead(self) -> None:
        """Have parts read, in order, into the buffers that are free, and copied from there to the device."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._free.extend(_Buffer() for _ in range(BUFFERS))
        while self._free and self._expected:
            part, buffer = self._expected.popleft(), self._free.popleft()
            if part.begin == 0:
                self._arriving.append(self._room_for(part.page))
            done = self._pool.submit(buffer.bring, part, self._arriving[-1], self._stream)
            self._under_way.append((part, buffer, done))

    def _room_for(self, page: Page) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            room = torch.empty_like(page.tensor, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # where its memory may still be in use
        return room

    def _forget(self) -> None:
        """What was expected is not wanted."""
        self._expected.clear()
        wait([done for _, _, done in self._under_way])
        self._free.extend(buffer for _, buffer, _ in self._under_way)
        self._under_way.clear()
        for room in self._arriving:
            room.record_stream(self._stream)
        self._arriving.clear()


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a weight's bytes."""

    page: Page
    begin: int
    end: int


def _parts(page: Page) -> Iterator[_Part]:
    size = page.tensor.nbytes
    return (_Part(page, begin, min(begin + PART, size)) for begin in range(0, size, PART))


class _Buffer:
    """Pinned memory. `sent` comes after the last copy from it."""

    def __init__(self) -> None:
        self._memory = torch.empty(PART, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def bring(self, part: _Part, target: torch.Tensor, stream: Any) -> None:
        """Read a part, once the last copy from here is done, and copy it to its place on the device."""
        self.sent.synchronize()
        count = part.end - part.begin
        part.page.read_into(self._memory.numpy().data[:count], part.begin)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            bytes_there = target.view(-1).view(torch.uint8)
            bytes_there[part.begin : part.end].copy_(self._memory[:count], non_blocking=True)
            self.sent.record(stream)
