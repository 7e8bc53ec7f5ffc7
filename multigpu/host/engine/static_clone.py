"""A static patcher for a model of DynamicVRAM: its own patchers decide by themselves where weights are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ...errors import HostError
from ..loaded_models import take_out_dead
from ..model_files import files_of
from ..reading import reading
from ..replacements import static_patchers
from .blocks import late_dtype, wanted_dtype
from .file_pages import in_file


def static_clone(patcher: ModelPatcher, *, in_pages: bool = False) -> ModelPatcher:
    """A patcher with the same patches and a newly loaded static model. All other models stay dynamic.

    With `in_pages` the weights of a diffusion model stay in the pages of their file; they must not be written then.
    Raises HostError if it would be another model, or a patcher without what a pack's own class does.
    """
    cls = type(patcher)
    if patcher.cached_patcher_init is None:
        raise _no_static(patcher, "was loaded in a way that ComfyUI cannot repeat")
    if cls.__module__ != ModelPatcher.__module__:
        raise _no_static(patcher, f"has a patcher of its pack's own class {cls.__name__} ({cls.__module__})")
    with reading(files_of(patcher)):
        with static_patchers(in_pages=in_pages):
            clone = patcher.clone(disable_dynamic=True)
        honour_dtypes(clone.model, later=in_pages)
        take_over(clone)
    if not alike(clone.model, patcher):
        raise _no_static(patcher, "was changed by a pack after it was loaded")
    return clone


def _no_static(patcher: ModelPatcher, why: str) -> HostError:
    return HostError(
        f"this {type(patcher.model).__name__} {why}, so it cannot be placed while DynamicVRAM is on; load it with one "
        "of ComfyUI's own loaders, or start ComfyUI with --disable-dynamic-vram"
    )


def alike(model: torch.nn.Module, patcher: ModelPatcher) -> bool:
    """Whether a model that was read again is the patcher's: the same classes of modules, classes and shapes of tensors.

    Packs replace modules or tensors of a model that the host has loaded. What object patches have replaced is left out.
    """
    patched = [f"{name}." for name in patcher.object_patches_backup]
    return _anatomy(model, patched) == _anatomy(patcher.model, patched)


def _anatomy(model: torch.nn.Module, without: Sequence[str]) -> list[tuple[Any, ...]]:
    """Classes by name only: for another device the host may take another class of the same name, for its data type."""
    modules = [(name, type(module).__module__, type(module).__name__) for name, module in model.named_modules()]
    tensors = (*model.named_parameters(), *model.named_buffers())
    parts = [*modules, *((name, type(tensor.data), tensor.shape) for name, tensor in tensors)]
    return [part for part in parts if not f"{part[0]}.".startswith(tuple(without))]


def take_over(clone: ModelPatcher) -> None:
    """Make `clone` the only owner of a model that the host has just read for it.

    The host's loader of text encoders also puts the model on its device, with a patcher that is then thrown away. The
    entry that this leaves in the host's list of loaded models is removed, and the model is unloaded.
    """
    if take_out_dead(clone.model):
        clone.unpatch_model(clone.offload_device)


def honour_dtypes(model: torch.nn.Module, *, later: bool = False) -> None:
    """Cast weights to the type the user asked for: where DynamicVRAM is on, a static load keeps the file's type.

    With `later` those stay in the pages of their file that can be cast when they are used.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or wanted_dtype(module, name, parameter) == parameter.dtype:
                continue
            if not (later and in_file(parameter) and late_dtype(module, name, parameter)):
                _cast(module, name, wanted_dtype(module, name, parameter))


def cast_pages(model: torch.nn.Module) -> None:
    """Cast the weights that are still in the pages of their file in another type than they are used in.

    For a model that is loaded without a plan.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            wanted = None if parameter is None or not in_file(parameter) else late_dtype(module, name, parameter)
            if wanted is not None:
                _cast(module, name, wanted)


def _cast(module: torch.nn.Module, name: str, dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        cast = module._parameters[name].detach().to(dtype)  # type: ignore[union-attr]
        module._parameters[name] = torch.nn.Parameter(cast, requires_grad=False)
