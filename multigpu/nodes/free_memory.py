"""Free Memory: gives memory back in the middle of a workflow and passes its input through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..host.node_api import io
from ..host.surface import Feature
from ..lifecycle.policy import Standing
from .widgets import CATEGORY

if TYPE_CHECKING:
    from ..runtime import Runtime

NODE_ID = "MultiGPUFreeMemory"
LEAVE = {
    "flagged models": lambda standing: standing is Standing.EJECT,
    "all but pinned": lambda standing: standing is not Standing.KEEP,
    "RAM caches": None,
}
"""The choices, and which models each unloads; None: it drops cached outputs."""

DESCRIPTION = (
    "Frees memory at this point of the workflow and passes its input through. Connect it after the nodes that still "
    "need the models, for example between the sampler and the VAE."
)
WHAT_TIP = (
    "flagged models: unloads the models that are set to eject. all but pinned: unloads every model that is not set "
    "to keep. RAM caches: drops cached outputs that no node of this run needs any more; the nodes that made them run "
    "again next time."
)


def free_memory_nodes(runtime: Runtime) -> list[type[Any]]:
    class FreeMemory(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(
                node_id=NODE_ID,
                display_name="Free Memory",
                category=CATEGORY,
                description=DESCRIPTION,
                search_aliases=["multigpu", "unload", "eject", "vram", "purge"],
                inputs=[
                    io.AnyType.Input("value", tooltip="Any output of another node. It is passed on unchanged."),
                    io.Combo.Input("free", options=[*LEAVE], default=next(iter(LEAVE)), tooltip=WHAT_TIP),
                ],
                outputs=[io.AnyType.Output(display_name="value")],
            )

        @classmethod
        def execute(cls, value: Any, free: str) -> Any:
            from ..host.lifecycle.free_now import free_now

            runtime.capabilities.need(Feature.LIFECYCLE)
            free_now(runtime.free_flow, runtime.recorder, free, LEAVE[free])
            return io.NodeOutput(value)

    FreeMemory.__name__ = FreeMemory.__qualname__ = NODE_ID
    return [FreeMemory]
