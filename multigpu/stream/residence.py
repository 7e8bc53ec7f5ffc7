"""A residence: the blocks of one model, each resting at the home its plan names, streamed while in use.

    apply(plan)   move what is elsewhere; nothing that is already at home moves
    rewrite()     new contents for some tensors, kept at their homes
    leave()       stop streaming, move donors' bytes to RAM, unpin everything: the model is an ordinary one again

Every tensor is complete at every moment, also when a move fails half way: a weight whose block is not running can
always be read, at its home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..devices.torch_devices import device_of, torch_device
from ..plan import Plan
from .arena import Arena, Segment
from .file_reader import FileReader
from .homes import HomedBlock, Read, as_parameter, lay_out_block, moved, own_tensors, settle_in
from .lanes import device_module
from .layout import copy_to, is_plain, leaves_of
from .pages import Page
from .streamer import Streamer

Progress = Callable[[int], None]
"""Called with the bytes of each block that has been moved."""

Pages = Callable[[str, str], Page | None]
"""The page that a tensor, given by block and name, is in; None for one that is elsewhere."""

RAM = torch.device("cpu")


Modules = Mapping[str, torch.nn.Module]
"""The modules that hold tensors themselves, by block name."""


class Residence:
    """Keeps the blocks of one model where plans put them. Holds only modules that are streamed, never the model."""

    def __init__(self) -> None:
        self.compute = RAM
        self.plan: Plan | None = None
        self.streamer: Streamer | None = None
        self._homed: dict[str, HomedBlock] = {}
        self._arenas: list[Arena] = []

    def apply(
        self,
        plan: Plan,
        modules: Modules,
        progress: Progress = lambda count: None,
        page: Pages = lambda block, name: None,
    ) -> None:
        """Bring every block to its home and start to stream those that rest away from the compute device.

        Weights that `page` knows are read from their file.
        """
        self._stop_streaming()
        self.plan, self.compute = None, torch_device(plan.compute)
        away = {p.block: torch_device(p.home) for p in plan.placements if p.home != plan.compute}
        left = self._homed
        self._homed = _in_full_segments(
            {name: block for name, block in left.items() if away.get(name) == block.device and block.is_home()}
        )
        for block in self._homed:
            del left[block]
        moving = {block: modules[block] for block in away if block not in self._homed}
        with FileReader(self.compute) as reader:
            for block, size in self._fill(moving, away, reader, page):
                _vacate(left, block)
                progress(size)
            for placement in plan.placements:
                if placement.block not in away:
                    _bring(placement.block, modules[placement.block], self.compute, reader, page)
                    _vacate(left, placement.block)
                    progress(placement.bytes)
        self._settle()
        blocks = [self._homed[p.block] for p in plan.placements if p.block in away]
        if blocks:
            self._pin()
            self.streamer = Streamer(blocks, self.compute, plan.ring_bytes)
            self.streamer.attach()
        self.plan = plan

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
        elif not homed.write(name, tensor):
            laid, size = lay_out_block(module, {name: tensor})
            homed.move_to(self._arena(homed.device, [size]).room(size), laid)

    def changing(self) -> None:
        """Bytes at home are about to change: nothing staged may be used, no copy may be under way."""
        if self.streamer is not None:
            self.streamer.quiesce()

    def changed(self) -> None:
        """Changes are done: the next copies see them."""
        self._settle()
        if self.streamer is not None:
            self._pin()

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
        self, blocks: Modules, away: Mapping[str, torch.device], reader: FileReader, page: Pages
    ) -> Iterator[tuple[str, int]]:
        """Copy blocks into new arenas, one at a time, and yield each one's name and size when it is there.

        The source of each is free before the next is copied.
        """
        layouts = {block: lay_out_block(module) for block, module in blocks.items()}
        for device in dict.fromkeys(away[block] for block in blocks):
            here = [block for block in blocks if away[block] == device]
            arena = self._arena(device, [layouts[block][1] for block in here])
            for block in here:
                laid, size = layouts.pop(block)
                room, read = arena.room(size), _read_by(reader, page, block, device)
                self._homed[block] = HomedBlock(block, blocks[block], room, settle_in(room, laid, read))
                del laid
                yield block, size

    def _arena(self, device: torch.device, sizes: Sequence[int]) -> Arena:
        arena = Arena(device, sizes)
        if device == RAM:
            self._arenas.append(arena)
        return arena

    def _pin(self) -> None:
        """Pin all memory in RAM that blocks rest in, and give up what none rests in any more."""
        used = {block.room.segment for block in self._homed.values() if block.room.segment is not None}
        for arena in self._arenas:
            arena.keep(used)
            arena.pin(self.compute)
        self._arenas = [arena for arena in self._arenas if arena.segments]

    def _stop_streaming(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
            self.streamer = None
        for arena in self._arenas:
            arena.unpin()

    def _settle(self) -> None:
        """Wait for moves under way: the lanes copy on streams of their own."""
        for device in {self.compute, *(block.device for block in self._homed.values())}:
            module = device_module(device)
            if module is not None:
                module.synchronize(device)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    return all(device_of(leaf) == device for _, _, tensor in own_tensors(module) for leaf in leaves_of(tensor)[0])


def _read_by(reader: FileReader, page: Pages, block: str, device: torch.device) -> Read:
    def read(name: str, memory: torch.Tensor) -> bool:
        its = page(block, name)
        if device != RAM or its is None or not reader.reads(its):
            return False
        reader.fill(memory, its)
        return True

    return read


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
            used[block.room.segment] += block.size
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
