"""Nodes for those of other packs that are installed, made from `pack_table` when all packs are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..devices.names import DEFAULT_DEVICE
from ..devices.torch_devices import torch_device
from ..host.node_api import io
from ..host.placing.loader_nodes import NodeCall, inputs_of, is_there, mismatch, outputs_of, title_of
from ..host.placing.pack_nodes import PackCall, own_choice, swap_device_of
from . import pack_table as table
from .loader_table import DEVICE_SOCKET, Loader
from .loaders import loader_node, pack_loader_nodes, split
from .widgets import CATEGORY, LoaderWidgets

if TYPE_CHECKING:
    import torch

    from ..plan import DeviceId
    from ..runtime import Runtime

log = logging.getLogger("multigpu")


def pack_nodes(runtime: Runtime) -> list[type[Any]]:
    """Our nodes for each row of the tables whose node is there and as expected.

    One line for each pack that has changed names its nodes for which there are none of ours.
    """
    made, changed = list[type[Any]](), dict[str, list[str]]()
    rows: list[tuple[Any, Callable[[Any, Runtime], list[type[Any]]]]] = [
        *((loader, pack_loader_nodes) for loader in table.PACK_LOADERS),
        *((node, _scoped) for node in table.PACK_NODES),
        (table.BLOCK_SWAP, _block_swap),
    ]
    for row, make in rows:
        if is_there(row.target):
            exact = isinstance(row, Loader) or bool(row.gives)  # of saved links only the number is known
            problem = mismatch(row.target, row.returns, more_allowed=not exact)
            if problem is None:
                made += make(row, runtime)
            else:
                changed.setdefault(row.pack, []).append(problem)
    for pack, problems in changed.items():
        message = "[MultiGPU] %s has changed: %s; there are no MultiGPU nodes for this, use the pack's own"
        log.warning(message, pack, "; ".join(problems))
    return made


def _scoped(row: table.PackNode, runtime: Runtime) -> list[type[Any]]:
    """The pack's node, run on a chosen device."""

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        values.setdefault(row.device, None)  # a socket without a link
        ours, own = split(values, *filter(None, (row.device, row.offload)))
        device = _named(runtime, ours[row.device])
        choice = own_choice(row.target, row.replaces, torch_device(device) if device else None)
        if choice is not None:
            own[row.replaces] = choice
        swapped = ours.get(row.offload) or swap_device_of(own.get("model"))
        call = PackCall(row.target, own, runtime.placer.scope, _torch(_named(runtime, swapped)))
        if device is not None and row.then:
            log.info("[MultiGPU] %s runs on %s. %s", row.target, device, row.limits)
        given = runtime.placer.load(call, device)
        return (*given, ours[row.device] or DEFAULT_DEVICE) if row.gives else given

    return [loader_node(runtime, f"{row.target}MultiGPU", lambda: _schema(row, runtime), load)]


def _block_swap(row: table.PackNode, runtime: Runtime) -> list[type[Any]]:
    """The pack's node for block swap arguments, with a device."""

    def load(values: dict[str, Any]) -> tuple[Any, ...]:
        ours, own = split(values, row.device)
        _named(runtime, ours[row.device])  # raises if there is no such device
        arguments, *others = NodeCall(row.target, own).run(None)
        return {**arguments, **ours}, *others

    return [loader_node(runtime, f"{row.target}MultiGPU", lambda: _schema(row, runtime), load)]


def _schema(row: table.PackNode, runtime: Runtime) -> dict[str, Any]:
    """The inputs of the pack's node, as it is now, with ours between them; its outputs, and ours."""
    make, title = LoaderWidgets(runtime.inventory.labels()), title_of(row.target)
    inputs = inputs_of(row.target, without=row.replaces)
    names = [given.id for given in inputs]
    place = names.index(row.after) + 1 if row.after in names else len(names)
    if row.socket:
        tip = "The device on which this computes: the second output of a loader with (MultiGPU) in its name."
        added = [io.Custom(DEVICE_SOCKET).Input(row.device, optional=row.optional, tooltip=tip)]
    elif row is table.BLOCK_SWAP:
        added = [make.holder(row.device, "The device to which blocks are swapped.")]
    else:
        added = [make.device(row.device, "this", optional=row.optional)]
    if row.offload:
        added.append(make.holder(row.offload, "The device that holds the model while it does not compute."))
    own = [io.Custom(DEVICE_SOCKET).Output(display_name=row.gives)] if row.gives else []
    return {
        "display_name": f"{title} (MultiGPU)",
        "category": f"{CATEGORY}/{row.pack}",
        "is_deprecated": False,
        "description": f"{title} of {row.pack}, on a device of your choice. {row.limits}".rstrip(),
        "inputs": [*inputs[:place], *added, *inputs[place:]],
        "outputs": [*outputs_of(row.target), *own],
    }


def _named(runtime: Runtime, device: str | None) -> DeviceId | None:
    return runtime.resolver.device(device or DEFAULT_DEVICE)


def _torch(device: DeviceId | None) -> torch.device | None:
    return None if device is None else torch_device(device)
