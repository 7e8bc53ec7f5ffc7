"""The place nodes: after a loader, they choose where a component computes and where its weights rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.names import DEFAULT_DEVICE
from ..host.node_api import io
from ..lifecycle.policy import Standing
from ..plan import AUTO, request_from_mode
from .widgets import CATEGORY, keep_problem, place_widgets

if TYPE_CHECKING:
    from ..host.remote.client import Remote
    from ..runtime import Runtime


@dataclass(frozen=True, slots=True)
class PlaceNode:
    """A row of the table of place nodes: `socket` is the name of the component's type in the host's node API."""

    node_id: str
    display_name: str
    socket: str
    component: str
    what: str


PLACE_NODES = (
    PlaceNode("MultiGPUPlaceModel", "Place Model", "Model", "model", "diffusion model"),
    PlaceNode("MultiGPUPlaceCLIP", "Place CLIP", "Clip", "clip", "text encoder"),
    PlaceNode("MultiGPUPlaceVAE", "Place VAE", "Vae", "vae", "VAE"),
    PlaceNode("MultiGPUPlaceControlNet", "Place ControlNet", "ControlNet", "control_net", "ControlNet"),
    PlaceNode("MultiGPUPlaceCLIPVision", "Place CLIP Vision", "ClipVision", "clip_vision", "CLIP vision model"),
)


def place_nodes(runtime: Runtime) -> list[type[Any]]:
    return [_place_node(row, runtime) for row in PLACE_NODES]


def _place_node(row: PlaceNode, runtime: Runtime) -> type[Any]:
    socket = getattr(io, row.socket)
    remote = runtime.remote

    class Place(io.ComfyNode):
        KEEPS_LOADED = True

        @classmethod
        def define_schema(cls) -> Any:
            lazy = {"lazy": True} if remote is not None else {}
            labels = [*runtime.inventory.labels(), *(remote.labels() if remote is not None else [])]
            return io.Schema(
                node_id=row.node_id,
                display_name=row.display_name,
                category=CATEGORY,
                description=f"Chooses the device on which a {row.what} computes, the devices on which its weights "
                "rest between uses, and whether it stays loaded. Works after any loader of ComfyUI.",
                search_aliases=["multigpu", "distorch", "virtual vram", "offload", "device", row.what],
                inputs=[socket.Input(row.component, **lazy), *place_widgets(labels, elsewhere=remote is not None)],
                outputs=[socket.Output()],
            )

        @classmethod
        def validate_inputs(
            cls, compute_device: Any = DEFAULT_DEVICE, keep_loaded: Any = Standing.DEFAULT.value
        ) -> bool | str:
            return keep_problem(keep_loaded)

        @classmethod
        def execute(
            cls,
            compute_device: str = DEFAULT_DEVICE,
            mode: str = AUTO,
            virtual_vram_gb: float = 4.0,
            donor_device: str = "cpu",
            expert_mode_allocations: str = "",
            keep_loaded: Any = Standing.DEFAULT.value,
            **component: Any,
        ) -> Any:
            request = request_from_mode(mode, virtual_vram_gb, donor_device, expert_mode_allocations)
            target = runtime.resolver.target(compute_device, request, Standing.read(keep_loaded))
            return io.NodeOutput(runtime.placer.place(component[row.component], target))

    node = Place if remote is None else _with_other_machines(Place, row, remote, runtime)
    node.__name__ = node.__qualname__ = row.node_id
    return node


def _with_other_machines(place: type[Any], row: PlaceNode, remote: Remote, runtime: Runtime) -> type[Any]:
    """The place node, with the devices of other machines: there, everything upstream of it runs, not here."""
    from ..remote.names import is_remote, parse_remote

    class RemotePlace(place):  # type: ignore[misc]
        @classmethod
        def check_lazy_status(cls, compute_device: str = DEFAULT_DEVICE, **inputs: Any) -> list[str]:
            return [] if is_remote(compute_device) else [row.component]

        @classmethod
        def fingerprint_inputs(cls, compute_device: Any = None, **inputs: Any) -> int:
            """Changes when the machine was lost, so that the component is built again."""
            named = isinstance(compute_device, str) and is_remote(compute_device)
            return remote.losses(compute_device) if named else 0

        @classmethod
        def execute(cls, compute_device: str = DEFAULT_DEVICE, **inputs: Any) -> Any:
            if not is_remote(compute_device):
                return super().execute(compute_device, **inputs)
            standing = Standing.read(inputs.get("keep_loaded", Standing.DEFAULT.value))
            component = remote.build(row.component, parse_remote(compute_device))
            runtime.placer.keep(component, standing)
            return io.NodeOutput(component)

    return RemotePlace
