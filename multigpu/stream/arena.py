"""Memory for blocks at their homes.

RAM is allocated in segments: while one is filled, the memory of the blocks copied into it is freed, so that little
extra RAM is needed. Each segment is registered with the driver once (torch's own pinned allocator would round every
request up to a power of two). On an accelerator every block has its own allocation from torch's caching allocator.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from .layout import ALIGNMENT

log = logging.getLogger("multigpu")

SEGMENT_BYTES = 128 << 20
PAGE = 4096
"""Segments begin at a page boundary: the driver registers whole pages, and no page twice."""


@dataclass(slots=True, eq=False)
class Segment:
    """One contiguous allocation. `typed(dtype)` is the same memory seen as `dtype`."""

    data: torch.Tensor
    registered: bool = False
    _typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        view = self._typed.get(dtype)
        if view is None:
            view = self._typed[dtype] = self.data.view(dtype)
        return view


class Room:
    """The memory of one block, as the bytes `flat`. In RAM it is a part of a segment."""

    def __init__(self, size: int, device: torch.device, segment: Segment | None = None, start: int = 0) -> None:
        self.size = size
        self.segment = segment
        self._start = start
        self._owner: weakref.ref[Any] | None = None
        self.flat = allocate(size, device) if segment is None else self._part_of(segment)

    def reclaim(self) -> bool:
        """Whether no other tensor uses this memory any more, so that it may be overwritten.

        The caller must have dropped its own tensors. Tensors of other code stay valid, and the contents are unchanged.
        Always False on an accelerator: new memory costs nothing extra there, and the allocator reuses this one.
        """
        if self.segment is None or self._owner is None:
            return False
        del self.flat
        alone = self._owner() is None
        self.flat = self._part_of(self.segment)
        return alone

    def _part_of(self, segment: Segment) -> torch.Tensor:
        """A tensor over this part of the segment that has a storage of its own.

        The storage holds the numpy array that it was made from, so that array is gone when the last tensor is.
        """
        with torch.inference_mode(False):
            owner = segment.data.numpy()[self._start : self._start + self.size]
            self._owner = weakref.ref(owner)
            return torch.from_numpy(owner)


def allocate(count: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes that may be written in and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.uint8, device=device)


def _allocate_pages(count: int) -> torch.Tensor:
    """Bytes in RAM that share no page with anything else; in huge pages, if the system has them.

    Those are filled for the first time, and pinned, in half the time.
    """
    if hasattr(mmap, "MADV_HUGEPAGE") and count:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)
    bytes_here = allocate(count + 2 * PAGE, torch.device("cpu"))
    start = -bytes_here.data_ptr() % PAGE
    return bytes_here[start : start + count]


class Arena:
    """Rooms on one device, handed out one after another."""

    def __init__(self, device: torch.device, sizes: Iterable[int]) -> None:
        """Plans room for `sizes` (each a multiple of the alignment), in this order; allocates nothing yet."""
        self.device = device
        self._plan = _segment_sizes(sizes)
        self._next = 0
        self._at = 0
        self._refused = False
        self.segments: list[Segment] = []

    def room(self, size: int) -> Room:
        """The next `size` bytes; a segment is allocated when the first room in it is asked for."""
        if self.device.type != "cpu":
            return Room(size, self.device)
        if not self.segments or self._at + size > self.segments[-1].data.numel():
            planned = self._plan[self._next] if self._next < len(self._plan) else size
            self.segments.append(Segment(_allocate_pages(max(planned, size))))
            self._next += 1
            self._at = 0
        room = Room(size, self.device, self.segments[-1], self._at)
        self._at += size
        return room

    @property
    def pinned_bytes(self) -> int:
        return sum(segment.data.numel() for segment in self.segments if segment.registered)

    def pin(self, compute: torch.device, only: Segment | None = None) -> bool:
        """Register segments (all, or one) with `compute`'s driver: copies are asynchronous and fast then.

        False if this kind of device has no such call or the driver refuses; copies then work, slower.
        """
        if self.device.type != "cpu" or compute.type != "cuda" or self._refused:
            return False
        for segment in self.segments if only is None else (only,):
            count = segment.data.numel()
            if segment.registered or not count:
                continue
            with torch.cuda.device(compute):  # of this thread
                error = _cudart().cudaHostRegister(segment.data.data_ptr(), count, 0)
            if int(error) != 0:
                log.warning("[MultiGPU] the driver did not pin %d bytes of RAM (%s): copies are slower", count, error)
                self._refused = True
                _forget_error(compute)
                return False
            segment.registered = True
        return True

    def unpin(self) -> None:
        """Undo `pin`. The caller has made sure that no copy is under way."""
        self._refused = False
        self.keep(self.segments, pinned=False)

    def keep(self, segments: Collection[Segment], *, pinned: bool = True) -> None:
        """Give up all other segments, and their pins. Those that stay are unpinned too unless `pinned`."""
        for segment in self.segments:
            if segment.registered and not (pinned and segment in segments):
                _cudart().cudaHostUnregister(segment.data.data_ptr())
                segment.registered = False
        self.segments = [segment for segment in self.segments if segment in segments]


def _forget_error(compute: torch.device) -> None:
    """CUDA keeps the error of a refused call, and torch raises it after the thread's next kernel: run one."""
    with suppress(RuntimeError):
        torch.zeros(1, device=compute)
        torch.cuda.synchronize(compute)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _segment_sizes(sizes: Iterable[int]) -> list[int]:
    segments: list[int] = []
    for size in sizes:
        assert size % ALIGNMENT == 0, size
        if segments and segments[-1] + size <= SEGMENT_BYTES:
            segments[-1] += size
        else:
            segments.append(size)
    return segments
