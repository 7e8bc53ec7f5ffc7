"""A block at its home: a module whose tensors are together in one `Room` (its memory), away from the compute device.

A block whose home is the model file has only those tensors in its room that are not in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

from ..devices.torch_devices import FILE, device_of
from .arena import Room, Segment
from .file_lane import FileSource
from .lanes import Event
from .layout import Leaf, Rebuild, align, is_plain, lay_out, leaves_of
from .pages import Page


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The parameters and buffers of `module` itself: where they are kept, their name, the tensor."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            if tensor is not None:
                yield slots, name, tensor


@dataclass(slots=True, eq=False)
class HomedTensor:
    """One parameter or buffer of a block at its home, and how to make an equal tensor over the bytes in the ring."""

    slots: dict[str, Any]
    name: str
    leaves: Sequence[Leaf]
    rebuild: Rebuild
    parameter: bool
    home: torch.Tensor | None = None
    _pointer: int = 0

    def views(self, room: Room) -> list[torch.Tensor]:
        """The plain tensors that hold its bytes in `room`; they may be used in and outside of inference mode."""
        with torch.inference_mode(False), torch.no_grad():
            return [leaf.view(room.flat.view(leaf.dtype), 0) for leaf in self.leaves]

    def over(self, memory: Segment, start: int) -> torch.Tensor:
        """An equal tensor over the bytes of the block that begin at `start`, such as those in the ring."""
        return self.rebuild([leaf.view(memory.typed(leaf.dtype), start) for leaf in self.leaves])

    def settle(self, room: Room, old: torch.Tensor | None = None) -> None:
        """Put this tensor, over its bytes in `room`, into the module; as the object `old`, if that is given."""
        rebuilt = self.rebuild(self.views(room))
        self.home = moved(old, rebuilt) if old is not None else as_parameter(rebuilt) if self.parameter else rebuilt
        self._pointer = self.home.data_ptr()
        self.slots[self.name] = self.home

    def stay(self, tensor: torch.Tensor) -> None:
        """Leave the module the tensor that it has, in the memory that this has."""
        self.home, self._pointer = tensor, tensor.data_ptr()

    def let_go(self) -> None:
        self.home = self.slots[self.name] = None

    def is_home(self) -> bool:
        """Whether the module still holds the tensor we put there (someone else may have moved it)."""
        return (
            self.slots.get(self.name) is self.home and self.home is not None and self.home.data_ptr() == self._pointer
        )


Laid = Sequence[tuple[torch.Tensor, HomedTensor]]
"""Each tensor of a module, and where its bytes go in the block's room."""


@dataclass(slots=True, eq=False)
class HomedBlock:
    """A module whose tensors rest in `room`, away from the compute device, or in `pages` of the model file."""

    name: str
    module: torch.nn.Module
    room: Room
    tensors: Sequence[HomedTensor]
    pages: Mapping[str, Page] = field(default_factory=dict)
    awaits: bool = False
    """Whether its weights get patches when they are first used."""
    written: Event = None
    """Comes after the last bytes that were written into the room from a device."""

    @property
    def size(self) -> int:
        """Bytes that it needs in the ring."""
        return self.room.size + sum(align(leaf.nbytes) for page in self.pages.values() for leaf in page.leaves.values())

    @property
    def device(self) -> torch.device:
        return FILE if self.pages else device_of(self.room.flat)

    @property
    def source(self) -> torch.Tensor | FileSource:
        """What a lane copies."""
        if not self.pages:
            return self.room.flat
        laid = {tensor.name: tensor.leaves for tensor in self.tensors}
        leaves = [
            (laid[name][number].offset, leaf)
            for name, page in self.pages.items()
            for number, leaf in page.leaves.items()
        ]
        return FileSource(self.name, self.room.flat, [*self.pages.values()], leaves)

    def copy_into(self, memory: torch.Tensor) -> None:
        """Copy it on the current stream. Raises HostError if it rests in a file that has changed."""
        source = self.source
        if isinstance(source, FileSource):
            source.copy_into(memory)
        else:
            memory.copy_(source, non_blocking=True)

    def is_home(self) -> bool:
        """Not before it has tensors: none are put into a room that was only reserved."""
        return bool(self.tensors) and all(tensor.is_home() for tensor in self.tensors)

    def write(self, name: str, tensor: torch.Tensor) -> bool:
        """Overwrite one tensor in place. Returns False, and changes nothing, if the new one needs another layout.

        The same if other code holds a tensor of this block, because that one must not change, and if it is in a file. A
        copy from a device may still be under way afterwards.
        """
        if self.pages:
            return False
        target = next(each for each in self.tensors if each.name == name)
        alone = self._reclaim(target)
        parts, rebuild = leaves_of(tensor)
        kinds = [(part.shape, part.dtype.itemsize) for part in parts]
        if not alone or kinds != [(torch.Size(leaf.shape), leaf.dtype.itemsize) for leaf in target.leaves]:
            return False
        if any(part.dtype != leaf.dtype for part, leaf in zip(parts, target.leaves, strict=True)):
            target.leaves = [replace(leaf, dtype=part.dtype) for part, leaf in zip(parts, target.leaves, strict=True)]
            target.rebuild = rebuild
            target.settle(self.room, target.home)
        for view, part in zip(target.views(self.room), parts, strict=True):
            view.copy_(part, non_blocking=True)
        if not is_plain(tensor):  # it may have other attributes than the old one
            target.rebuild = rebuild
            target.settle(self.room)
        return True

    def _reclaim(self, target: HomedTensor) -> bool:
        """Whether nobody else holds a tensor in this room; `target` is about to change.

        Parameters that somebody holds leave nothing behind: that of `target` gets memory of its own, which is all that
        it keeps allocated from now on; the others stay the module's own, and move with the block.
        """
        known = [TensorWeakRef(tensor.home) for tensor in self.tensors if tensor.home is not None]
        for tensor in self.tensors:
            tensor.let_go()
        held: list[torch.Tensor | None] = [its() for its in known]
        for index, its in enumerate(held):
            if self.tensors[index] is target and its is not None:
                _give_own_memory(its)
                held[index] = None
        alone = self.room.reclaim()
        for tensor, its in zip(self.tensors, held, strict=True):
            tensor.settle(self.room, its)
        return alone

    def emptied(self, size: int) -> bool:
        """Whether the room can be filled anew with so many bytes: its tensors are elsewhere, and nobody holds them."""
        for tensor in self.tensors:
            tensor.home = None
        return self.room.size == size and self.room.reclaim()

    def vacate(self) -> None:
        """The block has left this room: a parameter of it that other code still holds keeps only its own memory.

        There are such parameters where torch cannot move one in place, e.g. from another vendor's device to RAM.
        """
        known = [TensorWeakRef(tensor.home) for tensor in self.tensors if type(tensor.home) is torch.nn.Parameter]
        for tensor in self.tensors:
            tensor.home = None
        for its in (each() for each in known):
            if its is not None and its.untyped_storage().data_ptr() == self.room.flat.data_ptr():
                _give_own_memory(its)

    def move_to(self, room: Room, laid: Laid) -> None:
        """Move the block to another room, with the contents that `laid` names."""
        fill(room, laid)
        self.tensors = settle_in(room, laid)
        self.room, self.pages = room, {}


def lay_out_block(
    module: torch.nn.Module,
    changed: Mapping[str, torch.Tensor] | None = None,
    *,
    without: Collection[str] = (),
) -> tuple[Laid, int]:
    """Where each tensor of `module` goes in a room, and the room's size.

    `changed` replaces tensors by name, `without` names some that go elsewhere.
    """
    laid, end = [], 0
    for slots, name, tensor in own_tensors(module):
        if name in without:
            continue
        source = (changed or {}).get(name, tensor)
        leaves, rebuild = leaves_of(source)
        placed, end = lay_out(leaves, end)
        laid.append((source, HomedTensor(slots, name, placed, rebuild, isinstance(tensor, torch.nn.Parameter))))
    return laid, end


Read = Callable[[str, int, torch.Tensor], bool]
"""May fill memory with the bytes of a leaf, given by its tensor's name and its number, in another way than by copying;
returns whether it does.

It may go on after it has returned.
"""


def fill(room: Room, laid: Laid, read: Read = lambda name, number, memory: False) -> None:
    """Copy tensors into `room`, or have them read."""
    for tensor, homed in laid:
        with torch.inference_mode(False), torch.no_grad():
            for number, (view, source) in enumerate(zip(homed.views(room), leaves_of(tensor)[0], strict=True)):
                if source.is_meta:
                    view.zero_()
                elif not read(homed.name, number, room.flat[homed.leaves[number].offset :][: view.nbytes]):
                    view.copy_(source)


def settle_in(room: Room, laid: Laid) -> list[HomedTensor]:
    """When all bytes are in `room`: put the new tensors into the module."""
    for tensor, homed in laid:
        homed.settle(room, tensor if homed.slots[homed.name] is tensor else None)
    return [homed for _, homed in laid]


def moved(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The parameter `old`, changed to use the memory of `new`, which has the same contents; else `new` itself.

    So other code that holds a parameter of the model sees it move with the model, as with torch's own `Module.to`.
    """
    if not isinstance(old, torch.nn.Parameter):
        return new
    if type(old) is not torch.nn.Parameter or old.is_inference() or is_traceable_wrapper_subclass(new):
        return as_parameter(new)
    if not torch._has_compatible_shallow_copy_type(old, new):  # e.g. from RAM to a device of another vendor's plug-in
        return as_parameter(new)
    with torch.inference_mode(False), torch.no_grad():
        old.data = new
    return old


def move_tensor(slots: dict[str, Any], name: str, device: torch.device) -> None:
    """Move one tensor of a module, unless it is on `device` already."""
    leaves, rebuild = leaves_of(slots[name])
    if any(device_of(leaf) != device for leaf in leaves):
        with torch.inference_mode(False), torch.no_grad():
            there = [torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.to(device) for leaf in leaves]
        slots[name] = moved(slots[name], rebuild(there))


def _give_own_memory(parameter: torch.Tensor) -> None:
    """Give a parameter memory of its own, with the same contents."""
    with torch.inference_mode(False), torch.no_grad():
        moved(parameter, parameter.detach().clone())


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a parameter.

    Plain parameters are made outside of inference mode, so that they can be moved inside and outside of it. A quantised
    wrapper is made in the current mode, like those of the host's loaders: the host's own moving code relies on that.
    """
    if is_traceable_wrapper_subclass(tensor):
        tensor._is_param = True  # what torch.nn.Parameter does, but that would also copy the wrapper's inner tensors
        return tensor
    with torch.inference_mode(False):
        return torch.nn.Parameter(tensor.clone() if tensor.is_inference() else tensor, requires_grad=False)
