"""Giving a model another compute device.

Clones of one patcher share the weights, and the host moves them to the device of the clone that it loads: clones on two
devices would take the weights away from each other. So a model for another device gets its own weights, as with the
host's Select ... Device nodes. They are read again from the file if the loader has recorded how, and copied otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from comfy import model_management

from .device_scope import DeviceScope
from .file_stamps import files_of
from .placement import static_clone, take_over
from .reading import reading

CPU = torch.device("cpu")


def retargeted(patcher: Any, device: torch.device, scope: DeviceScope, *, fresh: bool = False) -> Any:
    """A clone of `patcher` that computes on `device`. `patcher` keeps its device and its weights.

    `fresh` says that this patcher has no other user: then `patcher` itself is changed and returned.
    """
    if patcher.load_device == device:
        return patcher if fresh else patcher.clone()
    if not fresh and patcher.cached_patcher_init is not None:
        own = _reloaded(patcher, device, scope)
    else:
        unload(patcher)
        own = patcher if fresh else _copied(patcher)
        _use_supported_dtype(own, device)
    own.load_device = device
    if device == CPU:
        own.offload_device = CPU
    if hasattr(own, "register_load_device"):
        own.register_load_device(device)
    return own


def unload(patcher: Any) -> None:
    """Unload the model of `patcher`, whichever clone has loaded it. Other models stay loaded."""
    loaded = [*model_management.current_loaded_models]
    ours = [entry for entry in loaded if entry.model is not None and entry.model.is_clone(patcher)]
    others = [entry for entry in loaded if entry not in ours]
    for entry in ours:
        model_management.free_memory(1e30, entry.device, keep_loaded=others)


def _reloaded(patcher: Any, device: torch.device, scope: DeviceScope) -> Any:
    """A patcher whose model is read again from its file, in the data types that suit the device."""
    with scope.on(device), reading(files_of(patcher)):
        if patcher.is_dynamic() and device == CPU:
            return static_clone(patcher)
        own = patcher.deepclone_multigpu(new_load_device=device)
        take_over(own)
    return own


def _copied(patcher: Any) -> Any:
    """A static patcher over a copy of the weights."""
    _, containers = patcher.get_clone_model_override()
    override = (copy.deepcopy(patcher.model), tuple(type(container)() for container in containers))
    return patcher.clone(disable_dynamic=True, model_override=override)


def _use_supported_dtype(patcher: Any, device: torch.device) -> None:
    """If the device does not support the data type of the weights, compute in one that it does support."""
    model = patcher.model
    if hasattr(model, "get_dtype") and getattr(model, "manual_cast_dtype", model) is None:
        wanted = model_management.unet_manual_cast(model.get_dtype(), device)
        if wanted is not None:
            patcher.set_model_compute_dtype(wanted)
