"""What ComfyUI calls when it loads this pack."""

from __future__ import annotations

from typing import Any

from ..runtime import current


async def comfy_entrypoint() -> Any:
    """Start the runtime of this process and hand its nodes to ComfyUI. Changes nothing in the host."""
    from comfy_api.latest import ComfyExtension

    runtime = current()

    class MultiGPUExtension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return runtime.nodes()

    return MultiGPUExtension()
