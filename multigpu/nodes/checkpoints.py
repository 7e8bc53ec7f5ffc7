"""Nodes of the archived pack that do not fit the table: checkpoints with a device per part, and two small ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..choice import Choice
from ..plan import CPU, VirtualVram
from . import loader_table as table
from .loaders import EJECT_TIP, SPREAD_CATEGORY, Load, Widgets, loader_node, loader_schema, read_choice
from .place import CATEGORY, keep_widget

if TYPE_CHECKING:
    from ..runtime import Runtime

PARTS = ("model", "clip", "vae")
ABOUT = "Loads a checkpoint, with a separate device for diffusion model, text encoder and VAE."
PRECISION_TIP = "Has no effect: a LoRA is always applied once, at full precision, on the compute device."


def checkpoint_nodes(runtime: Runtime) -> list[type[Any]]:
    from ..host.node_api import io

    return [make(io, runtime) for make in (_advanced, _advanced_spread, _low_precision, _device_selector)]


def whole(device: str) -> Choice:
    """A choice that puts all weights on one device."""
    return Choice(device, VirtualVram(0, (CPU,)))


def _read(name: str, part: str, _device: Any) -> tuple[Any]:
    from ..host.loaders import checkpoint_part

    return (checkpoint_part(name, part),)


def _loads_parts(runtime: Runtime, choices: Callable[[dict[str, Any]], tuple[Choice, ...]]) -> Load:
    """Reads each part of a checkpoint for the device that `choices` names for it, and places it."""

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        name = values["ckpt_name"]
        wanted = [replace(choice, compute=runtime.placer.known(choice.compute)) for choice in choices(values)]
        if values.get("eject_models"):
            for device in {choice.compute for choice in wanted}:
                runtime.placer.eject_others(device)
        parts: list[Any] = []
        for part, choice in zip(PARTS, wanted, strict=True):
            read = functools.partial(_read, name, part)
            parts += runtime.placer.loaded_and_placed(choice, read, alone=True)
        return tuple(parts)

    return load


def _advanced(io: Any, runtime: Runtime) -> type[Any]:
    names = {"unet_device": "the diffusion model", "clip_device": "the text encoder", "vae_device": "the VAE"}

    def widgets() -> list[Any]:
        make = Widgets(io, runtime.inventory.labels())
        return [make.device(name, what, optional=False) for name, what in names.items()]

    schema = loader_schema(table.CHECKPOINT, "Load Checkpoint Advanced (MultiGPU)", CATEGORY, ABOUT, widgets)
    load = _loads_parts(runtime, lambda values: tuple(whole(values[name]) for name in names))
    return loader_node(io, table.CHECKPOINT_ADVANCED, schema, load)


def _advanced_spread(io: Any, runtime: Runtime) -> type[Any]:
    def widgets() -> list[Any]:
        make = Widgets(io, runtime.inventory.labels())
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
            keep_widget(io),
        ]

    def choices(values: dict[str, Any]) -> tuple[Choice, ...]:
        unet = read_choice(values, values["unet_compute_device"], "unet_")
        clip = read_choice(values, values["clip_compute_device"], "clip_")
        return unet, clip, whole(values["vae_device"])

    title = "Load Checkpoint Advanced (DisTorch2)"
    schema = loader_schema(table.CHECKPOINT, title, SPREAD_CATEGORY, ABOUT, widgets)
    return loader_node(io, table.CHECKPOINT_ADVANCED_SPREAD, schema, _loads_parts(runtime, choices), keeps=True)


def _low_precision(io: Any, runtime: Runtime) -> type[Any]:
    """The archived pack had two ways to apply a LoRA. There is only one now: this node just calls the host's loader."""
    from ..host import loaders

    def schema() -> dict[str, Any]:
        names = [given for given in loaders.inputs_of("UNETLoader", without=table.DEVICE) if given.id == "unet_name"]
        return {
            "display_name": "Load Diffusion Model (LP)",
            "category": CATEGORY,
            "description": "The same as ComfyUI's Load Diffusion Model, for workflows of the archived pack.",
            "inputs": names,
            "outputs": loaders.outputs_of("UNETLoader"),
        }

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        return loaders.call("UNETLoader", {**values, "weight_dtype": "default"}, None)

    return loader_node(io, table.LOW_PRECISION_UNET, schema, load)


def _device_selector(io: Any, runtime: Runtime) -> type[Any]:
    def schema() -> dict[str, Any]:
        return {
            "display_name": "Device Selector (MultiGPU)",
            "category": CATEGORY,
            "description": "Passes the name of a device to other nodes.",
            "inputs": [io.Combo.Input(table.DEVICE, options=runtime.inventory.labels())],
            "outputs": [io.Custom(table.DEVICE_SOCKET).Output(display_name=table.DEVICE)],
        }

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        found = runtime.placer.device(values[table.DEVICE])
        return (values[table.DEVICE] if found is None else str(found),)

    return loader_node(io, table.DEVICE_SELECTOR, schema, load)
