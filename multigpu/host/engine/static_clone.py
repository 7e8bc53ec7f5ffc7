"""A static patcher for a model of DynamicVRAM: its own patchers decide by themselves where weights are."""

from __future__ import annotations

import torch
from comfy.model_patcher import ModelPatcher

from ...errors import HostError
from ..loaded_models import take_out_dead
from ..model_files import files_of
from ..reading import reading
from ..replacements import static_patchers
from .blocks import wanted_dtype


def static_clone(patcher: ModelPatcher, *, in_pages: bool = False) -> ModelPatcher:
    """A patcher with the same patches and a newly loaded static model. All other models stay dynamic.

    With `in_pages` the weights of a diffusion model stay in the pages of their file; they must not be written then.
    """
    if patcher.cached_patcher_init is None:
        raise HostError(
            f"this {type(patcher.model).__name__} was loaded in a way that ComfyUI cannot repeat, so it cannot be "
            "placed while DynamicVRAM is on; load it with one of ComfyUI's own loaders, or start ComfyUI with "
            "--disable-dynamic-vram"
        )
    with reading(files_of(patcher)):
        with static_patchers(in_pages=in_pages):
            clone = patcher.clone(disable_dynamic=True)
        honour_dtypes(clone.model)
        take_over(clone)
    return clone


def take_over(clone: ModelPatcher) -> None:
    """Make `clone` the only owner of a model that the host has just read for it.

    The host's loader of text encoders also puts the model on its device, with a patcher that is then thrown away. The
    entry that this leaves in the host's list of loaded models is removed, and the model is unloaded.
    """
    if take_out_dead(clone.model):
        clone.unpatch_model(clone.offload_device)


def honour_dtypes(model: torch.nn.Module) -> None:
    """Cast weights to the type the user asked for: where DynamicVRAM is on, a static load keeps the file's type."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or wanted_dtype(module, name, parameter) == parameter.dtype:
                continue
            with torch.inference_mode(False):
                cast = parameter.detach().to(wanted_dtype(module, name, parameter))
                module._parameters[name] = torch.nn.Parameter(cast, requires_grad=False)
