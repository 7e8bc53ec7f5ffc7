"""The host's model as the planner's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ...files.families import describe_model
from ...files.tensors import TensorInfo
from ...plan import Block, Reason
from ...stream.homes import own_tensors
from ...stream.layout import is_plain, leaves_of, stored_bytes

DIFFUSION = "diffusion_model."
"""The name of the diffusion model inside the host's model class."""
ROOT = "(root)"
"""The block name for tensors that the model itself holds, not one of its submodules."""
_SIXTEEN_BITS = {torch.float16, torch.bfloat16}


def modules_of(patcher: ModelPatcher) -> dict[str, torch.nn.Module]:
    """Every module of the patcher's model that holds tensors itself, by block name, in declared order."""
    return {
        name or ROOT: module
        for name, module in patcher.model.named_modules()
        if next(own_tensors(module), None) is not None
    }


def listed_modules(patcher: ModelPatcher) -> dict[str, Any]:
    """The modules in the host's load list, by name."""
    return {name: module for *_, name, module, _parameters in patcher._load_list()}


def blocks_of(patcher: ModelPatcher, in_file: Container[str] = (), *, hoist: bool = True) -> list[Block]:
    """One block per module that holds tensors. Modules whose weights the host cannot cast on use are immovable.

    `in_file` has the names of those that can rest in the model file. Without `hoist` none can be hoisted.

    Only modules in the host's load list can be streamed. Other tensors (of modules whose children hold tensors too)
    stay on the compute device, where a full load would put them. Order and compute time are estimates for the model's
    family; `retimed` scales the times to a measured speed.
    """
    listed = listed_modules(patcher)
    modules, dynamic = modules_of(patcher), patcher.is_dynamic()
    holders = Counter(leaf.data_ptr() for module in modules.values() for leaf in _leaves(module) if leaf.nbytes)
    estimates, blocks = _estimates(modules), []
    for name, module in modules.items():
        estimate = estimates.get(name, Block(name, 0, compute=0.0))
        size = sum(_bytes(module, tensor_name, tensor, dynamic) for _, tensor_name, tensor in own_tensors(module))
        immovable = _why_immovable(module, listed.get(name) is module, holders)
        once = hoist and estimate.once and name.startswith(DIFFUSION)
        blocks.append(replace(estimate, name=name, bytes=size, immovable=immovable, in_file=name in in_file, once=once))
    return blocks


def wanted_dtype(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """The data type the user asked for. With DynamicVRAM a weight has the file's type until the host casts it."""
    wanted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
    return wanted if wanted is not None and type(tensor) is torch.nn.Parameter else tensor.dtype


def late_dtype(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype | None:
    """The data type in which a weight is used, if it has another one of 16 bits, and so as many bytes; else None.

    Such a weight can stay as it is in its file until it is used: see `FilePages.cast`.
    """
    wanted: torch.dtype | None = getattr(module, f"{name}_comfy_model_dtype", None)
    return wanted if is_plain(tensor) and {wanted, tensor.dtype} == _SIXTEEN_BITS else None


def _bytes(module: torch.nn.Module, name: str, tensor: torch.Tensor, dynamic: bool) -> int:
    """Stored bytes; for a dynamic model those that it will have after a static load in the data type asked for."""
    if not dynamic:
        return stored_bytes(tensor)
    return stored_bytes(tensor) * wanted_dtype(module, name, tensor).itemsize // tensor.dtype.itemsize


def _estimates(modules: dict[str, torch.nn.Module]) -> dict[str, Block]:
    """Order of execution and compute seconds by block name, as far as the model's family is known."""
    prefix = DIFFUSION if any(name.startswith(DIFFUSION) for name in modules) else ""
    tensors = [
        TensorInfo(f"{name}.{tensor_name}", str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
        for name, module in modules.items()
        if name.startswith(prefix)
        for _, tensor_name, tensor in own_tensors(module)
    ]
    return {prefix + block.name: block for block in describe_model(tensors).blocks}


def _leaves(module: torch.nn.Module) -> list[torch.Tensor]:
    return [leaf for _, _, tensor in own_tensors(module) for leaf in leaves_of(tensor)[0]]


def _why_immovable(module: torch.nn.Module, listed: bool, holders: Counter[int]) -> Reason | None:
    if not listed or not hasattr(module, "comfy_cast_weights"):
        return Reason.NOT_CASTABLE
    if isinstance(module, torch.nn.Embedding):
        return Reason.EMBEDDING
    if any(leaf.nbytes and holders[leaf.data_ptr()] > 1 for leaf in _leaves(module)):
        return Reason.TIED
    return None


def join(block: str, name: str) -> str:
    """The host key of a tensor in a block."""
    return name if block == ROOT else f"{block}.{name}"


def split(key: str) -> tuple[str, str]:
    """A host key as (block, tensor name)."""
    block, _, name = key.rpartition(".")
    return block or ROOT, name
