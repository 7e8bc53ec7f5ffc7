"""The loader nodes of the archived pack: each runs a loader of the host, or of another pack, on a chosen device.

The DisTorch ones also place what was loaded, as a place node would. All are made by one factory from the tables in
`loader_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..api import load_once
from ..host.components import find_component
from ..host.model_files import files_named
from ..host.node_api import io
from ..host.placing.loader_nodes import NodeCall, inputs_of, is_there, outputs_of
from ..host.reading import reading
from ..lifecycle.policy import Standing
from ..plan import request_from_widgets
from . import loader_table as table
from .widgets import (
    CATEGORY,
    EJECT_TIP,
    LEGACY_CATEGORY,
    OTHER_VRAM_TIP,
    SPREAD,
    SPREAD_CATEGORY,
    LoaderWidgets,
    keep_problem,
    keep_widget,
    read_spread,
)

if TYPE_CHECKING:
    from ..runtime import Runtime

Load = Callable[[dict[str, Any]], tuple[Any, ...]]
"""Takes the widget values by name, returns the components."""


def loader_nodes(runtime: Runtime) -> list[type[Any]]:
    """Two nodes for each loader of the table that the host has."""
    here = [loader for loader in table.LOADERS if is_there(loader.target)]
    return [make(loader, runtime) for loader in here for make in (_plain, _spread)]


def pack_loader_nodes(loader: table.Loader, runtime: Runtime) -> list[type[Any]]:
    """The three nodes for a loader of another pack."""
    return [make(loader, runtime) for make in (_plain, _spread, _legacy)]


def loader_node(
    runtime: Runtime, node_id: str, schema: Callable[[], dict[str, Any]], load: Load, keeps: bool = False
) -> type[Any]:
    """A V3 node class. `schema` gives what differs between nodes; it is called each time, because the files change."""

    class Loader(io.ComfyNode):
        KEEPS_LOADED = keeps

        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(node_id=node_id, **{"is_deprecated": True} | schema())

        @classmethod
        def validate_inputs(
            cls,
            device: Any = None,
            compute_device: Any = None,
            donor_device: Any = None,
            unet_device: Any = None,
            clip_device: Any = None,
            vae_device: Any = None,
            unet_compute_device: Any = None,
            unet_donor_device: Any = None,
            clip_compute_device: Any = None,
            clip_donor_device: Any = None,
            load_device: Any = None,
            offload_device: Any = None,
            swap_device: Any = None,
            keep_loaded: Any = None,
        ) -> bool | str:
            """Accepts devices that this machine does not have; running the node then fails and lists those it has."""
            return keep_problem(keep_loaded)

        @classmethod
        def execute(cls, **given: Any) -> Any:
            values = {**defaults(cls.define_schema().inputs), **given}
            if not keeps:
                return io.NodeOutput(*_loaded(values, load))
            standing = Standing.read(values.pop("keep_loaded"))
            components = _loaded_once(node_id, values, load)
            kept = [component for component in components if find_component(component) is not None]
            if not kept and standing is not Standing.DEFAULT:
                kept = [*components]  # raises: none of them has a patcher. (A checkpoint may lack some of its parts.)
            for component in kept:
                runtime.free_flow.keep(component, standing)
            return io.NodeOutput(*components)

    Loader.__name__ = Loader.__qualname__ = node_id
    return Loader


def defaults(inputs: list[Any]) -> dict[str, Any]:
    """The values of optional widgets that a workflow leaves out."""
    return {
        given.id: given.default for given in inputs if given.optional and getattr(given, "default", None) is not None
    }


def _loaded_once(node_id: str, values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` returns for the values, or what it returned for them before, if that still exists.

    So a changed `keep_loaded`, which is not among the values, does not load the model again.
    """
    if not all(isinstance(value, (str, int, float, bool)) for value in values.values()):
        return _loaded(values, load)  # for an input that is a model, only the host's cache knows whether it changed
    return load_once(node_id, values, lambda: _loaded(values, load))


def _loaded(values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` returns for the values. The node's progress bar shows how much of the files they name is read."""
    with reading(files_named(values)):
        return load(values)


def loader_schema(
    target: str, title: str, category: str, description: str, widgets: Callable[[], list[Any]]
) -> Callable[[], dict[str, Any]]:
    """The `schema` argument of `loader_node`: the inputs of the host's node, then ours; the host node's outputs."""

    def schema() -> dict[str, Any]:
        return {
            "display_name": title,
            "category": category,
            "description": description,
            "inputs": [*inputs_of(target, without=table.DEVICE), *widgets()],
            "outputs": outputs_of(target),
        }

    return schema


def _plain(loader: table.Loader, runtime: Runtime) -> type[Any]:
    def widgets() -> list[Any]:
        return [LoaderWidgets(runtime.inventory.labels()).device(table.DEVICE, "the model")]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, table.DEVICE)
        return runtime.placer.load(NodeCall(loader.target, own), runtime.resolver.device(ours[table.DEVICE]))

    title, about = f"{loader.title} (MultiGPU)", f"{loader.title}, on a device of your choice."
    schema = loader_schema(loader.target, title, CATEGORY, about, widgets)
    return loader_node(runtime, f"{loader.target}MultiGPU", schema, load)


def _spread(loader: table.Loader, runtime: Runtime) -> type[Any]:
    def widgets() -> list[Any]:
        make = LoaderWidgets(runtime.inventory.labels())
        switch = make.switch("eject_models", loader.eject, EJECT_TIP)
        return [make.device(loader.spread, "the model"), *make.virtual(), make.expert(), switch, keep_widget()]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, loader.spread, *SPREAD, "eject_models")
        target = runtime.resolver.target(ours[loader.spread], read_spread(ours))
        if ours["eject_models"]:
            runtime.placer.eject_others(target.compute)
        return runtime.placer.load_and_place(NodeCall(loader.target, own), target)

    title, about = f"{loader.title} (DisTorch2)", f"{loader.title}, with its weights spread over devices."
    schema = loader_schema(loader.target, title, SPREAD_CATEGORY, about, widgets)
    return loader_node(runtime, f"{loader.target}DisTorch2MultiGPU", schema, load, keeps=True)


def _legacy(loader: table.Loader, runtime: Runtime) -> type[Any]:
    def widgets() -> list[Any]:
        make = LoaderWidgets(runtime.inventory.labels())
        size, _ = make.virtual()
        switch = make.switch(table.OTHER_VRAM, False, OTHER_VRAM_TIP)
        return [make.device(table.DEVICE, "the model"), size, switch, make.expert(), keep_widget()]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        size, expert = SPREAD[0], SPREAD[-1]
        ours, own = split(values, table.DEVICE, size, table.OTHER_VRAM, expert)
        compute = runtime.resolver.device(ours[table.DEVICE])
        others = [str(device.id) for device in runtime.inventory.accelerators if device.id != compute]
        donors = ",".join([*(others if ours[table.OTHER_VRAM] else ()), "cpu"])
        target = runtime.resolver.target(ours[table.DEVICE], request_from_widgets(ours[size], donors, ours[expert]))
        return runtime.placer.load_and_place(NodeCall(loader.target, own), target)

    title, about = f"{loader.title} (DisTorch)", f"{loader.title}, with its weights spread over devices."
    schema = loader_schema(loader.target, title, LEGACY_CATEGORY, about, widgets)
    return loader_node(runtime, f"{loader.target}DisTorchMultiGPU", schema, load, keeps=True)


def split(values: dict[str, Any], *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of our widgets, and those of the host's node."""
    return {name: values[name] for name in names}, {n: v for n, v in values.items() if n not in names}
