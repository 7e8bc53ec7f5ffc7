"""What ComfyUI calls when it loads this pack."""

from __future__ import annotations

from typing import Any

from ..runtime import current
from .surface import Feature


async def comfy_entrypoint() -> Any:
    """Start the runtime of this process and hand its nodes to ComfyUI. Replaces nothing in the host."""
    from comfy_api.latest import ComfyExtension

    runtime = current()
    if runtime.settings.enabled and runtime.capabilities.offers(Feature.LIFECYCLE):
        runtime.free_flow.hand_back.watch_prompts()

    class MultiGPUExtension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return runtime.nodes()

    return MultiGPUExtension()
