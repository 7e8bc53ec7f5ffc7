"""The composition root: one `Runtime` per process holds all state of this pack and passes it to the other modules."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import HostIncompatible
from .host.capabilities import HostCapabilities, probe
from .host.surface import Feature
from .lifecycle.absent import NoFreeFlow
from .settings import RAY_FILE, Settings
from .target import Resolver
from .telemetry.recorder import Recorder

if TYPE_CHECKING:
    from .devices.figures import FigureFile, Kept
    from .devices.inventory import Inventory
    from .host.engine.model_states import ModelStates
    from .host.lifecycle.free_flow import FreeFlow
    from .host.panel.routes import Panel
    from .host.placing.placer import Placer
    from .host.remote.client import Remote
    from .host.snapshots import Snapshots

LOGGER = "multigpu"
"""One name for all our log lines: inside ComfyUI a module's own name is the path of the folder."""

API = "comfyui_multigpu"
"""The name by which other packs import `api`, for the same reason."""


@dataclass(eq=False)
class Runtime:
    """What was found out when ComfyUI loaded the pack. Only `change_settings` changes something of it."""

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
        """The devices of this machine; probed when first asked. Speeds that are measured are kept in a file."""
        return new_inventory(self._speeds() if self.capabilities.offers(Feature.SPEEDS) else None)

    def _speeds(self) -> FigureFile:
        from .devices.figures import FigureFile
        from .host.user_folder import user_folder

        return FigureFile(user_folder() / "speeds.json", anew=self.settings.measure)

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

        hoist = self.settings.hoist
        return Placer(self.inventory, self.capabilities, self.states, DeviceScope(), self.free_flow, hoist=hoist)

    @functools.cached_property
    def remote(self) -> Remote | None:
        """Components on other machines. None, and nothing of it is imported, unless MULTIGPU_RAY names a cluster."""
        if self.settings.ray is None or not self.capabilities.offers(Feature.REMOTE):
            return None
        from .host.remote.client import connected

        return connected(self, self.settings.ray)

    @functools.cached_property
    def recorder(self) -> Recorder:
        """Takes snapshots of memory. Only inside ComfyUI."""
        return Recorder(lambda identifier, tag: self.snapshots.take(identifier, tag), logging.getLogger(LOGGER))

    @functools.cached_property
    def lock(self) -> threading.RLock:
        """Held by threads that have models in hands, and while models are unloaded."""
        return threading.RLock()

    @functools.cached_property
    def snapshots(self) -> Snapshots:
        """Looks at memory. Only inside ComfyUI."""
        from .host.snapshots import Snapshots

        elsewhere = tuple if self.remote is None else self.remote.devices
        return Snapshots(self.inventory, lambda: self.free_flow.held_patchers(), self.lock, elsewhere)

    @functools.cached_property
    def free_flow(self) -> FreeFlow | NoFreeFlow:
        """What happens when memory is freed. Only inside ComfyUI."""
        try:
            self.capabilities.need(Feature.LIFECYCLE)
        except HostIncompatible as problem:
            return NoFreeFlow(problem)
        from .host.device_memory import accelerators
        from .host.lifecycle.free_flow import FreeFlow

        return FreeFlow(
            lambda: [device.id for device in accelerators(self.inventory)],
            self.settings.ram_limit,
            self._tidy,
            lambda: self.states.learn(),
            self.recorder,
            self.lock,
        )

    def _tidy(self) -> None:
        """On the prompt worker, between prompts and before models are loaded."""
        self.states.settle()
        self.snapshots.uses.look()

    def nodes(self) -> list[type[Any]]:
        """The node classes for ComfyUI: none when the pack is switched off, or the host's node API differs."""
        if not self.settings.enabled or not self.capabilities.offers(Feature.NODES):
            return []
        from .nodes import all_nodes

        return all_nodes(self)

    def read_settings(self) -> None:
        """Take over what ComfyUI has saved of its settings dialog, and the file that names a Ray cluster.

        A line is logged for each problem found.
        """
        before = self.settings
        if self.capabilities.offers(Feature.PANEL):
            from .host.user_folder import saved_settings

            self._use(self.settings.with_stored(saved_settings()))
        if self.capabilities.offers(Feature.SPEEDS):
            from .host.user_folder import saved_text

            self._use(self.settings.with_head(saved_text(RAY_FILE)))
        for problem in self.settings.problems[len(before.problems) :]:
            logging.getLogger(LOGGER).warning("[MultiGPU] %s", problem)

    def change_settings(self, values: Mapping[str, Any]) -> None:
        """Change settings while ComfyUI runs. Raises RequestError, and changes nothing, if one is invalid."""
        self._use(self.settings.changed(values))

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        logging.getLogger(LOGGER).setLevel(settings.log_level)
        self.__dict__.pop("resolver", None)
        if "free_flow" in self.__dict__:
            self.free_flow.watch_ram(settings.ram_limit)

    @property
    def offers_panel(self) -> bool:
        """Whether there are the routes of the panel, and what uses them in the frontend. They need what nodes need."""
        without = {Feature.COMMAND, Feature.SPEEDS, Feature.HOISTING, Feature.REMOTE}
        return self.settings.enabled and all(self.capabilities.offers(feature) for feature in {*Feature} - without)

    def add_routes(self) -> None:
        """Add the routes of the panel to the host's server."""
        if self.offers_panel:
            from .host.panel.routes import add_routes

            add_routes(self.panel)

    @functools.cached_property
    def panel(self) -> Panel:
        """What answers the routes of the panel. Only inside ComfyUI."""
        from .host.panel.routes import new_panel

        return new_panel(self)

    def add_nodes_for_packs(self) -> None:
        """Have nodes for those of other packs once all packs are loaded; none for packs that are not there."""
        if self.capabilities.offers(Feature.NODES) and self.capabilities.offers(Feature.PACKS):
            from .host.late_nodes import add_when_all_packs_are_loaded
            from .nodes.packs import pack_nodes

            add_when_all_packs_are_loaded(lambda: pack_nodes(self), beside="MultiGPUPlaceModel")


def new_inventory(kept: Kept | None = None) -> Inventory:
    """The devices of this machine, with links and compute rates measured as the engine uses them. Needs torch.

    What is `kept` from earlier processes is not measured; None: everything is.
    """
    from .devices.inventory import Inventory
    from .stream.speeds import layer_flops, link_bandwidth

    return Inventory(measure_link=link_bandwidth, measure_flops=layer_flops, kept=kept)


def current() -> Runtime:
    """The runtime of this process, started by the first call: that of ComfyUI when it loads the pack, or another.

    Raises HostIncompatible when ComfyUI has loaded the pack and this is a second import of it, under another name: two
    runtimes would replace the same functions of the host. That is asked at every call, because the second import may
    have started its runtime before ComfyUI loaded the pack.
    """
    loaded = sys.modules.get(API)
    if loaded is not None and loaded.current is not current:
        folder = Path(str(loaded.__file__)).parents[1]
        name = __name__.rpartition(".")[0]
        raise HostIncompatible(
            f"{name} is a second import of MultiGPU, which ComfyUI has loaded from {folder}; import {API}"
        )
    return started()


@functools.cache
def started() -> Runtime:
    """The runtime of this copy of the pack; call `current`."""
    return Runtime.start(os.environ)
