"""Giving a model another compute device.

Clones of one patcher share the weights, and the host moves them to the device of the clone that it loads: clones on two
devices would take the weights away from each other. So a model for another device gets its own weights, as with the
host's Select ... Device nodes. They are read again from the file if the loader has recorded how, and copied otherwise.
"""

from __future__ import annotations

import copy
import inspect

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ...devices.torch_devices import device_name
from ...errors import InputError
from ..engine.static_clone import alike, static_clone, take_over
from ..loaded_models import entries, unload_all_but
from ..model_files import files_of
from ..reading import reading
from .device_scope import DeviceScope

CPU = torch.device("cpu")


def retargeted(patcher: ModelPatcher, device: torch.device, scope: DeviceScope, *, fresh: bool = False) -> ModelPatcher:
    """A clone of `patcher` that computes on `device`. `patcher` keeps its device and its weights.

    `fresh` says that this patcher has no other user: then `patcher` itself is changed and returned. Raises InputError
    if it is of a class whose clones cannot have weights of their own.
    """
    if patcher.load_device == device:
        return patcher if fresh else patcher.clone()
    own = None if fresh or patcher.cached_patcher_init is None else _reloaded(patcher, device, scope)
    if own is None:
        _unload(patcher)
        own = patcher if fresh else _copied(patcher)
        _use_supported_dtype(own, device)
    if own.model is patcher.model and not fresh:
        raise _unmovable(patcher)
    own.load_device = device
    if device == CPU:
        own.offload_device = CPU
    if hasattr(own, "register_load_device"):
        own.register_load_device(device)
    return own


def _unload(patcher: ModelPatcher) -> None:
    """Unload the model of `patcher`, whichever clone has loaded it. Other models stay loaded."""
    others = [entry for entry in entries() if not entry.model.is_clone(patcher)]
    if len(others) < len(entries()):
        unload_all_but(others)


def _reloaded(patcher: ModelPatcher, device: torch.device, scope: DeviceScope) -> ModelPatcher | None:
    """A patcher whose model is read again from its file, in the data types that suit the device.

    None if that is another model than the patcher's: then a pack has changed that one after it was read.
    """
    _check_override(patcher)
    with scope.on(device), reading(files_of(patcher)):
        if patcher.is_dynamic() and device == CPU:
            return static_clone(patcher)
        own = patcher.deepclone_multigpu(new_load_device=device)
        take_over(own)
    return own if alike(own.model, patcher) else None


def _copied(patcher: ModelPatcher) -> ModelPatcher:
    """A static patcher over a copy of the weights. It comes from no file."""
    _check_override(patcher)
    _, containers = patcher.get_clone_model_override()
    config = getattr(patcher.model, "model_config", None)  # a description of the model, which cannot be copied
    override = (copy.deepcopy(patcher.model, {id(config): config}), tuple(type(each)() for each in containers))
    own = patcher.clone(disable_dynamic=True, model_override=override)
    own.cached_patcher_init = None
    return own


def _check_override(patcher: ModelPatcher) -> None:
    """Packs write `clone` without the host's parameters."""
    for clone in (vars(cls)["clone"] for cls in type(patcher).__mro__ if "clone" in vars(cls)):
        parameters = inspect.signature(clone).parameters
        passes = inspect.Parameter.VAR_KEYWORD in {each.kind for each in parameters.values()}
        if not passes and "model_override" not in parameters:
            raise _unmovable(patcher)


def _unmovable(patcher: ModelPatcher) -> InputError:
    cls, device = type(patcher), device_name(patcher.load_device)
    return InputError(
        f"a {cls.__name__} cannot compute on another device than {device}: its clones always have the "
        f"same model ({cls.__module__}); choose {device} as its compute device, or use another loader"
    )


def _use_supported_dtype(patcher: ModelPatcher, device: torch.device) -> None:
    """If the device does not support the data type of the weights, compute in one that it does support."""
    model = patcher.model
    if hasattr(model, "get_dtype") and getattr(model, "manual_cast_dtype", model) is None:
        wanted = model_management.unet_manual_cast(model.get_dtype(), device)
        if wanted is not None:
            patcher.set_model_compute_dtype(wanted)
