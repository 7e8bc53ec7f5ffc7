"""Nodes for several machines: CFG Halves and Fan Out. They are there only if MULTIGPU_RAY names a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..host.node_api import io
from .widgets import CATEGORY

if TYPE_CHECKING:
    from ..runtime import Runtime

HALVES_ID = "MultiGPUCFGHalves"
FAN_OUT_ID = "MultiGPUFanOut"
MOST = 4096

HALVES_TEXT = (
    "Computes both halves of each step at the same time: the positive one here, the negative one by a copy of the "
    "model on another machine. For a cfg other than 1."
)
COPY_TIP = "The same model, from a Place Model node with a device of another machine, such as ray://node-b/cuda:0."
FAN_OUT_TEXT = (
    "Runs everything upstream several times with consecutive seeds, on several machines at the same time, and gives "
    "the results as one batch in the order of the seeds."
)
COUNT_TIP = "How many seeds. The first is the one in the workflow; 1, 2, ... is added for the others."
MACHINES_TIP = (
    "The names of the nodes that compute, for example node-b, node-c. With here, this machine computes the first."
)


def other_machines_nodes(runtime: Runtime) -> list[type[Any]]:
    """No nodes unless there are other machines."""
    if runtime.remote is None:
        return []
    remote = runtime.remote
    from ..host.remote.fan_out import FanOuts, together
    from ..host.remote.halves import halved

    runs = FanOuts(remote)

    class Halves(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(
                node_id=HALVES_ID,
                display_name="CFG Halves",
                category=CATEGORY,
                description=HALVES_TEXT,
                search_aliases=["multigpu", "ray", "cfg", "parallel"],
                inputs=[io.Model.Input("model"), io.Model.Input("copy", tooltip=COPY_TIP)],
                outputs=[io.Model.Output()],
            )

        @classmethod
        def execute(cls, model: Any, copy: Any) -> Any:
            return io.NodeOutput(halved(model, copy, remote.fall_back))

    class FanOut(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(
                node_id=FAN_OUT_ID,
                display_name="Fan Out",
                category=CATEGORY,
                description=FAN_OUT_TEXT,
                search_aliases=["multigpu", "ray", "seeds", "batch", "parallel"],
                inputs=[
                    io.AnyType.Input("value", tooltip="Pictures, masks or latents.", lazy=True),
                    io.Int.Input("count", default=2, min=1, max=MOST, tooltip=COUNT_TIP),
                    io.String.Input("machines", default="here", tooltip=MACHINES_TIP),
                ],
                outputs=[io.AnyType.Output(display_name="batch")],
            )

        @classmethod
        def check_lazy_status(cls, value: Any = None, count: int = 2, machines: str = "here") -> list[str]:
            return ["value"] if runs.start("value", count, machines) and value is None else []

        @classmethod
        def execute(cls, value: Any = None, count: int = 2, machines: str = "here") -> Any:
            return io.NodeOutput(together(runs.results(value)))

    for node, name in ((Halves, HALVES_ID), (FanOut, FAN_OUT_ID)):
        node.__name__ = node.__qualname__ = name
    return [Halves, FanOut]
