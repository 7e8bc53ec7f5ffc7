"""Homes: flat memory on one device that holds the bytes of many blocks.

Memory comes in segments, so that filling one while its source is freed costs little extra, and each segment of RAM is
registered with the driver once (torch's own pinned allocator rounds every request up to a power of two).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .layout import ALIGNMENT

log = logging.getLogger("multigpu")

SEGMENT_BYTES = 1 << 30


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


@dataclass(frozen=True, slots=True)
class Room:
    """`size` bytes of a segment from byte `start`."""

    segment: Segment
    start: int
    size: int

    @property
    def flat(self) -> torch.Tensor:
        return self.segment.data[self.start : self.start + self.size]


def allocate(count: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes that may be written in and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.uint8, device=device)


class Arena:
    """Rooms on one device, handed out one after another; freed all together."""

    def __init__(self, device: torch.device, sizes: Iterable[int], segment_bytes: int = SEGMENT_BYTES) -> None:
        """Plans room for `sizes` (each a multiple of the alignment), in this order; allocates nothing yet."""
        self.device = device
        self._segment_bytes = segment_bytes
        self._plan = _segment_sizes(sizes, segment_bytes)
        self._next = 0
        self._at = 0
        self.segments: list[Segment] = []

    def room(self, size: int) -> Room:
        """The next `size` bytes; a segment is allocated when the first room in it is asked for."""
        if not self.segments or self._at + size > self.segments[-1].data.numel():
            planned = self._plan[self._next] if self._next < len(self._plan) else size
            self.segments.append(Segment(allocate(max(planned, size), self.device)))
            self._next += 1
            self._at = 0
        room = Room(self.segments[-1], self._at, size)
        self._at += size
        return room

    @property
    def nbytes(self) -> int:
        return sum(segment.data.numel() for segment in self.segments)

    @property
    def pinned_bytes(self) -> int:
        return sum(segment.data.numel() for segment in self.segments if segment.registered)

    def pin(self, compute: torch.device) -> bool:
        """Register all segments with `compute`'s driver so that copies run asynchronously at full speed.

        False if this kind of device has no such call or the driver refuses; copies then work, slower.
        """
        if self.device.type != "cpu" or compute.type != "cuda":
            return False
        for segment in self.segments:
            if segment.registered or not segment.data.numel():
                continue
            count = segment.data.numel()
            error = _cudart().cudaHostRegister(segment.data.data_ptr(), count, 0)
            if int(error) != 0:
                log.warning("[MultiGPU] the driver did not pin %d bytes of RAM (%s): copies are slower", count, error)
                return False
            segment.registered = True
        return True

    def unpin(self) -> None:
        """Undo `pin`. The caller has made sure that no copy is under way."""
        for segment in self.segments:
            if segment.registered:
                _cudart().cudaHostUnregister(segment.data.data_ptr())
                segment.registered = False


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _segment_sizes(sizes: Iterable[int], limit: int) -> list[int]:
    segments: list[int] = []
    for size in sizes:
        assert size % ALIGNMENT == 0, size
        if segments and segments[-1] + size <= limit:
            segments[-1] += size
        else:
            segments.append(size)
    return segments
