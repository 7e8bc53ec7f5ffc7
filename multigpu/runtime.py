"""The composition root: one `Runtime` per process holds all state of this pack and passes it to the other modules."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import HostIncompatible
from .host.capabilities import HostCapabilities, probe
from .host.surface import Feature
from .lifecycle.absent import NoFreeFlow
from .settings import Settings
from .target import Resolver
from .telemetry.recorder import Recorder
from .telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from .devices.inventory import Inventory
    from .host.engine.model_states import ModelStates
    from .host.lifecycle.free_flow import FreeFlow
    from .host.placing.placer import Placer

LOGGER = "multigpu"
"""One name for all our log lines: inside ComfyUI a module's own name is the path of the folder."""

API = "comfyui_multigpu"
"""The name by which other packs import `api`, for the same reason."""


@dataclass(frozen=True)
class Runtime:
    """What was found out when ComfyUI loaded the pack."""

    settings: Settings
    capabilities: HostCapabilities

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Runtime:
        """Read the settings and check the host. Logs one line, and one more for each problem found."""
        settings = Settings.from_environment(environment)
        logger = logging.getLogger(LOGGER)
        logger.setLevel(settings.log_level)
        capabilities = probe()
        state = capabilities.summary() if settings.enabled else "switched off by MULTIGPU_ENABLED"
        logger.info("[MultiGPU] %s on ComfyUI %s: %s", __version__, capabilities.version, state)
        for problem in settings.problems:
            logger.warning("[MultiGPU] %s", problem)
        for feature, problem in capabilities.features_off():
            logger.warning("[MultiGPU] %s is off: %s", feature, problem)
        return cls(settings, capabilities)

    @functools.cached_property
    def inventory(self) -> Inventory:
        """The devices of this machine; probed when first asked."""
        return new_inventory()

    @functools.cached_property
    def states(self) -> ModelStates:
        """The states of all placed models. Only inside ComfyUI."""
        from .host.engine.model_states import ModelStates

        return ModelStates()

    @functools.cached_property
    def resolver(self) -> Resolver:
        """Finds the devices that nodes name."""
        return Resolver(self.inventory, self.settings.fall_back)

    @functools.cached_property
    def placer(self) -> Placer:
        """Places components. Only inside ComfyUI."""
        from .host.placing.device_scope import DeviceScope
        from .host.placing.placer import Placer

        return Placer(self.inventory, self.capabilities, self.states, DeviceScope(), self.free_flow)

    @functools.cached_property
    def recorder(self) -> Recorder:
        """Takes snapshots of memory. Only inside ComfyUI."""
        return Recorder(self._snapshot, logging.getLogger(LOGGER))

    def _snapshot(self, identifier: str, tag: str) -> Snapshot:
        from .host.device_memory import accelerators, snapshot

        return snapshot(identifier, tag, accelerators(self.inventory), self.free_flow.held())

    @functools.cached_property
    def free_flow(self) -> FreeFlow | NoFreeFlow:
        """What happens when memory is freed. Only inside ComfyUI."""
        try:
            self.capabilities.need(Feature.LIFECYCLE)
        except HostIncompatible as problem:
            return NoFreeFlow(problem)
        from .host.device_memory import accelerators
        from .host.lifecycle.free_flow import FreeFlow, pressure

        return FreeFlow(
            lambda: [device.id for device in accelerators(self.inventory)],
            pressure(self.settings.ram_limit),
            lambda: self.states.settle(),
            self.recorder,
        )

    def nodes(self) -> list[type[Any]]:
        """The node classes for ComfyUI: none when the pack is switched off, or the host's node API differs."""
        if not self.settings.enabled or not self.capabilities.offers(Feature.NODES):
            return []
        from .nodes import all_nodes

        return all_nodes(self)

    def add_nodes_for_packs(self) -> None:
        """Have nodes for those of other packs once all packs are loaded; none for packs that are not there."""
        if self.capabilities.offers(Feature.NODES) and self.capabilities.offers(Feature.PACKS):
            from .host.late_nodes import add_when_all_packs_are_loaded
            from .nodes.packs import pack_nodes

            add_when_all_packs_are_loaded(lambda: pack_nodes(self), beside="MultiGPUPlaceModel")


def new_inventory() -> Inventory:
    """The devices of this machine, with links and compute rates measured as the engine uses them. Needs torch."""
    from .devices.inventory import Inventory
    from .stream.speeds import layer_flops, link_bandwidth

    return Inventory(measure_link=link_bandwidth, measure_flops=layer_flops)


@functools.cache
def current() -> Runtime:
    """The runtime of this process, started by the first call: that of ComfyUI when it loads the pack, or another.

    Raises HostIncompatible when ComfyUI has loaded the pack and this is a second import of it, under another name: two
    runtimes would replace the same functions of the host.
    """
    loaded = sys.modules.get(API)
    if loaded is not None and loaded.current is not current:
        folder = Path(str(loaded.__file__)).parents[1]
        name = __name__.rpartition(".")[0]
        raise HostIncompatible(
            f"{name} is a second import of MultiGPU, which ComfyUI has loaded from {folder}; import {API}"
        )
    return Runtime.start(os.environ)
