"""The streamer: copies blocks into a ring on the compute device ahead of their use (staging), and releases them after.

    home (pinned RAM, other GPU) --lane--> ring on the compute device --hooks--> module parameters, for one forward

Ordering, by events only (the host never waits):
- a copy into ring bytes starts after the compute that last read those bytes;
- a block's forward starts after its copy;
- the copy of the next expected block is issued as soon as there is room, across the end of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .arena import Segment, allocate
from .homes import HomedBlock
from .lanes import Event, Lane, device_module, open_lane
from .layout import align
from .ring_ledger import Extent, RingLedger
from .schedule import UsePredictor


@dataclass(slots=True, eq=False)
class _Staged:
    """A block's bytes in the ring, expected to be used `pending` more times."""

    block: int
    extent: Extent
    ready: Event
    pending: int = 0
    read: Event = None


@dataclass(slots=True)
class StreamCounters:
    """What happened since the streamer was attached."""

    uses: int = 0
    misses: int = 0
    copies: int = 0
    copied_bytes: int = 0
    unstaged: int = 0
    foreign: int = 0


@dataclass(slots=True, eq=False)
class _Active:
    """The block whose forward is running; `staged` is None if its bytes are not in the ring."""

    block: HomedBlock
    staged: _Staged | None


class Streamer:
    """Streams `blocks` into a ring of `ring_bytes` on `compute` while attached to their modules."""

    poison: ClassVar[bool] = False
    """Tests set this: ring bytes are overwritten after each use, so that a missing wait shows as wrong numbers."""

    def __init__(self, blocks: Sequence[HomedBlock], compute: torch.device, ring_bytes: int) -> None:
        """A ring smaller than the largest block becomes as large as that."""
        self.compute = compute
        self.blocks = blocks
        self.counters = StreamCounters()
        self._device = device_module(compute)
        self._ring = Segment(allocate(align(max(ring_bytes, *(block.size for block in blocks))), compute))
        self._ledger = RingLedger(self._ring.data.numel())
        self._lanes: dict[torch.device, Lane] = {}
        self._predictor = UsePredictor(range(len(blocks)))
        self._ahead: deque[tuple[int, _Staged]] = deque()
        self._in_ring: dict[int, _Staged] = {}
        self._released: list[tuple[Extent, Event]] = []
        self._active: _Active | None = None
        self._handles: list[Any] = []

    @property
    def ring_bytes(self) -> int:
        return self._ledger.capacity

    def attach(self) -> None:
        for home in dict.fromkeys(block.device for block in self.blocks):
            self._lanes[home] = open_lane(home, self.compute)
        if self._device is not None:
            # The ring's memory belongs to the stream it was allocated on; the lanes must not write before it is free.
            ready = self._device.Event()
            ready.record(self._device.current_stream(self.compute))
            self._released.append((Extent(0, self.ring_bytes, 0), ready))
        for index, block in enumerate(self.blocks):
            before = block.module.register_forward_pre_hook(
                lambda module, _args, index=index: self._before(index) if self._owns(module, index) else None
            )
            after = block.module.register_forward_hook(
                lambda module, _args, _output, index=index: self._after(index) if self._owns(module, index) else None,
                always_call=True,
            )
            self._handles += [before, after]

    def _owns(self, module: torch.nn.Module, index: int) -> bool:
        """False for a copy of a module of ours, which has its hooks, but weights of its own."""
        return module is self.blocks[index].module

    def close(self) -> None:
        """Leave the modules as they were before `attach`: tensors at home, no hooks, no ring, no copy under way."""
        self.quiesce()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._ring = Segment(allocate(0, self.compute))

    def quiesce(self) -> None:
        """Forget everything staged and wait for copies under way: bytes at home may be changed afterwards."""
        self._recover()
        for lane in self._lanes.values():
            lane.synchronize()
        self._drop(len(self._ahead))

    # -- the two hooks ------------------------------------------------------------------------------------------

    def _before(self, index: int) -> None:
        self._recover()
        block = self.blocks[index]
        if not block.is_home():
            self.counters.foreign += 1
            return
        self.counters.uses += 1
        staged = self._take(index)
        if staged is None:
            self._active = self._bring_unstaged(block)
            return
        if self._device is not None:
            self._device.current_stream(self.compute).wait_event(staged.ready)
        self._active = _Active(block, staged)
        for tensor in block.tensors:
            parts = [leaf.view(self._ring.typed(leaf.dtype), staged.extent.start) for leaf in tensor.leaves]
            tensor.slots[tensor.name] = tensor.rebuild(parts)

    def _after(self, index: int) -> None:
        if self._active is not None and self._active.block is self.blocks[index]:
            self._put_back()
            self._look_ahead()

    def _recover(self) -> None:
        """After an interrupted forward, whose second hook did not run: do what that hook would have done."""
        if self._active is not None:
            self._put_back()

    def _put_back(self) -> None:
        assert self._active is not None
        active, self._active = self._active, None
        for tensor in active.block.tensors:
            tensor.slots[tensor.name] = tensor.home
        staged = active.staged
        if staged is None:
            return
        if self.poison and staged.pending == 1:
            self._ring.data[staged.extent.start : staged.extent.end].fill_(0xFF)
        if self._device is not None:
            staged.read = self._device.Event()
            staged.read.record(self._device.current_stream(self.compute))
        self._unexpect(staged)

    # -- staging ------------------------------------------------------------------------------------------------

    def _take(self, index: int) -> _Staged | None:
        """The staged copy of block `index` for this use; copied now if it was not expected; None if it cannot fit."""
        self._predictor.used(index)
        for skipped, (_, staged) in enumerate(self._ahead):
            if staged.block == index:
                self.counters.misses += skipped > 0
                self._drop(skipped)
                return self._ahead.popleft()[1]
        self.counters.misses += 1
        self._drop(len(self._ahead))
        staged_now = self._stage(index)
        if staged_now is not None:
            staged_now.pending += 1
        return staged_now

    def _look_ahead(self) -> None:
        """Issue copies for the expected uses, in order, while there is room."""
        position = self._ahead[-1][0] + 1 if self._ahead else self._predictor.next_position
        while (index := self._predictor.expected(position)) is not None:
            staged = self._in_ring.get(index) or self._stage(index)
            if staged is None:
                return
            staged.pending += 1
            self._ahead.append((position, staged))
            position += 1

    def _stage(self, index: int) -> _Staged | None:
        block = self.blocks[index]
        extent = self._ledger.reserve(block.size)
        if extent is None:
            return None
        after = self._overwrite(extent)
        target = self._ring.data[extent.start : extent.end]
        ready = self._lanes[block.device].copy(target, block.room.flat, after)
        self.counters.copies += 1
        self.counters.copied_bytes += block.size
        staged = self._in_ring[index] = _Staged(index, extent, ready)
        return staged

    def _overwrite(self, extent: Extent) -> list[Event]:
        """The events to wait for before `extent` is written. Forgets the parts of old extents that it overwrites."""
        wait: list[Event] = []
        left: list[tuple[Extent, Event]] = []
        for old, event in self._released:
            if old.overlaps(extent):
                wait.append(event)
            left += [(part, event) for part in old.without(extent)]
        self._released = left
        return wait

    def _drop(self, count: int) -> None:
        """The first `count` expected uses will not happen."""
        for _ in range(count):
            self._unexpect(self._ahead.popleft()[1])

    def _unexpect(self, staged: _Staged) -> None:
        staged.pending -= 1
        if staged.pending == 0:
            del self._in_ring[staged.block]
            event = staged.read if staged.read is not None else staged.ready
            if event is not None:
                self._released.append((staged.extent, event))
            self._ledger.release(staged.extent)

    def _bring_unstaged(self, block: HomedBlock) -> _Active:
        """Copy a block that has no room in the ring on the compute stream itself, into memory of its own."""
        self.counters.unstaged += 1
        bytes_here = Segment(allocate(block.size, self.compute))
        bytes_here.data.copy_(block.room.flat, non_blocking=True)
        active = _Active(block, None)
        for tensor in block.tensors:
            parts = [leaf.view(bytes_here.typed(leaf.dtype), 0) for leaf in tensor.leaves]
            tensor.slots[tensor.name] = tensor.rebuild(parts)
        return active
