"""From a component and a target to a placed component: what the place nodes and the loader nodes call."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ...devices.inventory import Inventory
from ...devices.torch_devices import device_id, torch_device
from ...errors import InputError
from ...files.families import retimed
from ...lifecycle.policy import Standing
from ...plan import DISK, Auto, DeviceId, Plan, Request, disk_budget, explain, make_plan, possible_donors
from ...target import Target
from ..capabilities import HostCapabilities
from ..components import Component, component_of, find_component
from ..device_memory import budgets
from ..engine.blocks import blocks_of
from ..engine.model_states import ATTACHMENT, ModelStates
from ..engine.placed_patcher import inherit, place
from ..engine.static_clone import cast_pages, honour_dtypes, static_clone
from ..loaded_models import entries, standing, unload_all_but
from ..replacements import static_patchers
from ..surface import Feature
from . import disk
from .device_scope import DeviceScope
from .disk import FileSpeeds
from .loader_nodes import LoaderCall
from .other_device import retargeted

log = logging.getLogger("multigpu")

REACHED = 0.45
"""The FLOP/s of a whole step, as a share of the FLOP/s of one matrix product alone: measured with Flux on an H200."""


class Lifecycle(Protocol):
    """What is told about every patcher that is placed, or loaded for a chosen device."""

    def placed(self, patcher: Any) -> None: ...

    def keep(self, component: Any, wanted: Standing) -> None: ...


@dataclass(frozen=True, slots=True)
class Placer:
    """Places components on the devices of this machine."""

    inventory: Inventory
    capabilities: HostCapabilities
    states: ModelStates
    scope: DeviceScope
    lifecycle: Lifecycle
    files: FileSpeeds = field(default_factory=FileSpeeds)
    hoist: bool = False

    def place(self, component: Any, target: Target, *, fresh: bool = False) -> Any:
        """A copy of the component, placed by the target. The given component is not changed.

        `fresh` says that the component was just loaded and has no other user, so that its weights need not be copied.
        Raises `MultiGPUError`, with what to do, if the component or the request cannot be used.
        """
        self.capabilities.need(Feature.PLACEMENT)
        return self._place(component_of(component), target, fresh)

    def load(self, loader: LoaderCall, device: DeviceId | None) -> tuple[Any, ...]:
        """What the loader returns, loaded for a device; None is the host's own choice.

        The loader runs with that device as torch's current one; the previous one is restored, whatever happens.
        Afterwards each component that the loader has put on another device is moved.
        """
        self.capabilities.need(Feature.DEVICES)
        return self._load(loader, device, static=False)

    def load_and_place(self, loader: LoaderCall, target: Target) -> tuple[Any, ...]:
        """As `load`, with the first component (the diffusion model, where there are several) placed by the target.

        If it is the only one and weights are to leave the compute device, it is loaded without DynamicVRAM at once, as
        a plan needs it.
        """
        for feature in (Feature.DEVICES, Feature.PLACEMENT):
            self.capabilities.need(feature)
        first, *others = self._load(loader, target.compute, static=loader.single and target.request.spreads)
        found = find_component(first)
        if found is not None:
            first = self._place(found, target, fresh=True)
        elif first is not None:
            words = "[MultiGPU] a %s has no model patcher, so its weights are not spread: ComfyUI loads it as usual"
            log.warning(words, type(first).__name__)
        return first, *others

    def keep(self, component: Any, standing: Standing) -> None:
        """Say of a component that was placed elsewhere whether it stays loaded."""
        patcher = component_of(component).patcher
        self.lifecycle.placed(patcher)
        self.lifecycle.keep(patcher, standing)

    def eject_others(self, device: DeviceId | None) -> None:
        """Unload every model from an accelerator (None: the host's own choice), except those that are to be kept."""
        where = model_management.get_torch_device() if device is None else torch_device(device)
        if where.type != "cpu":
            unload_all_but([entry for entry in entries() if standing(entry.model.model) is Standing.KEEP], where)

    def _load(self, loader: LoaderCall, device: DeviceId | None, *, static: bool) -> tuple[Any, ...]:
        if device is None:
            return self._static(loader, None) if static else loader.run(None)
        where = torch_device(device)
        with self.scope.on(where):
            components = self._static(loader, where) if static else loader.run(where)
        return tuple(self._moved(component, where) for component in components)

    def _moved(self, component: Any, device: torch.device) -> Any:
        found = find_component(component)
        if found is None:
            return component
        patcher = retargeted(found.patcher, device, self.scope, fresh=True)
        self.lifecycle.placed(patcher)
        return found.rebuilt(patcher)

    def _place(self, component: Component, target: Target, fresh: bool) -> Any:
        if hasattr(component.patcher, "unload_there"):
            raise InputError(
                f"{component.name} is on another machine, where its place node has put it; remove the place node "
                "behind that, or set the first one to a device of this machine"
            )
        compute = target.compute or device_id(component.patcher.load_device)
        request = target.request.fitted(compute)
        patcher = self.states.placed_before(component.patcher, (request, compute))
        if patcher is None:
            patcher = self._patcher(component, request, compute, fresh)
            self.states.note_placed(component.patcher, (request, compute), patcher)
        rebuilt = component.rebuilt(patcher)  # or an error, before anything is said about the model
        self.lifecycle.placed(patcher)
        self.lifecycle.keep(patcher, target.standing)
        return rebuilt

    def plan(self, request: Request, patcher: ModelPatcher, compute: DeviceId) -> Plan:
        """The plan, by measured speeds; nothing is measured if nothing is to leave the compute device.

        The speed of the model file is measured only if the plan leaves weights in it.
        """
        filed = disk.able(patcher, self.states)
        if not filed and DISK in request.devices():
            raise disk.refusal(patcher, dynamic_vram=self.capabilities.dynamic_vram)
        blocks = blocks_of(patcher, filed, hoist=self.hoist and self.capabilities.offers(Feature.HOISTING))
        needed = None if isinstance(request, Auto) else {compute, *request.devices()}
        memory = budgets(self.inventory.devices, needed)
        memory += [disk_budget(blocks)] if filed else []
        donors = possible_donors(request, blocks, memory, compute)
        if donors:
            flops = self.inventory.flops(compute)
            blocks = retimed(blocks, REACHED * flops) if flops else blocks
            speeds = {donor: self.inventory.bandwidth(donor, compute) for donor in sorted(donors - {DISK})}
            memory = [replace(budget, bandwidth=speeds.get(budget.device)) for budget in memory]
        plan = make_plan(request, blocks, memory, compute)
        speed = self.files.speed(patcher, plan, memory) if plan.bytes_on(DISK) else None
        if speed is None:
            return plan
        memory = [replace(budget, bandwidth=speed) if budget.device.is_disk else budget for budget in memory]
        return make_plan(request, blocks, memory, compute)

    def _patcher(self, component: Component, request: Request, compute: DeviceId, fresh: bool) -> ModelPatcher:
        patcher, device = component.patcher, torch_device(compute)
        plan = self.plan(request, patcher, compute)
        if not plan.streamed and ATTACHMENT not in patcher.attachments:
            own = retargeted(patcher, device, self.scope, fresh=fresh)
            cast_pages(own.model)
            how = "with DynamicVRAM" if own.is_dynamic() else "as usual"
            words = "[MultiGPU] %s computes on %s, and all its weights stay there: ComfyUI loads it %s"
            log.info(words, component.name, compute, how)
            return own
        if patcher.is_dynamic():
            with self.scope.on(device):  # so that the static copy that a plan needs is read for this device
                own = static_clone(patcher, in_pages=True)
        else:
            own = retargeted(patcher, device, self.scope, fresh=fresh).clone()
            inherit(own, patcher)
        if patcher.load_device != device or plan.bytes_on(DISK):  # its weights may have another data type now
            plan = self.plan(request, own, compute)
        log.info("[MultiGPU] %s is placed: %s", component.name, explain.one_line(plan))
        return place(own, plan, self.states, fills=request == Auto())

    def _static(self, loader: LoaderCall, device: torch.device | None) -> tuple[Any, ...]:
        """What the loader loads, without DynamicVRAM."""
        with static_patchers(in_pages=self.capabilities.dynamic_vram):
            components = loader.run(device)
        for found in map(find_component, components):
            if found is not None:
                honour_dtypes(found.patcher.model, later=True)
        return components
