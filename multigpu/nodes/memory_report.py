"""Memory Report: what is in memory at this point of the workflow, as text; `web/memory_report.js` shows it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..host.node_api import io, ui
from ..telemetry.report import report
from .widgets import CATEGORY

if TYPE_CHECKING:
    from ..runtime import Runtime

NODE_ID = "MultiGPUMemoryReport"

DESCRIPTION = (
    "Shows what is in memory at this point of the workflow: every device, RAM, and every loaded model with the devices "
    "on which its weights rest. Works alone, or between two nodes."
)
VALUE_TIP = "Optional: any output of another node, passed on unchanged. The report is made after that node has run."


def memory_report_nodes(runtime: Runtime) -> list[type[Any]]:
    class MemoryReport(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(
                node_id=NODE_ID,
                display_name="Memory Report",
                category=CATEGORY,
                description=DESCRIPTION,
                search_aliases=["multigpu", "vram", "ram", "usage", "devices", "loaded models"],
                inputs=[io.AnyType.Input("value", optional=True, tooltip=VALUE_TIP)],
                outputs=[io.AnyType.Output(display_name="value"), io.String.Output(display_name="report")],
                is_output_node=True,
            )

        @classmethod
        def fingerprint_inputs(cls, value: Any = None) -> float:
            """NaN, which equals nothing, so that the node runs every time: memory changes though no input does."""
            return float("nan")

        @classmethod
        def execute(cls, value: Any = None) -> Any:
            runtime.states.learn()
            text = report(runtime.recorder.take("Memory Report", "now", level=logging.DEBUG))
            return io.NodeOutput(value, text, ui=ui.PreviewText(text))

    MemoryReport.__name__ = MemoryReport.__qualname__ = NODE_ID
    return [MemoryReport]
