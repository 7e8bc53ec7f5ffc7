"""What ComfyUI calls when it loads this pack."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from . import api
from .runtime import API, LOGGER, current

_RUNTIME = ".multigpu.runtime"
"""How the module name of `runtime.py` ends in every copy of the pack: ComfyUI puts the path of the folder before it."""


def web_directory() -> str | None:
    """The folder that ComfyUI's frontend loads scripts from. None where the routes that they ask are off, and in a
    second copy of the pack."""
    return "./web" if first_copy() is None and current().offers_panel else None


async def comfy_entrypoint() -> Any:
    """Start the runtime of this process and hand its nodes to ComfyUI. Replaces nothing in the host.

    A second copy of the pack only logs a warning, because both would offer the same nodes.
    """
    from .host.extension import ComfyExtension

    first = first_copy()
    if first is not None:
        message = "[MultiGPU] is installed twice: ComfyUI has loaded %s, so %s offers no nodes; remove one of the two"
        logging.getLogger(LOGGER).warning(message, first, _folder(sys.modules[current.__module__]))
    else:
        runtime = current()
        if runtime.settings.enabled:
            sys.modules[API] = api
            runtime.free_flow.watch_prompts()
            runtime.read_settings()
            runtime.add_routes()
            runtime.add_nodes_for_packs()

    class MultiGPUExtension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return runtime.nodes() if first is None else []

    return MultiGPUExtension()


def first_copy() -> Path | None:
    """The folder of another copy of this pack that has started in this process; None as long as there is none."""
    for name, module in list(sys.modules.items()):
        if name.endswith(_RUNTIME) and name != current.__module__:
            start = getattr(module, "started", None)
            if start is not None and start.cache_info().currsize:
                return _folder(module)
    return None


def _folder(runtime: Any) -> Path:
    """The folder of the pack that a module of a runtime belongs to."""
    return Path(runtime.__file__).parents[1]
