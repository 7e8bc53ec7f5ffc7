"""The place nodes: after any loader of any pack, they choose where a component computes and where its weights rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..choice import AUTO, DEFAULT, DEFAULT_DEVICE, KEEP_CHOICES, MODES, Choice, read_keep, read_request
from ..errors import InputError

if TYPE_CHECKING:
    from ..runtime import Runtime

CATEGORY = "multigpu"

COMPUTE_TIP = (
    "The device on which the model computes. 'default' is the device that ComfyUI would choose. A workflow that names "
    "a device of another machine opens, too; running it stops with an error that lists this machine's devices."
)
MODE_TIP = (
    "Where the weights rest between uses. auto: on the compute device as far as they fit, the rest on other devices. "
    "virtual VRAM: a fixed number of gigabytes rests on the donors. expert: you give the amount for each device."
)
VIRTUAL_TIP = (
    "Mode 'virtual VRAM': gigabytes of weights that rest on the donors instead of the compute device. 0: none."
)
DONOR_TIP = (
    "Mode 'virtual VRAM': the devices that hold these weights, for example cpu, or cuda:1,cpu. "
    "The first one is filled first."
)
EXPERT_TIP = (
    "Mode 'expert': amounts per device as sizes (cuda:0,2.5gb;cpu,*), shares of the model (cuda:0,25%;cpu,75%) or "
    "shares of each device's memory (cuda:0,0.8;cpu,0.5). * takes the remainder."
)
KEEP_TIP = (
    "When ComfyUI frees memory: keep: the model stays loaded. eject: it is unloaded the next time. default: ComfyUI "
    "decides. API workflows may also use true (keep) or false (eject)."
)


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
    from ..host.node_api import io

    return [_place_node(io, row, runtime) for row in PLACE_NODES]


def _place_node(io: Any, row: PlaceNode, runtime: Runtime) -> type[Any]:
    socket = getattr(io, row.socket)

    class Place(io.ComfyNode):
        KEEPS_LOADED = True

        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(
                node_id=row.node_id,
                display_name=row.display_name,
                category=CATEGORY,
                description=f"Chooses the device on which a {row.what} computes, the devices on which its weights "
                "rest between uses, and whether it stays loaded. Works after any loader.",
                search_aliases=["multigpu", "distorch", "virtual vram", "offload", "device", row.what],
                inputs=[socket.Input(row.component), *_widgets(io, runtime)],
                outputs=[socket.Output()],
            )

        @classmethod
        def validate_inputs(cls, compute_device: Any = DEFAULT_DEVICE, keep_loaded: Any = DEFAULT) -> bool | str:
            return keep_problem(keep_loaded)

        @classmethod
        def execute(
            cls,
            compute_device: str = DEFAULT_DEVICE,
            mode: str = AUTO,
            virtual_vram_gb: float = 4.0,
            donor_device: str = "cpu",
            expert_mode_allocations: str = "",
            keep_loaded: Any = DEFAULT,
            **component: Any,
        ) -> Any:
            request = read_request(mode, virtual_vram_gb, donor_device, expert_mode_allocations)
            choice = Choice(compute_device, request, read_keep(keep_loaded))
            return io.NodeOutput(runtime.placer.place(component[row.component], choice))

    Place.__name__ = Place.__qualname__ = row.node_id
    return Place


def keep_problem(keep_loaded: Any) -> bool | str:
    """True, or what is wrong with the value, as the host's validation wants it. A linked value is not known yet."""
    try:
        return keep_loaded is None or bool(read_keep(keep_loaded))
    except InputError as problem:
        return str(problem)


def keep_widget(io: Any) -> Any:
    return io.Combo.Input("keep_loaded", options=[*KEEP_CHOICES], default=DEFAULT, optional=True, tooltip=KEEP_TIP)


def _widgets(io: Any, runtime: Runtime) -> list[Any]:
    labels = runtime.placer.inventory.labels()
    return [
        io.Combo.Input(
            "compute_device",
            options=[DEFAULT_DEVICE, *labels],
            default=DEFAULT_DEVICE,
            optional=True,
            tooltip=COMPUTE_TIP,
        ),
        io.Combo.Input("mode", options=[*MODES], default=AUTO, optional=True, tooltip=MODE_TIP),
        io.Float.Input(
            "virtual_vram_gb", default=4.0, min=0.0, max=1024.0, step=0.1, optional=True, tooltip=VIRTUAL_TIP
        ),
        io.String.Input("donor_device", default="cpu", optional=True, tooltip=DONOR_TIP),
        io.String.Input("expert_mode_allocations", default="", optional=True, tooltip=EXPERT_TIP),
        keep_widget(io),
    ]
