"""The loader nodes of saved workflows: a host loader run on a chosen device, and placed where the node can say so.

One factory and the table in `loader_table`. They do what a host loader with a place node behind it does.
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
EJECT_TIP = "Unload other models from the compute device before this one is loaded. Models that are kept stay."

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
        tip = "Gigabytes of weights that leave the compute device for the donor. 0: nothing leaves."
        size = self.io.Float.Input(
            f"{prefix}virtual_vram_gb", default=default, min=0.0, max=128.0, step=0.1, optional=optional, tooltip=tip
        )
        donor = self.io.Combo.Input(
            f"{prefix}donor_device",
            options=self.labels,
            default="cpu",
            optional=optional,
            tooltip="The device that takes them.",
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
    """A V3 node class. `schema` gives what differs between nodes and is asked anew each time: files come and go."""

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
            """Devices of other machines are let through: running the node says which devices there are."""
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
    """What optional widgets say when a workflow leaves them out."""
    return {
        given.id: given.default for given in inputs if given.optional and getattr(given, "default", None) is not None
    }


def kept(components: tuple[Any, ...], keep: str) -> tuple[Any, ...]:
    """The components, kept or to be ejected as `keep` says. Raises InputError where that cannot be said of one."""
    from ..host.components import has_patcher

    for component in components:
        if keep != DEFAULT or has_patcher(component):
            set_keep_loaded(component, keep)
    return components


def once(node_id: str, values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` makes of the values, or made of them before while that lives: `keep_loaded` alone loads nothing."""
    if not all(isinstance(value, (str, int, float, bool)) for value in values.values()):
        return with_bar(values, load)  # an input that is a model: the host's own cache knows whether it is the same
    return load_once(node_id, values, lambda: with_bar(values, load))


def with_bar(values: dict[str, Any], load: Load) -> tuple[Any, ...]:
    """What `load` makes of the values, with the reading of the files they name shown in the node's progress bar."""
    from ..host.file_stamps import files_named
    from ..host.reading import reading

    with reading(files_named(values)):
        return load(values)


def loader_schema(
    target: str, title: str, category: str, description: str, widgets: Callable[[], list[Any]]
) -> Callable[[], dict[str, Any]]:
    """What `loader_node` asks for: the inputs of the host's node, then ours; the outputs of the host's node."""

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
        return [Widgets(io, runtime.inventory.labels()).device(table.DEVICE, "it")]

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, table.DEVICE)
        return runtime.placer.loaded_on(ours[table.DEVICE], lambda on: call(loader.target, own, on))

    title, about = f"{loader.title} (MultiGPU)", f"{loader.title}, for a device of your choice."
    schema = loader_schema(loader.target, title, CATEGORY, about, widgets)
    return loader_node(io, f"{loader.target}MultiGPU", schema, load)


def _spread(io: Any, loader: table.Loader, runtime: Runtime) -> type[Any]:
    from ..host.loaders import call, outputs_of

    def widgets() -> list[Any]:
        make = Widgets(io, runtime.inventory.labels())
        switch = make.switch("eject_models", loader.eject, EJECT_TIP)
        return [make.device(loader.spread, "it"), *make.virtual(), make.expert(), switch, keep_widget(io)]

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
    """The choice behind the three widgets of saved workflows."""
    return Choice(device, request_from_widgets(*(values[prefix + name] for name in SPREAD)))
