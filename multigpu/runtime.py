"""The composition root: one `Runtime` per process holds all state of this pack and passes it to the other modules."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import __version__
from .host.capabilities import HostCapabilities, probe
from .host.surface import Feature
from .lifecycle.policy import Standing
from .settings import Settings

if TYPE_CHECKING:
    from .devices.inventory import Inventory
    from .host.free_flow import FreeFlow
    from .host.model_states import ModelStates
    from .host.placing import Placer

LOGGER = "multigpu"
"""One name for all our log lines: inside ComfyUI a module's own name is the path of the folder."""


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
        from .host.model_states import ModelStates

        return ModelStates()

    @functools.cached_property
    def placer(self) -> Placer:
        """Places components. Only inside ComfyUI."""
        from .host.device_scope import DeviceScope
        from .host.placing import Placer

        return Placer(self.inventory, self.settings, self.capabilities, self.states, DeviceScope(), self.keep)

    @functools.cached_property
    def free_flow(self) -> FreeFlow:
        """What happens when memory is freed. Only inside ComfyUI; raises HostIncompatible where this host lacks it."""
        self.capabilities.need(Feature.LIFECYCLE)
        from .host.free_flow import FreeFlow, pressure

        return FreeFlow(
            lambda: self.inventory.accelerators, pressure(self.settings.ram_limit), lambda: self.states.settle()
        )

    def keep(self, component: Any, keep: str) -> None:
        """Set `default`, `keep` or `eject` for the model in a component, if this host allows it."""
        if self.capabilities.offers(Feature.LIFECYCLE):
            self.free_flow.keep(component, Standing(keep))

    def nodes(self) -> list[type[Any]]:
        """The node classes for ComfyUI: none when the pack is switched off, or the host's node API differs."""
        if not self.settings.enabled or not self.capabilities.offers(Feature.NODES):
            return []
        from .nodes import all_nodes

        return all_nodes(self)


def new_inventory() -> Inventory:
    """The devices of this machine, with links and compute rates measured as the engine uses them. Needs torch."""
    from .devices.inventory import Inventory
    from .stream.speeds import layer_flops, link_bandwidth

    return Inventory(measure_link=link_bandwidth, measure_flops=layer_flops)


@functools.cache
def current() -> Runtime:
    """The runtime of this process, started by the first call: that of ComfyUI when it loads the pack, or another."""
    return Runtime.start(os.environ)
