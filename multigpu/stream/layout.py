"""Tensors as flat bytes and back: plain tensors, quantised wrappers (fp8, nvfp4 with scales), GGUF tensors.

Stored bytes travel as they are: nothing is converted, and a staged tensor has the class, dtype, shape, strides and
attributes of the one at home. Attributes are shared, not copied: packs' tensors carry their LoRAs in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ALIGNMENT = 256
"""Every tensor starts at a multiple of this, as torch's own allocations do; kernels choose by alignment."""

Rebuild = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def align(count: int) -> int:
    return (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Leaf:
    """One plain tensor inside an extent, `offset` bytes from its start."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    def view(self, typed: torch.Tensor, start: int) -> torch.Tensor:
        """This leaf in a buffer (seen as `self.dtype`) where its extent begins at byte `start`."""
        return typed.as_strided(self.shape, self.stride, (start + self.offset) // self.dtype.itemsize)


def leaves_of(tensor: torch.Tensor) -> tuple[list[torch.Tensor], Rebuild]:
    """The plain tensors that hold `tensor`'s bytes, and a function that makes an equal tensor from such parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        cls, size, stride = type(tensor), tensor.size(), tensor.stride()

        def rebuild_wrapper(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            made: torch.Tensor = cls.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
            return made

        return inner, rebuild_wrapper
    if is_plain(tensor):
        return [tensor.detach()], lambda parts: parts[0]
    cls, attributes = type(tensor), tensor.__dict__

    def rebuild_subclass(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return of_class(cls, parts[0], attributes)

    return [tensor.as_subclass(torch.Tensor).detach()], rebuild_subclass


def of_class(cls: type, plain: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """A tensor of a pack's class over the memory of `plain`.

    `as_subclass` would make a view, which keeps the memory of `plain` allocated when the tensor itself is moved.
    """
    made: torch.Tensor = torch.Tensor._make_subclass(cls, plain)
    made.__dict__ = attributes
    return made


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of `tensor` on `device`, of the same class; its bytes may be used in and outside of inference mode."""
    leaves, rebuild = leaves_of(tensor)
    with torch.inference_mode(False), torch.no_grad():
        copies = [leaf.to(device, copy=True) for leaf in leaves]
    made = rebuild(copies)
    if not is_plain(made):
        made.__dict__ = dict(made.__dict__)
    return made


def copy_leaves(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Overwrite the bytes of `target` with those of `tensor`, which has leaves of the same shapes and types."""
    for leaf, its in zip(leaves_of(tensor)[0], leaves_of(target)[0], strict=True):
        its.copy_(leaf)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of torch's own class, without attributes that mean anything."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that `tensor` occupies, scales included."""
    return sum(leaf.nbytes for leaf in leaves_of(tensor)[0])


def lay_out(leaves: Sequence[torch.Tensor], start: int = 0) -> tuple[list[Leaf], int]:
    """Where each leaf goes in an extent, and where the extent ends."""
    placed, at = [], start
    for tensor in leaves:
        stride = tensor.stride() if _is_dense(tensor) else _contiguous_stride(tensor.shape)
        placed.append(Leaf(at, tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.nbytes))
        at += align(tensor.nbytes)
    return placed, at


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dimensions."""
    step = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != step:
            return False
        step *= size
    return True
