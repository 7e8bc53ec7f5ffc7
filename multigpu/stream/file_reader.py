"""Bytes of model files, read by several threads straight into the memory where they are used.

For RAM that is the room of a block. For a GPU they are read into a few pinned buffers, which are copied to the device
on a stream of their own while the next ones are being read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import torch

from .pages import Page

THREADS = min(8, os.cpu_count() or 1)
PART = 4 << 20
"""Bytes that one thread reads at once."""
BUFFER, BUFFERS = THREADS * PART, 4
WORTH_IT = 1 << 20
"""Smaller weights are copied as they are."""


class FileReader:
    """`with FileReader(device) as reader:` the threads, and the buffers if anything is read for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(THREADS, "multigpu-read")
        self._buffers: Iterator[_Buffer] | None = None

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def reads(self, page: Page) -> bool:
        """Whether a weight is large enough for this to be worth it."""
        return page.tensor.nbytes >= WORTH_IT

    def fill(self, memory: torch.Tensor, page: Page) -> None:
        """Fill bytes in RAM, as many as the weight has."""
        self._read(memory.numpy().data, page, 0)

    def on_device(self, page: Page) -> torch.Tensor:
        """A copy of the weight on the device. What is queued on the device after this call sees all of it."""
        if self._device.type != "cuda":
            return page.tensor.to(self._device)
        with torch.inference_mode(False), torch.no_grad():
            result = torch.empty_like(page.tensor, device=self._device)
            bytes_there = result.view(-1).view(torch.uint8)
            if self._buffers is None:
                self._buffers = cycle([_Buffer(self._device) for _ in range(BUFFERS)])
            for begin in range(0, result.nbytes, BUFFER):
                count = min(BUFFER, result.nbytes - begin)
                buffer = next(self._buffers)
                self._read(buffer.free(count), page, begin)
                buffer.send(bytes_there[begin : begin + count])
        return result

    def _read(self, memory: memoryview, page: Page, begin: int) -> None:
        starts = range(0, len(memory), PART)
        for _ in self._pool.map(lambda start: page.read_into(memory[start : start + PART], begin + start), starts):
            pass


class _Buffer:
    """Pinned memory, and the copy that is under way from it."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
        self._stream, self._device = torch.cuda.Stream(device), device  # type: ignore[no-untyped-call]
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def free(self, count: int) -> memoryview:
        """The first bytes of it, once the last copy from it is done."""
        self._sent.synchronize()
        return self._memory[:count].numpy().data

    def send(self, target: torch.Tensor) -> None:
        """Copy the first bytes to the device; what is queued there later waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # the target's memory may still be in use there
        with torch.cuda.stream(self._stream):
            target.copy_(self._memory[: target.numel()], non_blocking=True)
            self._sent.record(self._stream)
        target.record_stream(self._stream)
        current.wait_event(self._sent)
