"""The streamer: copies blocks into a ring on the compute device ahead of their use (staging), and releases them after.

    home (pinned RAM, other GPU) --lane--> ring on the compute device --hooks--> module parameters, for one forward

Ordering, by events only (the host waits for nothing but a file that is still being read):
- a copy into ring bytes starts after the compute that last read those bytes;
- a block's forward starts after its copy;
- the copy of the next expected block is issued as soon as there is room, across the end of a step.

Blocks may be retained: their bytes stay on the compute device, in memory of their own, as long as there is room to
spare. Their home has them too, so that the memory can be given back at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from ..devices.torch_devices import FILE, device_name
from ..units import format_bytes
from .arena import Segment, allocate
from .file_lane import open_file_lane
from .first_uses import FirstUses
from .hoisting import Hoisting
from .homes import HomedBlock
from .lanes import Event, Lane, check, device_module, open_lane, wait_for
from .layout import align, copy_leaves
from .ring_ledger import Extent, RingLedger
from .schedule import UsePredictor

log = logging.getLogger("multigpu")

SLAB_BYTES = 128 << 20
"""Blocks that stay on the compute device share memory of about this size, which is given back as a whole."""


@dataclass(slots=True, eq=False)
class _Staged:
    """A block's bytes in the ring, expected to be used `pending` more times; or in memory of their own, to stay."""

    block: int
    memory: Segment
    extent: Extent
    ready: Event
    retained: bool = False
    pending: int = 0
    read: Event = None


@dataclass(slots=True, eq=False)
class _Slab:
    """Memory of the compute device in which blocks stay, and where each begins."""

    memory: Segment
    starts: dict[int, int]


@dataclass(slots=True)
class StreamCounters:
    """What happened since the streamer was attached."""

    uses: int = 0
    misses: int = 0
    copies: int = 0
    copied_bytes: int = 0
    unstaged: int = 0
    foreign: int = 0
    hoisted: int = 0


@dataclass(slots=True, eq=False)
class _Active:
    """The block whose forward is running; `staged` is None if its bytes are not in the ring."""

    block: HomedBlock
    staged: _Staged | None


@dataclass(frozen=True, slots=True)
class Spare:
    """Room on the compute device beside what the plan uses, for streamed blocks that stay there."""

    room: Callable[[], int]
    """Bytes that are free and needed by nobody; below zero: so many that must be given back."""
    choose: Callable[[Mapping[str, int], int], Collection[str]]
    """From the bytes of blocks, and those that there are, to the blocks that stay."""


class Streamer:
    """Streams `blocks` into a ring of `ring_bytes` on `compute` while attached to their modules."""

    poison: ClassVar[bool] = False
    """Tests set this: ring bytes are overwritten after each use, so that a missing wait shows as wrong numbers."""

    def __init__(
        self,
        blocks: Sequence[HomedBlock],
        compute: torch.device,
        ring_bytes: int,
        spare: Spare | None = None,
        due: FirstUses | None = None,
    ) -> None:
        """A ring smaller than the largest block becomes as large as that. Without `spare` no block is retained.

        `due` knows what blocks need when they are first used; without it they need nothing.
        """
        self.compute = compute
        self.blocks = blocks
        self.counters = StreamCounters()
        self._due = due
        self.hoisting: Hoisting | None = None
        """Knows which blocks need no weights in a pass."""
        self.cold = True
        """Whether weights are loaded in this pass, or get patches, of streamed blocks or others."""
        self._aside: dict[int, Segment] | None = None
        self._device = device_module(compute)
        self._ring = Segment(allocate(align(max(ring_bytes, *(block.size for block in blocks))), compute))
        self._ledger = RingLedger(self._ring.data.numel())
        self._lanes: dict[torch.device, Lane] = {}
        self._predictor = UsePredictor(range(len(blocks)))
        self._ahead: deque[tuple[int, _Staged]] = deque()
        self._staged: dict[int, _Staged] = {}
        self._spare = spare
        self._slabs: list[_Slab] = []
        self._may_retain_more = True
        self._in_pass: dict[int, None] = {}
        self._released: list[tuple[Extent, Event]] = []
        self._copied_here: Event = None
        self._active: _Active | None = None
        self._handles: list[Any] = []

    @property
    def ring_bytes(self) -> int:
        return self._ledger.capacity

    def attach(self) -> None:
        for home in dict.fromkeys(block.device for block in self.blocks):
            self._lane(home)
        if self._device is not None:
            # The ring's memory belongs to the stream it was allocated on; the lanes must not write before it is free.
            ready = self._device.Event()
            ready.record(self._device.current_stream(self.compute))
            self._released.append((Extent(0, self.ring_bytes, 0), ready))
        for index, block in enumerate(self.blocks):
            before = block.module.register_forward_pre_hook(
                lambda module, args, index=index: self._before(index, args) if self._owns(module, index) else None
            )
            after = block.module.register_forward_hook(
                lambda module, _args, _output, index=index: self._after(index) if self._owns(module, index) else None,
                always_call=True,
            )
            self._handles += [before, after]

    def _owns(self, module: torch.nn.Module, index: int) -> bool:
        """False for a copy of a module of ours, which has its hooks, but weights of its own."""
        return module is self.blocks[index].module

    def _lane(self, home: torch.device) -> Lane:
        if home not in self._lanes:
            self._lanes[home] = open_file_lane(self.compute) if home == FILE else open_lane(home, self.compute)
        return self._lanes[home]

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
        self.recover()
        for lane in self._lanes.values():
            lane.synchronize()
        if self._copied_here is not None:
            self._copied_here.synchronize()
        self._drop(len(self._ahead))
        if self.hoisting is not None:
            self.hoisting.forget()
        if self._slabs:
            self.release(self.retained_bytes)
            self._may_retain_more = True

    # -- retaining ----------------------------------------------------------------------------------------------

    @property
    def retained_bytes(self) -> int:
        return sum(slab.memory.data.numel() for slab in self._slabs)

    def retain_more(self) -> None:
        """A new run begins, and there may be other room: it is looked at again after its first pass."""
        self._may_retain_more = True
        self._in_pass.clear()

    def release(self, count: float) -> int:
        """Give back at least so many bytes of retained blocks, or all. Returns how many."""
        if not self._slabs or count <= 0:
            return 0
        self.recover()
        self._drop(len(self._ahead))
        before = self.retained_bytes
        while self._slabs and before - self.retained_bytes < count:
            slab = self._slabs.pop()
            staged = [self._staged.pop(index) for index in slab.starts if index in self._staged]
            if self._device is not None:
                stream = self._device.current_stream(self.compute)
                slab.memory.data.record_stream(stream)  # which may still read it
                for its in staged:
                    wait_for(stream, its.ready)  # a copy may still be under way
        self._empty_cache()
        return before - self.retained_bytes

    def _empty_cache(self) -> None:
        """So that the driver has the memory, and not only torch."""
        empty_cache = getattr(self._device, "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    def _after_pass(self) -> None:
        """All blocks have run, so what a pass needs is allocated, or in the allocator's cache. The rest can be used.

        Not after a cold pass: that has needed more than the next one will.
        """
        if self._due is not None and self._due.outstanding:
            self._due.finish()
        if self.cold:
            self.cold = False
            self._empty_cache()
            return
        room = 0 if self._spare is None else self._spare.room()
        if room < 0:
            self._may_retain_more = False
            self.release(-room)
        elif self._spare is not None and self._may_retain_more and room:
            self._may_retain_more = False
            known = {index for slab in self._slabs for index in slab.starts}
            known |= self.hoisting.numbers if self.hoisting is not None else set()
            sizes = {block.name: block.size for index, block in enumerate(self.blocks) if index not in known}
            stay = self._spare.choose(sizes, room)
            chosen = [index for index, block in enumerate(self.blocks) if block.name in stay]
            if chosen and self._retain(chosen):
                words = "[MultiGPU] %s of the streamed weights stay on %s: there is room"
                log.info(words, format_bytes(self.retained_bytes), device_name(self.compute))

    def _retain(self, blocks: Sequence[int]) -> bool:
        """Memory of their own for these blocks, which come there when they are next expected. False if there is none.

        It is allocated for the stream that fills it. So it is taken from the driver, and the allocator's cache stays as
        the next pass needs it.
        """
        slabs: list[list[int]] = [[]]
        for index in blocks:
            if sum(self.blocks[each].size for each in slabs[-1]) >= SLAB_BYTES:
                slabs.append([])
            slabs[-1].append(index)
        try:
            for slab in slabs:
                ends = [*accumulate(self.blocks[index].size for index in slab)]
                with self._lane(self.blocks[slab[0]].device).current():
                    memory = Segment(allocate(ends[-1], self.compute))
                self._slabs.append(_Slab(memory, dict(zip(slab, [0, *ends], strict=False))))
        except RuntimeError:  # torch.OutOfMemoryError is one; other backends raise their own
            return bool(self._slabs)
        return True

    # -- the two hooks ------------------------------------------------------------------------------------------

    def _before(self, index: int, given: tuple[Any, ...]) -> None:
        self.recover()
        block = self.blocks[index]
        if self._due is not None and self._due.is_coming(block.name):
            self._due.bring(block.name)
        if not block.is_home():
            self.counters.foreign += 1
            return
        if self._aside is not None:
            self._bring_aside(index, given)
            return
        skipped = self.hoisting is not None and self.hoisting.skips(index, given)
        self.counters.uses += 1
        if next(iter(self._in_pass), None) == index and len(self._in_pass) > len(self.blocks) // 2:
            self._in_pass.clear()
            self._after_pass()
        self._in_pass[index] = None
        if skipped:
            self._pass_over(index)
            return
        staged = self._take(index)
        if staged is None:
            self._bring_unstaged(block)
            return
        try:
            if self._device is not None:
                wait_for(self._device.current_stream(self.compute), staged.ready)
            check(staged.ready)
            tensors = self._tensors(block, staged.memory, staged.extent.start)
        except BaseException:
            self._let_go(staged)
            if block.awaits:  # some of its weights at home may have their patches, and what is staged has not
                self.quiesce()
            raise
        self._give(block, staged, tensors)

    def _tensors(self, block: HomedBlock, memory: Segment, start: int) -> dict[str, torch.Tensor]:
        """A block's tensors on the compute device, with the patches that are due.

        Computing patches may need memory, and retained blocks be given back for it. So no block is active meanwhile.
        """
        tensors = {tensor.name: tensor.over(memory, start) for tensor in block.tensors}
        if self._due is not None and (block.awaits or block.pages):
            patched = self._due.passing(block.name, tensors)
            if block.awaits:  # what is staged may be used again: it has to be what is at home now
                for tensor in block.tensors:
                    if tensor.name in patched:
                        tensors[tensor.name] = tensor.over(memory, start)
                        copy_leaves(patched[tensor.name], tensors[tensor.name])
                self._due.has_patches(block.name)
            else:
                tensors.update(patched)
        return tensors

    def _give(self, block: HomedBlock, staged: _Staged | None, tensors: dict[str, torch.Tensor]) -> None:
        """Give the module these tensors for one forward."""
        self._active = _Active(block, staged)
        for tensor in block.tensors:
            tensor.slots[tensor.name] = tensors[tensor.name]

    def _after(self, index: int) -> None:
        if self._active is not None and self._active.block is self.blocks[index]:
            self._put_back()
            if self._aside is None:
                self._look_ahead()
        if self._due is not None and self._aside is None:
            self._due.look()

    def recover(self) -> None:
        """After an interrupted forward, whose second hook did not run: do what that hook would have done.

        torch runs it after exceptions, but not after what is only a `BaseException`, such as the host's interrupt.
        """
        if self._active is not None:
            self._put_back()

    def _put_back(self) -> None:
        assert self._active is not None
        active, self._active = self._active, None
        for tensor in active.block.tensors:
            tensor.slots[tensor.name] = tensor.home
        if active.staged is not None:
            self._let_go(active.staged)

    def _let_go(self, staged: _Staged) -> None:
        """The use of a staged copy is over, as soon as the device is through with it."""
        if self.poison and staged.pending == 1 and not staged.retained:
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
        staged_now = self._staged.get(index) or self._stage(index)
        if staged_now is not None:
            staged_now.pending += 1
        return staged_now

    def _look_ahead(self) -> None:
        """Issue copies for the expected uses, in order, while there is room."""
        position = self._ahead[-1][0] + 1 if self._ahead else self._predictor.next_position
        while (index := self._predictor.expected(position)) is not None:
            if self.hoisting is not None and not self.hoisting.needed(index):
                position += 1
                continue
            if self._due is not None and not self._due.is_there(self.blocks[index].name):
                return
            staged = self._staged.get(index) or self._stage(index)
            if staged is None:
                return
            staged.pending += 1
            self._ahead.append((position, staged))
            position += 1

    def _stage(self, index: int) -> _Staged | None:
        for slab in self._slabs:
            if index in slab.starts:
                place = Extent(slab.starts[index], self.blocks[index].size, 0)
                return self._copied(index, slab.memory, place, (), retained=True)
        extent = self._ledger.reserve(self.blocks[index].size)
        if extent is None:
            return None
        return self._copied(index, self._ring, extent, self._overwrite(extent))

    def _copied(
        self, index: int, memory: Segment, extent: Extent, after: Sequence[Event], *, retained: bool = False
    ) -> _Staged:
        block = self.blocks[index]
        after = (*after, block.written) if block.written is not None else after
        ready = self._lane(block.device).copy(memory.data[extent.start : extent.end], block.source, after)
        self.counters.copies += 1
        self.counters.copied_bytes += block.size
        staged = self._staged[index] = _Staged(index, memory, extent, ready, retained)
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
        if staged.pending == 0 and not staged.retained:
            del self._staged[staged.block]
            event = staged.read if staged.read is not None else staged.ready
            if event is not None:
                self._released.append((staged.extent, event))
            self._ledger.release(staged.extent)

    def _pass_over(self, index: int) -> None:
        """A block runs that needs no weights. It is part of the sequence all the same."""
        self.counters.hoisted += 1
        self._predictor.used(index)
        if self._ahead and self._ahead[0][1].block == index:
            self._drop(1)
        self._look_ahead()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Blocks that run meanwhile are no part of the sequence. Each is copied once, and nothing staged is touched."""
        self._aside = {}
        try:
            yield
        finally:
            self.recover()
            self._aside = None

    def _bring_aside(self, index: int, given: tuple[Any, ...]) -> None:
        assert self._aside is not None
        if self.hoisting is not None:
            self.hoisting.reached(index, given)
        block = self.blocks[index]
        if index not in self._aside:
            self._aside[index] = self._copy_here(block)
        self._give(block, None, self._tensors(block, self._aside[index], 0))

    def _bring_unstaged(self, block: HomedBlock) -> None:
        """Copy a block that has no room in the ring on the compute stream itself, into memory of its own."""
        self.counters.unstaged += 1
        self._give(block, None, self._tensors(block, self._copy_here(block), 0))

    def _copy_here(self, block: HomedBlock) -> Segment:
        bytes_here = Segment(allocate(block.size, self.compute))
        if block.written is not None and self._device is not None:
            wait_for(self._device.current_stream(self.compute), block.written)
        block.copy_into(bytes_here.data)
        if self._device is not None:
            self._copied_here = self._device.Event()
            self._copied_here.record(self._device.current_stream(self.compute))
        self.counters.copied_bytes += block.size
        return bytes_here
