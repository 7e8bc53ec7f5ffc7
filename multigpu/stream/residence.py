"""A residence: the blocks of one model, each resting at the home its plan names, streamed while in use.

    apply(plan)   move what is elsewhere; nothing that is already at home moves
    rewrite()     new contents for some tensors, kept at their homes
    leave()       stop streaming, move donors' bytes to RAM, unpin everything: the model is an ordinary one again

Every tensor is complete at every moment, also when a move fails half way: a weight whose block is not running can
always be read, at its home.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from ..devices.torch_devices import FILE, device_of, torch_device
from ..plan import Plan, Reason
from .arena import Arena, Segment
from .file_homes import Pages, Rest, rest_in_file
from .file_reader import is_worth_it
from .first_uses import FirstUses, Told
from .hoisting import Hoisting
from .homes import HomedBlock, as_parameter, fill, lay_out_block, move_tensor, own_tensors, settle_in
from .lanes import Event, device_module
from .layout import copy_to, is_plain, leaves_of
from .step_times import StepTimes
from .streamer import Spare, Streamer

Progress = Callable[[int], None]
"""Called with the bytes of each block that has come."""

RAM = torch.device("cpu")
OUTGOING = 256 << 20
"""So many bytes may be on their way from the compute device to their homes; memory there is free when they are over."""

UNUSED = 512 << 20
"""So many bytes of RAM in segments may be lost to blocks that have left, so that the others need not move."""

Modules = Mapping[str, torch.nn.Module]
"""The modules that hold tensors themselves, by block name."""


class Residence:
    """Keeps the blocks of one model where plans put them. Holds modules that are streamed or come, never the model."""

    def __init__(self) -> None:
        self.compute = RAM
        self.plan: Plan | None = None
        self.streamer: Streamer | None = None
        self.times = StepTimes()
        self.unhoistable: set[str] = set()
        """Blocks that a plan was to hoist, but that turned out to see more than one token, or others than expected."""
        self.told = Told()
        self.due = FirstUses(RAM, self)
        self._homed: dict[str, HomedBlock] = {}
        self._arenas: list[Arena] = []
        self._out: Any = None
        self._outgoing: deque[tuple[int, Event]] = deque()

    def apply(
        self,
        plan: Plan,
        modules: Modules,
        progress: Progress = lambda count: None,
        page: Pages = lambda block, name: None,
        rest: Rest = lambda block, name: False,
        spare: Spare | None = None,
    ) -> None:
        """Bring every block to its home and stream those that rest away from the compute device.

        Blocks with weights that `page` knows are read from their file in the background, and are there when they are
        used; see `due`. `rest` lets those rest there whose home is the file. Streamed blocks are retained as
        far as `spare` says.
        """
        moves_away = torch_device(plan.compute) != self.compute
        self._stop_streaming(unpin=moves_away)
        self.plan, self.compute = None, torch_device(plan.compute)
        self._out = None if moves_away else self._out
        away = {p.block: torch_device(p.home) for p in plan.placements if p.home != plan.compute}
        left = self._homed
        self._homed = _staying(
            {name: block for name, block in left.items() if away.get(name) == block.device and block.is_home()}
        )
        for block in self._homed:
            del left[block]
        moving = [placement.block for placement in plan.placements if placement.block not in self._homed]
        coming = {
            block
            for block in moving
            if away.get(block) != FILE and self.compute.type == "cuda" and _is_read(block, modules[block], page)
        }
        for block in coming:
            _vacate(left, block)
        filed = {block: modules[block] for block in moving if away.get(block) == FILE}
        for homed in rest_in_file(filed, page, rest, lambda sizes: self._arena(RAM, sizes)):
            self._homed[homed.name] = homed
            _vacate(left, homed.name)
            progress(homed.size)
        rest_of_them = [block for block in moving if block not in coming and block not in filed]
        for block, size in self._fill({block: modules[block] for block in rest_of_them if block in away}, away):
            _vacate(left, block)
            progress(size)
        self._drop_unused()
        with ThreadPoolExecutor(1, "multigpu-pin") as pinning:
            pinned = pinning.submit(self._pin)
            for block in rest_of_them:
                if block not in away:
                    move(modules[block], self.compute)
                    _vacate(left, block)
                    progress(plan[block].bytes)
            pinned.result()
        self._settle()
        self.due = FirstUses(self.compute, self)
        self._send([block for block in moving if block in coming], modules, away, page)
        blocks = [self._homed[p.block] for p in plan.placements if p.block in away]
        if blocks:
            self._stream(blocks, plan, spare)
        self.plan = plan

    def _stream(self, blocks: Sequence[HomedBlock], plan: Plan, spare: Spare | None) -> None:
        self.streamer = Streamer(blocks, self.compute, plan.ring_bytes, spare, self.due)
        hoisted = [number for number, p in enumerate(plan.streamed) if p.reason is Reason.HOISTED]
        if hoisted:
            self.streamer.hoisting = Hoisting(blocks, hoisted, self.unhoistable, self._aside)
        self.streamer.attach()

    def renew(self, blocks: Collection[str], modules: Modules, page: Pages) -> None:
        """Bring blocks to their homes again that rest in the pages of their file now. Only after `changing`."""
        assert self.plan is not None
        away = {p.block: torch_device(p.home) for p in self.plan.streamed}
        self._send([p.block for p in self.plan.placements if p.block in blocks], modules, away, page)

    def _send(self, blocks: Sequence[str], modules: Modules, away: Mapping[str, torch.device], page: Pages) -> None:
        """Have blocks read from their file, in this order. Rooms that they have left are used again."""
        layouts = {block: lay_out_block(modules[block]) for block in blocks if block in away}
        new = [
            block
            for block, (_, size) in layouts.items()
            if (homed := self._homed.get(block)) is None or not homed.emptied(size)
        ]
        arenas = {
            device: self._arena(device, [layouts[block][1] for block in new if away[block] == device])
            for device in dict.fromkeys(away[block] for block in new)
        }
        for block in new:
            room = arenas[away[block]].room(layouts[block][1])
            homed = self._homed.setdefault(block, HomedBlock(block, modules[block], room, ()))
            homed.room = room
        for block in blocks:
            if block in away:
                self.due.send_home(self._homed[block], layouts.pop(block)[0], page)
            else:
                self.due.send(block, modules[block], page)
        self.due.start(self._arenas)

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

    def recover(self) -> None:
        """No forward runs: if the last one was interrupted, its block gets its tensors at home back."""
        if self.streamer is not None:
            self.streamer.recover()

    def intact(self) -> bool:
        """Whether every streamed block is still as we left it (others may have moved the model)."""
        if self.plan is None or self.due.failed:
            return False
        return all(block.is_home() or self.due.is_coming(block.name) for block in self._homed.values())

    def misplaced(self, modules: Modules) -> str | None:
        """A block that is not at its home; None if all are. Looks at resident blocks, too."""
        for block in (placement.block for placement in (self.plan.placements if self.plan is not None else ())):
            if self.due.is_coming(block):
                continue
            homed = self._homed.get(block)
            if not (homed.is_home() if homed is not None else _is_on(modules[block], self.compute)):
                return block
        return None

    def rewrite(
        self, block: str, module: torch.nn.Module, name: str, tensor: torch.Tensor, *, ours: bool = True
    ) -> None:
        """Give one tensor of a block new contents. Only between `changing` and `changed`, or in `passing`.

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
        homed.written = module.Event()
        homed.written.record(self._out)
        self._outgoing.append((tensor.nbytes, homed.written))
        while sum(count for count, _ in self._outgoing) > OUTGOING:
            self._outgoing.popleft()[1].synchronize()
        return written

    def changing(self) -> None:
        """Bytes at home are about to change: nothing staged may be used, no copy may be under way."""
        if self.streamer is not None:
            self.streamer.quiesce()
        self._land()

    def changed(self) -> None:
        """Changes are done: the next copies see them."""
        self._settle()
        if self.streamer is not None:
            self._drop_unused()
            if not self.due.coming:  # which are pinned where they go
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
                        move_tensor(tensor.slots, tensor.name, RAM)
                homed.vacate()
            if homed.device != RAM or not homed.is_home():
                homed.vacate()
                del self._homed[block]
        self._drop_unused()

    def is_in_file(self, block: str) -> bool:
        """Whether a block rests in the model file."""
        return block in self._homed and self._homed[block].device == FILE

    def is_homed(self, block: str) -> bool:
        """Whether a block rests at the home that we gave it, away from the compute device."""
        return block in self._homed

    def homed(self, block: str) -> HomedBlock | None:
        """A block away from the compute device."""
        return self._homed.get(block)

    def warm_up(self) -> None:
        """A pass is not like the others: patches are computed in it."""
        if self.streamer is not None:
            self.streamer.cold = True

    def complete(self) -> None:
        """Everything has come."""
        self._land()
        self._drop_unused()
        self._pin()

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
        pinned = any(arena.pinned_bytes for arena in self._arenas)
        return self.streamer is None and not pinned and not self.due.coming

    # -- moving -------------------------------------------------------------------------------------------------

    def _fill(self, blocks: Modules, away: Mapping[str, torch.device]) -> Iterator[tuple[str, int]]:
        """Copy blocks into new arenas and yield each one's name and size when it is there.

        A block that is copied leaves its old memory before the next is copied.
        """
        layouts = {block: lay_out_block(module) for block, module in blocks.items()}
        for device in dict.fromkeys(away[block] for block in blocks):
            here = [block for block in blocks if away[block] == device]
            arena = self._arena(device, [layouts[block][1] for block in here])
            for block in here:
                laid, size = layouts.pop(block)
                room = arena.room(size)
                fill(room, laid)
                self._homed[block] = HomedBlock(block, blocks[block], room, settle_in(room, laid))
                del laid
                yield block, size

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
        self.due.close()
        self._land()
        self.times.detach()
        if self.streamer is not None:
            self.streamer.close()
            self.streamer = None
        for arena in self._arenas if unpin else ():
            arena.unpin()

    def _land(self) -> None:
        """Wait for bytes on their way home: they can be read then."""
        while self._outgoing:
            self._outgoing.popleft()[1].synchronize()

    def _settle(self) -> None:
        """Wait for moves under way: the lanes copy on streams of their own."""
        for device in {self.compute, *(block.device for block in self._homed.values())}:
            module = device_module(device)
            if module is not None:
                module.synchronize(device)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    return all(device_of(leaf) == device for _, _, tensor in own_tensors(module) for leaf in leaves_of(tensor)[0])


def _is_read(block: str, module: torch.nn.Module, page: Pages) -> bool:
    """Whether weights of a block are read from its file by threads."""
    pages = (page(block, name) for _, name, _ in own_tensors(module))
    return any(is_worth_it(leaf) for its in pages if its is not None for leaf in its.leaves.values())


def _vacate(left: dict[str, HomedBlock], name: str) -> None:
    block = left.pop(name, None)
    if block is not None:
        block.vacate()


def _staying(blocks: dict[str, HomedBlock]) -> dict[str, HomedBlock]:
    """The blocks that stay where they are: all, unless others have left more than `UNUSED` in their segments.

    Then those in the emptiest segments move out, to give these back.
    """
    used: Counter[Segment] = Counter()
    for block in blocks.values():
        if block.room.segment is not None:
            used[block.room.segment] += block.room.size
    kept, room = set[Segment](), UNUSED
    for segment in sorted(used, key=lambda its: its.data.numel() - used[its]):
        room -= segment.data.numel() - used[segment]
        if room >= 0:
            kept.add(segment)
    return {name: block for name, block in blocks.items() if (its := block.room.segment) is None or its in kept}


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` itself holds and is not on `device` yet. Never touches what is there already."""
    for slots, name, _ in [*own_tensors(module)]:
        move_tensor(slots, name, device)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, usable in and outside of inference mode; itself if it is that already."""
    return (
        tensor
        if is_plain(tensor) and not tensor.is_inference() and device_of(tensor) == device
        else copy_to(tensor, device)
    )
