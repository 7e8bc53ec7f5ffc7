"""The loader nodes of the archived pack: each runs a loader of the host on a chosen device.

The DisTorch2 ones also place what was loaded, as a place node would. All are made by one factory from the table in
`loader_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..api import load_once, set_keep_loaded
from ..choice import DEFAULT, Choice, read_keep
from ..plan import request_from_widgets
from . import loader_table as table
from .place import CATEGORY, EXPERT_TIP, keep_problem, keep_widget

if TYPE_CHECKING:
    from ..runtime import Runtime

SPREAD_CATEGORY = f"{CATEGORY}/distorch_2"
EJECT_TIP = "Unload other models from the compute device before this one is loaded. Models that are set to keep stay."

SPREAD = ("virtual_vram_gb", "donor_device", "expert_mode_allocations")
"""The widgets that say how weights are spread, in the archived pack's order."""

Load = Callable[[dict[str, Any]], tuple[Any, ...]]
"""Takes the widget values by name, returns the components."""


@dataclass(frozen=True, slots=True)
class Widgets:
    """Makes the widgets that choose devices, for one machine."""

    io: Any
    labels: list[str]

    @property
    def first(self) -> str:
        """The device that is offered first: the first accelerator, or the CPU where there is none."""
        return self.labels[0]

    def device(self, name: str, what: str, *, optional: bool = True) -> Any:
        tip = f"The device on which {what} computes."
        return self.io.Combo.Input(name, options=self.labels, default=self.first, optional=optional, tooltip=tip)

    def virtual(self, prefix: str = "", default: float = 4.0, *, optional: bool = True) -> list[Any]:
        tip = "Gigabytes of weights that rest on the donor instead of the compute device. 0: none."
        size = self.io.Float.Input(
            f"{prefix}virtual_vram_gb", default=default, min=0.0, max=128.0, step=0.1, optional=optional, tooltip=tip
        )
        donor = self.io.Combo.Input(
            f"{prefix}donor_device",
            options=self.labels,
            default="cpu",
            optional=optional,
            tooltip="The device that holds these weights.",
        )
        return [size, donor]

    def expert(self, prefix: str = "") -> Any:
        tip = EXPERT_TIP.replace("Mode 'expert': amounts", "Instead of virtual VRAM: amounts")
        return self.io.String.Input(f"{prefix}expert_mode_allocations", default="", optional=True, tooltip=tip)

    def switch(self, name: str, default: bool, tip: str) -> Any:
        return self.io.Boolean.Input(name, default=default, optional=True, tooltip=tip)


def loader_nodes(runtime: Runtime) -> list[type[Any]]:
    """Two nodes for each loader of the table that the host has."""
    from ..host.loaders import is_there
    from ..host.node_api import io

    here = [loader for loader in table.LOADERS if is_there(loader.target)]
    return [make(io, loader, runtime) for loader in here for make in (_plain, _spread)]


def loader_node(
    io: Any, node_id: str, schema: Callable[[], dict[str, Any]], load: Load, keeps: bool = False
) -> type[Any]:
    """A V3 node class. `schema` gives what differs between nodes; it is called each time, because the files change."""

    class Loader(io.ComfyNode):
        KEEPS_LOADED = keeps

        @classmethod
        def define_schema(cls) -> Any:
            return io.Schema(node_id=node_id, is_deprecated=True, **schema())

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
            keep_loaded: Any = None,
        ) -> bool | str:
            """Accepts devices that this machine does not have; running the node then fails and lists those it has."""
            return keep_problem(keep_loaded)

        @classmethod
        def execute(cls, **given: Any) -> Any:
            values = {**defaults(cls.define_schema().inputs), **given}
            if not keeps:
                return io.NodeOutput(*with_bar(values, load))
            keep = read_keep(values.pop("keep_loaded"))
            return io.NodeOutput(*kept(once(node_id, values, load), keep))

    Loader.__name__ = Loader.__qualname__ = node_id
    return Loader


def defaults(inputs: list[Any]) -> dict[str, Any]:
    """The values of optional widgets that a workflow leaves out."""
    return {
        given.id: given.default for given in inputs if given.optional and getattr(given, "default", None) is not None
    }


def kept(components: tuple[Any, ...], keep: str) -> tuple[Any, ...]:
    """The components, with `keep` set for the model in each.

    Raises InputError if `keep` is not default and a component has no patcher.
    """
    from ..host.components import has_patcher

    for component in components:
        if keep != DEFAULT or has_patcher(component):
            set_keep_loaded(component, keep)
    return components


def once(node_id: str, values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` returns for the values, or what it returned for them before, if that still exists.

    So a changed `keep_loaded`, which is not among the values, does not load the model again.
    """
    if not all(isinstance(value, (str, int, float, bool)) for value in values.values()):
        return with_bar(values, load)  # for an input that is a model, only the host's cache knows whether it changed
    return load_once(node_id, values, lambda: with_bar(values, load))


def with_bar(values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` returns for the values. The node's progress bar shows how much of the files they name is read."""
    from ..host.file_stamps import files_named
    from ..host.reading import reading

    with reading(files_named(values)):
        return load(values)


def loader_schema(
    target: str, title: str, category: str, description: str, widgets: Callable[[], list[Any]]
) -> Callable[[], dict[str, Any]]:
    """The `schema` argument of `loader_node`: the inputs of the host's node, then ours; the host node's outputs."""

    def schema() -> dict[str, Any]:
        from ..host.loaders import inputs_of, outputs_of

        return {
            "display_name": title,
            "category": category,
            "description": description,
            "inputs": [*inputs_of(target, without=table.DEVICE), *widgets()],
            "outputs": outputs_of(target),
        }

    return schema


def _plain(io: Any, loader: table.Loader, runtime: Runtime) -> type[Any]:
    from ..host.loaders import call

    def widgets() -> list[Any]:
        return [Widgets(io, runtime.inventory.labels()).device(table.DEVICE, "the model")]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, table.DEVICE)
        return runtime.placer.loaded_on(ours[table.DEVICE], lambda on: call(loader.target, own, on))

    title, about = f"{loader.title} (MultiGPU)", f"{loader.title}, on a device of your choice."
    schema = loader_schema(loader.target, title, CATEGORY, about, widgets)
    return loader_node(io, f"{loader.target}MultiGPU", schema, load)


def _spread(io: Any, loader: table.Loader, runtime: Runtime) -> type[Any]:
    from ..host.loaders import call, outputs_of

    def widgets() -> list[Any]:
        make = Widgets(io, runtime.inventory.labels())
        switch = make.switch("eject_models", loader.eject, EJECT_TIP)
        return [make.device(loader.spread, "the model"), *make.virtual(), make.expert(), switch, keep_widget(io)]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, loader.spread, *SPREAD, "eject_models")
        choice = read_choice(ours, runtime.placer.known(ours[loader.spread]))
        if ours["eject_models"]:
            runtime.placer.eject_others(choice.compute)
        alone = len(outputs_of(loader.target)) == 1
        return runtime.placer.loaded_and_placed(choice, lambda on: call(loader.target, own, on), alone=alone)

    title, about = f"{loader.title} (DisTorch2)", f"{loader.title}, with its weights spread over devices."
    schema = loader_schema(loader.target, title, SPREAD_CATEGORY, about, widgets)
    return loader_node(io, f"{loader.target}DisTorch2MultiGPU", schema, load, keeps=True)


def split(values: dict[str, Any], *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of our widgets, and those of the host's node."""
    return {name: values[name] for name in names}, {n: v for n, v in values.items() if n not in names}


def read_choice(values: dict[str, Any], device: str, prefix: str = "") -> Choice:
    """The choice that the three widgets in `SPREAD` mean."""
    return Choice(device, request_from_widgets(*(values[prefix + name] for name in SPREAD)))
