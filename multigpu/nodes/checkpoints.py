"""Nodes of the archived pack that do not fit the table: checkpoints with a device per part, and two small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..host.node_api import io
from ..host.placing.loader_nodes import CHECKPOINT_PARTS, CheckpointPart, NodeCall, inputs_of, outputs_of
from ..plan import CPU, VirtualVram
from ..target import Target
from . import loader_table as table
from .loaders import Load, loader_node, loader_schema
from .widgets import CATEGORY, EJECT_TIP, SPREAD_CATEGORY, LoaderWidgets, keep_widget, read_spread

if TYPE_CHECKING:
    from ..runtime import Runtime

WHOLE = VirtualVram(0, (CPU,))
"""A request that puts all weights on the compute device."""

ABOUT = "Loads a checkpoint, with a separate device for diffusion model, text encoder and VAE."
PRECISION_TIP = "Has no effect: a model whose weights are spread gets a LoRA at full precision, on the compute device."


def checkpoint_nodes(runtime: Runtime) -> list[type[Any]]:
    return [make(runtime) for make in (_advanced, _advanced_spread, _low_precision, _device_selector)]


def _loads_parts(runtime: Runtime, targets: Callable[[dict[str, Any]], tuple[Target, ...]]) -> Load:
    """Reads each part of a checkpoint for the device that `targets` gives for it, and places it."""

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        wanted = targets(values)
        if values.get("eject_models"):
            for device in {target.compute for target in wanted}:
                runtime.placer.eject_others(device)
        parts: list[Any] = []
        for part, target in zip(CHECKPOINT_PARTS, wanted, strict=True):
            parts += runtime.placer.load_and_place(CheckpointPart(values["ckpt_name"], part), target)
        return tuple(parts)

    return load


def _advanced(runtime: Runtime) -> type[Any]:
    names = {"unet_device": "the diffusion model", "clip_device": "the text encoder", "vae_device": "the VAE"}

    def widgets() -> list[Any]:
        make = LoaderWidgets(runtime.inventory.labels())
        return [make.device(name, what, optional=False) for name, what in names.items()]

    schema = loader_schema(table.CHECKPOINT, "Load Checkpoint Advanced (MultiGPU)", CATEGORY, ABOUT, widgets)
    load = _loads_parts(runtime, lambda values: tuple(runtime.resolver.target(values[name], WHOLE) for name in names))
    return loader_node(runtime, table.CHECKPOINT_ADVANCED, schema, load)


def _advanced_spread(runtime: Runtime) -> type[Any]:
    def widgets() -> list[Any]:
        make = LoaderWidgets(runtime.inventory.labels())
        return [
            make.device("unet_compute_device", "the diffusion model", optional=False),
            *make.virtual("unet_", optional=False),
            make.device("clip_compute_device", "the text encoder", optional=False),
            *make.virtual("clip_", 2.0, optional=False),
            make.device("vae_device", "the VAE", optional=False),
            make.expert("unet_"),
            make.expert("clip_"),
            make.switch("high_precision_loras", True, PRECISION_TIP),
            make.switch("eject_models", True, EJECT_TIP),
            keep_widget(),
        ]

    def targets(values: dict[str, Any]) -> tuple[Target, ...]:
        target = runtime.resolver.target
        unet = target(values["unet_compute_device"], read_spread(values, "unet_"))
        clip = target(values["clip_compute_device"], read_spread(values, "clip_"))
        return unet, clip, target(values["vae_device"], WHOLE)

    title = "Load Checkpoint Advanced (DisTorch2)"
    schema = loader_schema(table.CHECKPOINT, title, SPREAD_CATEGORY, ABOUT, widgets)
    return loader_node(runtime, table.CHECKPOINT_ADVANCED_SPREAD, schema, _loads_parts(runtime, targets), keeps=True)


def _low_precision(runtime: Runtime) -> type[Any]:
    """The archived pack had two ways to apply a LoRA. There is only one now: this node just calls the host's loader."""

    def schema() -> dict[str, Any]:
        names = [given for given in inputs_of("UNETLoader", without=table.DEVICE) if given.id == "unet_name"]
        return {
            "display_name": "Load Diffusion Model (LP)",
            "category": CATEGORY,
            "description": "The same as ComfyUI's Load Diffusion Model, for workflows of the archived pack.",
            "inputs": names,
            "outputs": outputs_of("UNETLoader"),
        }

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        return NodeCall("UNETLoader", {**values, "weight_dtype": "default"}).run(None)

    return loader_node(runtime, table.LOW_PRECISION_UNET, schema, load)


def _device_selector(runtime: Runtime) -> type[Any]:
    def schema() -> dict[str, Any]:
        return {
            "display_name": "Device Selector (MultiGPU)",
            "category": CATEGORY,
            "description": "Passes the name of a device to other nodes.",
            "inputs": [io.Combo.Input(table.DEVICE, options=runtime.inventory.labels())],
            "outputs": [io.Custom(table.DEVICE_SOCKET).Output(display_name=table.DEVICE)],
        }

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        found = runtime.resolver.device(values[table.DEVICE])
        return (values[table.DEVICE] if found is None else str(found),)

    return loader_node(runtime, table.DEVICE_SELECTOR, schema, load)
