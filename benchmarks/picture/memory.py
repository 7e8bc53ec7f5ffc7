"""Memory during the benchmark: a smaller card, RAM that no file backs, and pinned RAM."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def ballast(card: float | None) -> torch.Tensor | None:
    """What has to be kept so that only `card` GB of the GPU are left."""
    if card is None:
        return None
    size = torch.cuda.mem_get_info()[0] - int(card * 1e9)
    if size < 0:
        raise SystemExit(f"a card of {card} GB was asked for, but only {size / 1e9 + card:.1f} GB are free")
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


def pinned_through_torch() -> int:
    """Bytes that torch's own allocator of pinned RAM holds, in use or not; 0 where it does not count them."""
    if not hasattr(torch._C, "_cuda_hostMemoryStats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def used_ram() -> int:
    """RAM that no file backs. Unlike `smaps_rollup`, this costs nothing even with many pages.

    The driver gives torch's pinned RAM to the process as shared pages, so that is added.
    """
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") + pinned_through_torch()


class HighestRam:
    """The most of `used_ram` while it is entered, looked at every 20 ms."""

    def __init__(self) -> None:
        self.highest = used_ram()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.highest = max(self.highest, used_ram())

    def __enter__(self) -> HighestRam:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()


class CountingRuntime:
    """The CUDA runtime that torch offers, with the RAM counted that is registered through it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        error = self._real.cudaHostRegister(pointer, size, flags)
        if int(error) == 0:
            self.sizes[pointer] = size
        return error

    def cudaHostUnregister(self, pointer: int) -> Any:
        self.sizes.pop(pointer, None)
        return self._real.cudaHostUnregister(pointer)


@contextmanager
def pinned_bytes() -> Iterator[Callable[[], int]]:
    """Counts pinned RAM, whoever pins it: by registering, as ComfyUI and we do, or through torch's allocator."""
    runtime = CountingRuntime(torch.cuda.cudart())
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        yield lambda: sum(runtime.sizes.values()) + pinned_through_torch()
