"""From a component and a choice to a placed component: what the place nodes and the loader nodes call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from comfy import model_management

from ..choice import DEFAULT_DEVICE, Choice, devices_of, fitted, is_default, renamed, without
from ..devices.inventory import Inventory
from ..errors import UnknownDevice
from ..lifecycle.policy import FLAG
from ..plan import Auto, DeviceBudget, DeviceId, Plan, Request, VirtualVram, explain, make_plan, possible_donors
from ..settings import Settings
from ..stream.residence import torch_device
from .blocks import blocks_of
from .capabilities import HostCapabilities
from .components import Part, has_patcher, part_of
from .device_scope import DeviceScope
from .model_states import ATTACHMENT, ModelStates
from .patches import static_patchers
from .placement import device_id, honour_dtypes, host_budgets, place
from .retarget import retargeted
from .surface import Feature

log = logging.getLogger("multigpu")

REACHED = 0.45
"""The FLOP/s of a whole step, as a share of the FLOP/s of one matrix product alone: measured with Flux on an H200."""

LoadFor = Callable[[torch.device | None], tuple[Any, ...]]
"""Loads components for a device; None is the host's own choice."""


@dataclass(frozen=True, slots=True)
class Placer:
    """Places components on the devices of this machine."""

    inventory: Inventory
    settings: Settings
    capabilities: HostCapabilities
    states: ModelStates
    scope: DeviceScope
    keep: Callable[[Any, str], None]
    """Called with every placed patcher and its `keep_loaded` choice."""

    def device(self, text: str) -> DeviceId | None:
        """The device that a widget names; None for the host's own choice.

        Raises `UnknownDevice` for a device that is not on this machine; with the setting `fall_back` it returns None
        instead, with a warning each time.
        """
        if is_default(text):
            return None
        try:
            return self.inventory.resolve(text)
        except UnknownDevice as unknown:
            if not self.settings.fall_back:
                raise
            log.warning("[MultiGPU] %s; falling back to ComfyUI's default device (MULTIGPU_FALL_BACK)", unknown)
            return None

    def known(self, text: str) -> str:
        """The device that a widget names, as text for later calls, so that these do not warn again."""
        return str(self.device(text) or DEFAULT_DEVICE)

    def place(self, component: Any, choice: Choice, *, fresh: bool = False) -> Any:
        """A copy of the component, placed by the choice. The given component is not changed.

        `fresh` says that the component was just loaded and has no other user, so that its weights need not be copied.
        Raises `MultiGPUError`, with what to do, if the component, a device or the request cannot be used.
        """
        self.capabilities.need(Feature.PLACEMENT)
        part = part_of(component)
        request = self.here(choice)
        compute = self.device(choice.compute) or _named_compute(request) or device_id(part.patcher.load_device)
        request = fitted(request, compute)
        patcher = self.states.placed_before(part.patcher, (request, compute))
        if patcher is None:
            plan = self._plan(request, part.patcher, compute)
            patcher = self._patcher(part, plan, fresh)
            self.states.note_placed(part.patcher, (request, compute), patcher)
            _say(part, plan, patcher)
        self.keep(patcher, choice.keep)
        return part.rebuilt(patcher)

    def loaded_on(self, device: str, load: LoadFor) -> tuple[Any, ...]:
        """What `load` returns, loaded for the device that the widget names.

        The loader runs with that device as torch's current one; the previous one is restored, whatever happens.
        Afterwards each component that the loader has put on another device is moved.
        """
        self.capabilities.need(Feature.DEVICES)
        named = self.device(device)
        if named is None:
            return load(None)
        where = torch_device(named)
        with self.scope.on(where):
            components = load(where)
        return tuple(self._checked(component, where) for component in components)

    def loaded_and_placed(self, choice: Choice, load: LoadFor, *, alone: bool) -> tuple[Any, ...]:
        """As `loaded_on`, with the first component (the diffusion model, where there are several) placed by the choice.

        `alone` says that there is only one component. If weights are to leave the compute device, it is then loaded
        without DynamicVRAM at once, as a plan needs it.
        """
        request = self.here(choice)
        compute = str(self.device(choice.compute) or _named_compute(request) or DEFAULT_DEVICE)
        leaves = not isinstance(choice.request, VirtualVram) or choice.request.bytes > 0
        first, *others = self.loaded_on(compute, partial(_static, load) if alone and leaves else load)
        if has_patcher(first):
            first = self.place(first, Choice(compute, request), fresh=True)
        elif first is not None:
            words = "[MultiGPU] a %s has no model patcher, so its weights are not spread: ComfyUI loads it as usual"
            log.warning(words, type(first).__name__)
        return first, *others

    def _checked(self, component: Any, device: torch.device) -> Any:
        if not has_patcher(component):
            return component
        part = part_of(component)
        return part.rebuilt(retargeted(part.patcher, device, self.scope, fresh=True))

    def eject_others(self, device: str) -> None:
        """Unload every model from an accelerator, except those that are to be kept."""
        named = self.device(device)
        where = model_management.get_torch_device() if named is None else torch_device(named)
        if where.type != "cpu":
            kept = [entry for entry in model_management.current_loaded_models if _is_kept(entry.model)]
            model_management.free_memory(1e30, where, keep_loaded=kept)

    def _plan(self, request: Request, patcher: Any, compute: DeviceId) -> Plan:
        """The plan, by measured speeds; nothing is measured if nothing is to leave the compute device."""
        blocks, budgets = blocks_of(patcher), self.budgets()
        donors = possible_donors(request, blocks, budgets, compute)
        if donors:
            rate = self.inventory.flops(compute)
            blocks = blocks_of(patcher, flops=rate and REACHED * rate)
            speeds = {donor: self.inventory.bandwidth(donor, compute) for donor in sorted(donors)}
            budgets = [replace(budget, bandwidth=speeds.get(budget.device)) for budget in budgets]
        return make_plan(request, blocks, budgets, compute)

    def _patcher(self, part: Part, plan: Plan, fresh: bool) -> Any:
        patcher, device = part.patcher, torch_device(plan.compute)
        if not plan.streamed and ATTACHMENT not in patcher.attachments:
            return retargeted(patcher, device, self.scope, fresh=fresh)
        if patcher.is_dynamic():
            with self.scope.on(device):  # so that the static copy that a plan needs is read for this device
                return place(patcher, plan, self.states)
        return place(retargeted(patcher, device, self.scope, fresh=fresh), plan, self.states)

    def here(self, choice: Choice) -> Request:
        """The choice's request, with its device names replaced by devices of this machine.

        Raises `UnknownDevice` for a device that is not on this machine. With the setting `fall_back`, RAM (or the
        device that computes instead) takes its place, with a warning each time.
        """
        request = choice.request
        missing = [device for device in devices_of(request) if not self.inventory.is_here(str(device))]
        if missing and self.settings.fall_back:
            names = ", ".join(map(str, missing))
            log.warning("[MultiGPU] not on this machine: %s; other devices are used (MULTIGPU_FALL_BACK)", names)
            compute = None if is_default(choice.compute) else DeviceId.parse(choice.compute)
            request = without(request, missing, compute)
        return renamed(request, lambda device: self.inventory.resolve(str(device)))

    def budgets(self) -> list[DeviceBudget]:
        """The devices' memory for one plan: what is free, plus what the host would free by unloading other models."""
        budgets = host_budgets([device.id for device in self.inventory.devices])
        return [
            DeviceBudget(budget.device, budget.total, min(budget.total, budget.free + _unloadable(budget.device)))
            for budget in budgets
        ]


def _static(load: LoadFor, device: torch.device | None) -> tuple[Any, ...]:
    """What `load` loads, without DynamicVRAM."""
    with static_patchers():
        components = load(device)
    for component in filter(has_patcher, components):
        honour_dtypes(part_of(component).patcher.model)
    return components


def _named_compute(request: Request) -> DeviceId | None:
    """The compute device that the request's own text names."""
    return None if isinstance(request, Auto) else request.compute


def _unloadable(device: DeviceId) -> int:
    """Bytes on an accelerator that belong to models that are not set to keep."""
    if device.is_cpu:
        return 0
    where = torch_device(device)
    patchers = [entry.model for entry in model_management.current_loaded_models if entry.device == where]
    return sum(int(patcher.loaded_size()) for patcher in patchers if patcher is not None and not _is_kept(patcher))


def _is_kept(patcher: Any) -> bool:
    return patcher is not None and getattr(patcher.model, FLAG, None) is False


def _say(part: Part, plan: Plan, patcher: Any) -> None:
    if plan.streamed:
        log.info("[MultiGPU] %s is placed: %s", part.name, explain.one_line(plan))
        return
    how = "with DynamicVRAM" if patcher.is_dynamic() else "as usual"
    words = "[MultiGPU] %s computes on %s, and all its weights stay there: ComfyUI loads it %s"
    log.info(words, part.name, plan.compute, how)
