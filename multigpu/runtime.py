"""The composition root: one object per process holds the state of this pack; the rest is handed what it needs."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import __version__
from .host.capabilities import HostCapabilities, probe
from .settings import Settings

LOGGER = "multigpu"
"""One name for all our log lines: inside ComfyUI a module's own name is the path of the folder."""


@dataclass(frozen=True)
class Runtime:
    """What was found out when ComfyUI loaded the pack."""

    settings: Settings
    capabilities: HostCapabilities

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Runtime:
        """Read the settings, look at the host, and say so in one line; a line more for each feature that is off.

        Raises InputError when a setting means nothing.
        """
        settings = Settings.from_environment(environment)
        logger = logging.getLogger(LOGGER)
        logger.setLevel(settings.log_level)
        capabilities = probe()
        state = capabilities.summary() if settings.enabled else "switched off by MULTIGPU_ENABLED"
        logger.info("[MultiGPU] %s on ComfyUI %s: %s", __version__, capabilities.version, state)
        for feature, problem in capabilities.features_off():
            logger.warning("[MultiGPU] %s is off: %s", feature, problem)
        return cls(settings, capabilities)

    def nodes(self) -> list[type[Any]]:
        """The node classes for ComfyUI. None yet."""
        return []


@functools.cache
def current() -> Runtime:
    """The runtime of this process: started when ComfyUI loads the pack, or by the first who asks."""
    return Runtime.start(os.environ)
