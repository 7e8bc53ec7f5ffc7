"""Bytes of model files, read by several threads straight into the memory where they are used, in the background.

For RAM that is the room of a block. For an accelerator each thread has two pinned buffers, from which it copies to the
device on a stream of the reader's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..devices.torch_devices import device_of
from .lanes import Event, device_module
from .pages import Page

THREADS = min(12, os.cpu_count() or 1)
PART = 8 << 20
"""Bytes that one thread reads at once, and the size of a buffer."""
WORTH_IT = 1 << 20
"""Smaller weights are copied as they are."""


def is_worth_it(page: Page) -> bool:
    """Whether a weight is large enough to be read by threads."""
    return page.tensor.nbytes >= WORTH_IT


class FileReader:
    """Reads in the order in which it is asked. Must be closed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "multigpu-read")
        self._streams: dict[torch.device, Any] = {}
        self._of_thread = threading.local()

    def read(self, page: Page, memory: torch.Tensor) -> list[Future[Event]]:
        """Have `memory`, as many bytes as the weight has, filled. It must not be freed before all parts are done.

        The parts are done when all bytes are there or, on a device, on their way: then their events say when.
        """
        device = device_of(memory)
        if device.type == "cpu":
            room = memory.numpy().data
            return [self._pool.submit(page.read_into, room[begin:end], begin) for begin, end in _parts(page)]
        module = device_module(device)
        if module is None:
            memory.copy_(page.tensor.detach().view(-1).view(torch.uint8))
            return []
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))  # where the memory may still be in use
        return [
            self._pool.submit(self._send, page, begin, memory[begin:end], module, stream) for begin, end in _parts(page)
        ]

    def close(self) -> None:
        """Read nothing more, and wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)
        for stream in self._streams.values():
            stream.synchronize()

    def _send(self, page: Page, begin: int, target: torch.Tensor, module: Any, stream: Any) -> Event:
        own = self._of_thread.__dict__
        if "buffers" not in own:
            own["buffers"] = deque((_Buffer(), _Buffer()))
        own["buffers"].rotate()
        return own["buffers"][0].send(page, begin, target, module, stream)


def _parts(page: Page) -> Iterator[tuple[int, int]]:
    size = page.tensor.nbytes
    return ((begin, min(begin + PART, size)) for begin in range(0, size, PART))


class _Buffer:
    """Pinned memory. `sent` comes after the last copy from it."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._memory = torch.empty(PART, dtype=torch.uint8, pin_memory=True)
        self._sent: Event = None

    def send(self, page: Page, begin: int, target: torch.Tensor, module: Any, stream: Any) -> Event:
        """Read a part, once the last copy from here is done, and copy it to its place on the device."""
        if self._sent is not None:
            self._sent.synchronize()
        count = target.numel()
        page.read_into(self._memory.numpy().data[:count], begin)
        with torch.inference_mode(False), torch.no_grad(), module.stream(stream):
            target.copy_(self._memory[:count], non_blocking=True)
            self._sent = module.Event()
            self._sent.record(stream)
        return self._sent
