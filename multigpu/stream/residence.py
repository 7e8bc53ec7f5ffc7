"""A residence: the blocks of one model, each resting at the home its plan names, streamed while in use.

    apply(plan)   move what is elsewhere; nothing that is already at home moves
    rewrite()     new contents for some tensors, kept at their homes
    leave()       stop streaming, move donors' bytes to RAM, unpin everything: the model is an ordinary one again

Every tensor is complete at every moment, also when a move fails half way: a weight whose block is not running can
always be read, at its home.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from ..devices.torch_devices import FILE, device_of, torch_device
from ..plan import Plan, Reason
from .arena import Arena, Room, Segment
from .file_homes import Pages, Rest, rest_in_file
from .file_reader import FileReader
from .hoisting import Hoisting
from .homes import HomedBlock, Laid, Read, as_parameter, fill, lay_out_block, moved, own_tensors, settle_in
from .lanes import device_module
from .layout import copy_to, is_plain, leaves_of
from .pages import Page
from .step_times import StepTimes
from .streamer import Spare, Streamer

Progress = Callable[[int], None]
"""Called with the bytes of each block that has been moved."""

RAM = torch.device("cpu")
AHEAD = 1 << 30
"""So many bytes that go to RAM are being read at a time."""


Modules = Mapping[str, torch.nn.Module]
"""The modules that hold tensors themselves, by block name."""


class Residence:
    """Keeps the blocks of one model where plans put them. Holds only modules that are streamed, never the model."""

    def __init__(self) -> None:
        self.compute = RAM
        self.plan: Plan | None = None
        self.streamer: Streamer | None = None
        self.times = StepTimes()
        self.unhoistable: set[str] = set()
        """Blocks that a plan was to hoist, but that turned out to see more than one token, or others than expected."""
        self._homed: dict[str, HomedBlock] = {}
        self._arenas: list[Arena] = []
        self._out: Any = None

    def apply(
        self,
        plan: Plan,
        modules: Modules,
        progress: Progress = lambda count: None,
        page: Pages = lambda block, name: None,
        rest: Rest = lambda block, name: False,
        spare: Spare | None = None,
    ) -> None:
        """Bring every block to its home and start to stream those that rest away from the compute device.

        Weights that `page` knows are read from their file. `rest` lets those rest there whose home is the file.
        Streamed blocks are retained as far as `spare` says.
        """
        moves_away = torch_device(plan.compute) != self.compute
        self._stop_streaming(unpin=moves_away)
        self.plan, self.compute = None, torch_device(plan.compute)
        self._out = None if moves_away else self._out
        away = {p.block: torch_device(p.home) for p in plan.placements if p.home != plan.compute}
        left = self._homed
        self._homed = _in_full_segments(
            {name: block for name, block in left.items() if away.get(name) == block.device and block.is_home()}
        )
        for block in self._homed:
            del left[block]
        moving = {block: modules[block] for block in away if block not in self._homed}
        resident = [placement for placement in plan.placements if placement.block not in away]
        filed = {block: moving.pop(block) for block in [*moving] if away[block] == FILE}
        with FileReader(self.compute) as reader, ThreadPoolExecutor(1, "multigpu-pin") as pinning:
            for homed in rest_in_file(filed, page, rest, lambda sizes: self._arena(RAM, sizes)):
                self._homed[homed.name] = homed
                _vacate(left, homed.name)
                progress(homed.size)
            for block, size in self._fill(moving, away, reader, page, pinning):
                _vacate(left, block)
                progress(size)
            reader.expect(_pages(modules, (placement.block for placement in resident), page))
            self._drop_unused()
            pinned = pinning.submit(self._pin)
            for placement in resident:
                _bring(placement.block, modules[placement.block], self.compute, reader, page)
                _vacate(left, placement.block)
                progress(placement.bytes)
            pinned.result()
        self._settle()
        blocks = [self._homed[p.block] for p in plan.placements if p.block in away]
        if blocks:
            self.streamer = Streamer(blocks, self.compute, plan.ring_bytes, spare)
            hoisted = [number for number, p in enumerate(plan.streamed) if p.reason is Reason.HOISTED]
            if hoisted:
                self.streamer.hoisting = Hoisting(blocks, hoisted, self.unhoistable, self._aside)
            self.streamer.attach()
        self.plan = plan

    def time_steps(self, *, cold: bool) -> None:
        """Time the next steps, if blocks are streamed. `cold`: the first of them is not like the others."""
        if self.streamer is not None and self.plan is not None:
            self.times.begin(self.plan, self.streamer.blocks, self.compute, cold=cold)

    @property
    def hoisting(self) -> Hoisting | None:
        return None if self.streamer is None else self.streamer.hoisting

    def forget_hoisted(self) -> None:
        """The model gets other patches: what was computed ahead is not right for them."""
        if self.hoisting is not None:
            self.hoisting.forget()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Blocks that run meanwhile are no part of a step."""
        assert self.streamer is not None
        self.times.paused = True
        try:
            with self.streamer.aside():
                yield
        finally:
            self.times.paused = False

    def intact(self) -> bool:
        """Whether every streamed block is still as we left it (others may have moved the model)."""
        return self.plan is not None and all(block.is_home() for block in self._homed.values())

    def misplaced(self, modules: Modules) -> str | None:
        """A block that is not at its home; None if all are. Looks at resident blocks, too."""
        for block in (placement.block for placement in (self.plan.placements if self.plan is not None else ())):
            homed = self._homed.get(block)
            if not (homed.is_home() if homed is not None else _is_on(modules[block], self.compute)):
                return block
        return None

    def rewrite(
        self, block: str, module: torch.nn.Module, name: str, tensor: torch.Tensor, *, ours: bool = True
    ) -> None:
        """Give one tensor of a block new contents. Only between `changing` and `changed`.

        `tensor` itself may become the module's parameter, unless `ours` is false: then it is copied. The new contents
        are at the block's home, otherwise on the compute device, or in RAM if no plan is in force. If other code holds
        a tensor of the block, its bytes stay as they are.
        """
        homed = self._homed.get(block)
        if homed is None or not homed.is_home():
            slots: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            device = self.compute if self.plan is not None else RAM
            here = _on(tensor, device) if ours else copy_to(tensor, device)
            slots[name] = as_parameter(here) if isinstance(slots[name], torch.nn.Parameter) else here
        elif not self._written(homed, name, tensor):
            if self._out is not None:
                self._out.synchronize()  # other tensors of the block may still be on their way to where it moves from
            laid, size = lay_out_block(module, {name: tensor})
            homed.move_to(self._arena(device_of(homed.room.flat), [size]).room(size), laid)

    def _written(self, homed: HomedBlock, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor could be overwritten. One on the compute device is copied on a stream of its own, so that
        the device can go on with the next one; the copy may still be under way afterwards.
        """
        module = device_module(self.compute)
        leaves, _ = leaves_of(tensor)
        if module is None or any(device_of(leaf) != self.compute for leaf in leaves):
            return homed.write(name, tensor)
        if self._out is None:
            self._out = module.Stream(device=self.compute)
        self._out.wait_stream(module.current_stream(self.compute))
        with module.stream(self._out):
            written = homed.write(name, tensor)
        for leaf in leaves:
            leaf.record_stream(self._out)
        return written

    def changing(self) -> None:
        """Bytes at home are about to change: nothing staged may be used, no copy may be under way."""
        if self.streamer is not None:
            self.streamer.quiesce()

    def changed(self) -> None:
        """Changes are done: the next copies see them."""
        self._settle()
        if self.streamer is not None:
            self._drop_unused()
            self._pin()

    @property
    def retained_bytes(self) -> int:
        """Bytes of streamed blocks that stay on the compute device for now."""
        streamer = self.streamer
        return 0 if streamer is None else streamer.retained_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring on the compute device."""
        streamer = self.streamer
        return 0 if streamer is None else streamer.ring_bytes

    @property
    def hoisted_bytes(self) -> int:
        """Bytes of streamed blocks that are computed ahead instead of copied in each step."""
        return 0 if self.hoisting is None else self.hoisting.spared_bytes

    def release(self, count: float) -> int:
        """Give back so many bytes of those, or all. Returns how many."""
        return 0 if self.streamer is None or count <= 0 else self.streamer.release(count)

    def leave(self, elsewhere: Callable[[str, str], bool] = lambda block, name: False) -> None:
        """Stop streaming and unpin. Bytes on donors go to RAM; those in RAM and on the compute device stay there.

        Blocks that rest in RAM are remembered: a later `apply` finds them at home. `elsewhere` may put a tensor of a
        block, given by name, into other memory with the same contents, and return True: then it is not copied.
        """
        self._stop_streaming()
        self.plan = None
        for block, homed in [*self._homed.items()]:
            if homed.device != RAM:
                for tensor in homed.tensors:
                    if tensor.is_home() and not elsewhere(block, tensor.name):
                        _move(tensor.slots, tensor.name, RAM)
                homed.vacate()
            if homed.device != RAM or not homed.is_home():
                del self._homed[block]

    def is_in_file(self, block: str) -> bool:
        """Whether a block rests in the model file."""
        return block in self._homed and self._homed[block].device == FILE

    def is_homed(self, block: str) -> bool:
        """Whether a block rests at the home that we gave it, away from the compute device."""
        return block in self._homed

    def forget(self) -> None:
        """`leave`, and drop all arenas: only the memory that the model's tensors still use stays allocated."""
        self.leave()
        self.close()

    def close(self) -> None:
        """The model is gone: give everything back."""
        self._stop_streaming()
        self.plan = None
        self._homed.clear()
        self._arenas.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing streams and nothing is pinned, so that no device uses this memory."""
        return self.streamer is None and not any(arena.pinned_bytes for arena in self._arenas)

    # -- moving -------------------------------------------------------------------------------------------------

    def _fill(
        self, blocks: Modules, away: Mapping[str, torch.device], reader: FileReader, page: Pages, pinning: Executor
    ) -> Iterator[tuple[str, int]]:
        """Copy blocks into new arenas and yield each one's name and size when it is there.

        A block that is copied leaves its old memory before the next is copied. Of blocks that are read from a file
        several are under way at a time; meanwhile the memory of those that are there is pinned.
        """
        layouts = {block: lay_out_block(module) for block, module in blocks.items()}
        for device in dict.fromkeys(away[block] for block in blocks):
            here = [block for block in blocks if away[block] == device]
            arena = self._arena(device, [layouts[block][1] for block in here])
            under_way: deque[tuple[str, Laid, Room, list[Future[None]]]] = deque()
            for block in here:
                laid, size = layouts.pop(block)
                room, reading = arena.room(size), list[Future[None]]()
                fill(room, laid, _read_by(reader, page, block, device, reading))
                under_way.append((block, laid, room, reading))
                del laid
                while under_way and (not reading or sum(room.size for _, _, room, _ in under_way) > AHEAD):
                    segment = under_way[0][2].segment
                    yield self._arrived(blocks, *under_way.popleft())
                    if under_way and under_way[0][2].segment is not segment:
                        pinning.submit(arena.pin, self.compute, up_to=under_way[0][2].segment)
            while under_way:
                yield self._arrived(blocks, *under_way.popleft())

    def _arrived(
        self, blocks: Modules, name: str, laid: Laid, room: Room, reading: list[Future[None]]
    ) -> tuple[str, int]:
        for done in reading:
            done.result()
        self._homed[name] = HomedBlock(name, blocks[name], room, settle_in(room, laid))
        return name, room.size

    def _arena(self, device: torch.device, sizes: Sequence[int]) -> Arena:
        arena = Arena(device, sizes)
        if device == RAM:
            self._arenas.append(arena)
        return arena

    def _drop_unused(self) -> None:
        """Give up memory in RAM that no block rests in any more."""
        used = {block.room.segment for block in self._homed.values() if block.room.segment is not None}
        for arena in self._arenas:
            arena.keep(used)
        self._arenas = [arena for arena in self._arenas if arena.segments]

    def _pin(self) -> None:
        """Pin all memory in RAM that blocks rest in."""
        for arena in self._arenas:
            arena.pin(self.compute)

    def _stop_streaming(self, *, unpin: bool = True) -> None:
        self.times.detach()
        if self.streamer is not None:
            self.streamer.close()
            self.streamer = None
        for arena in self._arenas if unpin else ():
            arena.unpin()

    def _settle(self) -> None:
        """Wait for moves under way: the lanes copy on streams of their own."""
        for device in {self.compute, *(block.device for block in self._homed.values())}:
            module = device_module(device)
            if module is not None:
                module.synchronize(device)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    return all(device_of(leaf) == device for _, _, tensor in own_tensors(module) for leaf in leaves_of(tensor)[0])


def _read_by(reader: FileReader, page: Pages, block: str, device: torch.device, reading: list[Future[None]]) -> Read:
    def read(name: str, memory: torch.Tensor) -> bool:
        its = page(block, name)
        if device != RAM or its is None or not reader.reads(its):
            return False
        reading.extend(reader.fill(memory, its))
        return True

    return read


def _pages(modules: Modules, blocks: Iterable[str], page: Pages) -> Iterator[Page]:
    """The pages that weights of these blocks are in, in the order in which they will be read."""
    for block in blocks:
        for _, name, _ in own_tensors(modules[block]):
            its = page(block, name)
            if its is not None:
                yield its


def _bring(block: str, module: torch.nn.Module, device: torch.device, reader: FileReader, page: Pages) -> None:
    """`move`, with what is in a file read from there."""
    for slots, name, tensor in [*own_tensors(module)]:
        its = page(block, name)
        if its is not None and reader.reads(its):
            slots[name] = moved(tensor, reader.on_device(its))
        else:
            _move(slots, name, device)


def _vacate(left: dict[str, HomedBlock], name: str) -> None:
    block = left.pop(name, None)
    if block is not None:
        block.vacate()


def _in_full_segments(blocks: dict[str, HomedBlock]) -> dict[str, HomedBlock]:
    """The blocks that may stay where they are; those in a segment that others have left move out, to give it back."""
    used: Counter[Segment] = Counter()
    for block in blocks.values():
        if block.room.segment is not None:
            used[block.room.segment] += block.room.size
    return {
        name: block
        for name, block in blocks.items()
        if (segment := block.room.segment) is None or used[segment] == segment.data.numel()
    }


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` itself holds and is not on `device` yet. Never touches what is there already."""
    for slots, name, _ in [*own_tensors(module)]:
        _move(slots, name, device)


def _move(slots: dict[str, Any], name: str, device: torch.device) -> None:
    leaves, rebuild = leaves_of(slots[name])
    if any(device_of(leaf) != device for leaf in leaves):
        with torch.inference_mode(False), torch.no_grad():
            there = [torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.to(device) for leaf in leaves]
        slots[name] = moved(slots[name], rebuild(there))


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, usable in and outside of inference mode; itself if it is that already."""
    return (
        tensor
        if is_plain(tensor) and not tensor.is_inference() and device_of(tensor) == device
        else copy_to(tensor, device)
    )
