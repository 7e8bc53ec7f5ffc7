"""A residence: the blocks of one model, each resting at the home its plan names, streamed while in use.

    apply(plan)   move what is elsewhere; nothing that is already at home moves
    rewrite()     new contents for some tensors, kept at their homes
    leave()       stop streaming, donors' bytes to RAM, no pinned page left: the module is an ordinary one again

Every tensor is a real, whole tensor at every moment, also when a move fails half way: whoever reads a weight while its
block is not running finds it at its home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..plan import DeviceId, Plan
from .arena import Arena, Room
from .lanes import device_module
from .layout import copy_to, lay_out, leaves_of
from .streamer import HomedBlock, HomedTensor, Streamer

Progress = Callable[[int], None]
"""Called with the bytes of each block that has been dealt with."""

RAM = torch.device("cpu")


def torch_device(device: DeviceId) -> torch.device:
    return torch.device(str(device))


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The parameters and buffers of `module` itself: where they are kept, their name, the tensor."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            if tensor is not None:
                yield slots, name, tensor


Modules = Mapping[str, torch.nn.Module]
"""The modules that hold tensors themselves, by block name."""


class Residence:
    """Keeps the blocks of one model where plans put them. Holds only modules that are streamed, never the model."""

    def __init__(self, compute: torch.device) -> None:
        self.compute = compute
        self.plan: Plan | None = None
        self.streamer: Streamer | None = None
        self._homed: dict[str, HomedBlock] = {}
        self._arenas: list[Arena] = []

    def apply(
        self, plan: Plan, modules: Modules, progress: Progress = lambda count: None, poison: bool = False
    ) -> None:
        """Bring every block to its home and start to stream those that rest away from the compute device."""
        self._stop_streaming()
        self.plan = None
        away = {p.block: torch_device(p.home) for p in plan.placements if p.home != plan.compute}
        self._homed = _in_full_segments(
            {name: block for name, block in self._homed.items() if away.get(name) == block.device and block.is_home()}
        )
        moving = {block: modules[block] for block in away if block not in self._homed}
        self._fill(moving, away, progress)
        for placement in plan.placements:
            if placement.block not in away:
                move(modules[placement.block], self.compute)
                progress(placement.bytes)
        self._settle()
        blocks = [self._homed[p.block] for p in plan.placements if p.block in away]
        if blocks:
            self._pin(blocks)
            self.streamer = Streamer(blocks, self.compute, plan.ring_bytes, poison)
            self.streamer.attach()
        self.plan = plan

    def intact(self) -> bool:
        """Whether every streamed block is still as we left it (others may have moved the model)."""
        return self.plan is not None and all(block.is_home() for block in self._homed.values())

    def rests_away(self, block: str) -> bool:
        return block in self._homed

    def rewrite(self, block: str, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        """Give one tensor of a block new contents, wherever it rests. Only between `changing` and `changed`."""
        homed = self._homed.get(block)
        if homed is None:
            slots: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            slots[name] = _like(slots[name], copy_to(tensor, self.compute))
            return
        target = next(t for t in homed.tensors if t.name == name)
        for leaf, part in zip(target.leaves, leaves_of(tensor)[0], strict=True):
            view = leaf.view(homed.room.segment.typed(leaf.dtype), homed.room.start)
            if view.shape != part.shape or view.dtype != part.dtype:
                raise ValueError(
                    f"{block}.{name} is {view.dtype}{tuple(view.shape)}, not {part.dtype}{tuple(part.shape)}"
                )
            view.copy_(part)

    def changing(self) -> None:
        """Bytes at home are about to change: nothing staged may be used, no copy may be under way."""
        if self.streamer is not None:
            self.streamer.quiesce()

    def changed(self) -> None:
        """Changes are done: the next copies see them."""
        self._settle()

    def leave(self) -> None:
        """Stop streaming and unpin. Bytes on donors go to RAM; those in RAM and on the compute device stay there.

        Blocks that rest in RAM are remembered: a later `apply` finds them at home.
        """
        self._stop_streaming()
        self.plan = None
        for block, homed in [*self._homed.items()]:
            ours = homed.is_home()
            if ours and homed.device != RAM:
                move(homed.module, RAM)
            if not ours or homed.device != RAM:
                del self._homed[block]

    def forget(self) -> None:
        """Leave, and remember nothing: the memory lives on only as far as the model's tensors are in it."""
        self.leave()
        self._homed.clear()
        self._arenas.clear()

    def close(self) -> None:
        """The model is gone: give everything back."""
        self._stop_streaming()
        self.plan = None
        self._homed.clear()
        self._arenas.clear()

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas)

    # -- moving -------------------------------------------------------------------------------------------------

    def _fill(self, blocks: Modules, away: Mapping[str, torch.device], progress: Progress) -> None:
        """Copy blocks into new arenas, one block at a time; the source of each is free before the next is copied."""
        layouts = {block: _layout(module) for block, module in blocks.items()}
        for device in dict.fromkeys(away[block] for block in blocks):
            here = [block for block in blocks if away[block] == device]
            arena = Arena(device, (layouts[block][1] for block in here))
            if device == RAM:
                self._arenas.append(arena)
            for block in here:
                tensors, size = layouts.pop(block)
                self._homed[block] = _settle_in(block, blocks[block], arena.room(size), tensors)
                progress(size)

    def _pin(self, blocks: list[HomedBlock]) -> None:
        used = {id(block.room.segment) for block in blocks}
        for arena in self._arenas:
            arena.segments = [segment for segment in arena.segments if id(segment) in used]
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


def _in_full_segments(blocks: dict[str, HomedBlock]) -> dict[str, HomedBlock]:
    """The blocks that may stay where they are; those in a segment that others have left move out, to give it back."""
    used: Counter[int] = Counter()
    for block in blocks.values():
        used[id(block.room.segment)] += block.size
    return {
        name: block for name, block in blocks.items() if used[id(block.room.segment)] == block.room.segment.data.numel()
    }


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` itself holds and is not on `device` yet. Never touches what is there already."""
    for slots, name, tensor in own_tensors(module):
        leaves, rebuild = leaves_of(tensor)
        if any(leaf.device != device for leaf in leaves):
            with torch.inference_mode(False), torch.no_grad():
                moved = [torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.to(device) for leaf in leaves]
            slots[name] = _like(tensor, rebuild(moved))


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new` as a parameter if `old` was one.

    Plain parameters are made outside of inference mode, so that both modes may move them. A quantised wrapper belongs
    to the mode it is made in, as those of the host's loaders do: the host's own moving code counts on that.
    """
    if not isinstance(old, torch.nn.Parameter):
        return new
    if is_traceable_wrapper_subclass(new):
        new._is_param = True  # what torch.nn.Parameter does, but that would also copy the wrapper's inner tensors
        return new
    with torch.inference_mode(False):
        return torch.nn.Parameter(new.clone() if new.is_inference() else new, requires_grad=False)


_Laid = list[tuple[dict[str, Any], str, torch.Tensor, Any, Any]]


def _layout(module: torch.nn.Module) -> tuple[_Laid, int]:
    """Each own tensor of `module` with its leaves' places in an extent, and the extent's size."""
    laid: _Laid = []
    end = 0
    for slots, name, tensor in own_tensors(module):
        leaves, rebuild = leaves_of(tensor)
        placed, end = lay_out(leaves, end)
        laid.append((slots, name, tensor, placed, rebuild))
    return laid, end


def _settle_in(block: str, module: torch.nn.Module, room: Room, laid: _Laid) -> HomedBlock:
    """Copy a block's tensors into `room` and make the module hold those."""
    homed = []
    for slots, name, tensor, placed, rebuild in laid:
        with torch.inference_mode(False), torch.no_grad():
            views = [leaf.view(room.segment.typed(leaf.dtype), room.start) for leaf in placed]
            for view, source in zip(views, leaves_of(tensor)[0], strict=True):
                view.zero_() if source.is_meta else view.copy_(source)
        homed.append((slots, name, _like(tensor, rebuild(views)), placed, rebuild))
    for slots, name, home, _, _ in homed:
        slots[name] = home
    return HomedBlock(block, module, room, [HomedTensor(*parts) for parts in homed])
