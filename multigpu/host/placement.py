"""Giving a patcher a plan: the entry point of the engine for nodes and other packs."""

from __future__ import annotations

from typing import Any

import torch
from comfy import model_management
from comfy.patcher_extension import CallbacksMP

from ..errors import HostError
from ..plan import CPU, DeviceBudget, DeviceId, Plan, Request, make_plan
from .blocks import blocks_of, wanted_dtype
from .file_stamps import files_of
from .model_states import ATTACHMENT, ModelStates, Placed
from .patcher import placed_class
from .patches import static_patchers
from .reading import reading


def place(patcher: Any, plan: Plan, states: ModelStates, poison: bool = False) -> Any:
    """A clone of `patcher` that loads its model by `plan`. `patcher` itself is not changed.

    For a patcher of DynamicVRAM, a static one is made from the same file: the host's dynamic patcher decides by itself
    where weights are. `poison` is for tests (see `Streamer`).
    """
    placed = static_clone(patcher) if patcher.is_dynamic() else patcher.clone()
    placed.load_device = torch.device(str(plan.compute))
    placed.attachments[ATTACHMENT] = Placed(plan, states, poison)
    placed.remove_callbacks_with_key(CallbacksMP.ON_CLONE, ATTACHMENT)
    placed.add_callback_with_key(CallbacksMP.ON_CLONE, ATTACHMENT, _register)
    _register(placed, placed)
    return placed


def _register(patcher: Any, clone: Any) -> None:
    """Add a clone to its model's state, and set its class: some packs' patchers set the class of their clones."""
    states: ModelStates = patcher.attachments[ATTACHMENT].states
    clone.__class__ = placed_class(type(clone), states)
    clone.size = 0  # the host copies the size from a placed patcher, where it is the plan's; 0 makes it count again
    states.of(clone).patchers.add(clone)


def static_clone(patcher: Any) -> Any:
    """A patcher with the same patches and a newly loaded static model. All other models stay dynamic."""
    if patcher.cached_patcher_init is None:
        raise HostError(
            f"this {type(patcher.model).__name__} was loaded in a way that ComfyUI cannot repeat, so it cannot be "
            "placed while DynamicVRAM is on; load it with one of ComfyUI's own loaders, or start ComfyUI with "
            "--disable-dynamic-vram"
        )
    with reading(files_of(patcher)):
        with static_patchers():
            clone = patcher.clone(disable_dynamic=True)
        honour_dtypes(clone.model)
        take_over(clone)
    return clone


def take_over(clone: Any) -> None:
    """Make `clone` the only owner of a model that the host has just read for it.

    The host's loader of text encoders also puts the model on its device, with a patcher that is then thrown away. The
    entry that this leaves in the host's list of loaded models is removed, and the model is unloaded.
    """
    loaded = model_management.current_loaded_models
    dead = [entry for entry in loaded if entry.model is None and entry.real_model and entry.real_model() is clone.model]
    for entry in dead:
        loaded.pop(next(index for index, other in enumerate(loaded) if other is entry))
        entry.model_finalizer.detach()
    if dead:
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


def plan_for(
    patcher: Any,
    request: Request,
    budgets: list[DeviceBudget],
    *,
    ring_bytes: int | None = None,
    step_seconds: float | None = None,
) -> Plan:
    """The plan that `request` means for this patcher's model on its load device.

    `step_seconds`, if known, is the time of one step with all blocks resident.
    """
    compute = device_id(patcher.load_device)
    return make_plan(request, blocks_of(patcher, step_seconds), budgets, compute, ring_bytes=ring_bytes)


def device_id(device: torch.device) -> DeviceId:
    """A torch device as a `DeviceId`; without an index it is the backend's current device."""
    if device.type == "cpu":
        return CPU
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    return DeviceId(device.type, index)


def host_budgets(devices: list[DeviceId]) -> list[DeviceBudget]:
    """Memory of `devices` as the host counts it."""
    budgets = []
    for device in devices:
        where = torch.device(str(device))
        total, free = model_management.get_total_memory(where), model_management.get_free_memory(where)
        budgets.append(DeviceBudget(device, int(total), int(min(free, total))))
    return budgets
