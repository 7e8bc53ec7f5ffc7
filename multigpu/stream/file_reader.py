"""Bytes of model files, read by several threads straight into the memory where they are used, in the background.

For RAM that is the room of a block. For an accelerator it is a few pinned buffers, from which the threads copy to the
device on a stream of the reader's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from ..devices.torch_devices import device_of
from .arena import Arena
from .lanes import Event, device_module
from .pages import PagedLeaf
from .threads import Threads

THREADS = min(12, os.cpu_count() or 1)
PART = 16 << 20
"""Bytes that one thread reads at once, and the size of a buffer. In between it has to wait for other Python code."""
WORTH_IT = 1 << 20
"""Smaller weights are copied as they are."""


def is_worth_it(leaf: PagedLeaf) -> bool:
    """Whether a tensor is large enough to be read by threads."""
    return leaf.nbytes >= WORTH_IT


class FileReader:
    """Reads in the order in which it is asked, until it is closed. The driver of `compute` pins the buffers."""

    def __init__(self, compute: torch.device) -> None:
        self._compute = compute
        self._pool = Threads(THREADS, "multigpu-read")
        self._streams: dict[torch.device, Any] = {}
        self._staging: Future[Arena] | None = None
        self._buffers: SimpleQueue[tuple[torch.Tensor, Event]] = SimpleQueue()

    def read(self, leaf: PagedLeaf, memory: torch.Tensor) -> list[Future[Event]]:
        """Have `memory`, as many bytes as the tensor has, filled. It must not be freed before all parts are done.

        The parts are done when all bytes are there or, on a device, on their way: then their events say when.
        """
        device = device_of(memory)
        if device.type == "cpu":
            room = memory.numpy().data
            return [self._pool.submit(leaf.read_into, room[begin:end], begin) for begin, end in _parts(leaf)]
        module = device_module(device)
        if module is None:
            memory.copy_(leaf.flat)
            return []
        if self._staging is None:
            self._staging = self._pool.submit(self._make_buffers)
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))  # where the memory may still be in use
        return [
            self._pool.submit(self._send, leaf, begin, memory[begin:end], module, stream) for begin, end in _parts(leaf)
        ]

    def close(self) -> None:
        """Read nothing more, and wait for what is under way."""
        self._pool.close()
        for stream in self._streams.values():
            stream.synchronize()
        if self._staging is not None and not self._staging.cancelled() and self._staging.exception() is None:
            self._staging.result().unpin()

    def _make_buffers(self) -> Arena:
        staging = Arena(torch.device("cpu"), [PART] * THREADS)
        rooms = [staging.room(PART) for _ in range(THREADS)]
        staging.pin(self._compute)
        for room in rooms:
            self._buffers.put((room.flat, None))
        return staging

    def _send(self, leaf: PagedLeaf, begin: int, target: torch.Tensor, module: Any, stream: Any) -> Event:
        """Read a part into a buffer, once the last copy from there is done, and copy it to its place on the device."""
        assert self._staging is not None
        self._staging.result()  # or what went wrong
        buffer, sent = self._buffers.get()
        try:
            if sent is not None:
                sent.synchronize()
            leaf.read_into(buffer.numpy().data[: target.numel()], begin)
            with torch.inference_mode(False), torch.no_grad(), module.stream(stream):
                target.copy_(buffer[: target.numel()], non_blocking=True)
                sent = module.Event()
                sent.record(stream)
        finally:
            self._buffers.put((buffer, sent))
        return sent


def _parts(leaf: PagedLeaf) -> Iterator[tuple[int, int]]:
    size = leaf.nbytes
    return ((begin, min(begin + PART, size)) for begin in range(0, size, PART))
