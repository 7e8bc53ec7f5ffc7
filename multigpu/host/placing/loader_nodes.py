"""The nodes of the host and of other packs that ours call: their inputs, their outputs, and calling them.

They are looked up when they are needed, because packs are loaded in no fixed order. They are called, never subclassed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import comfy.sd
import folder_paths
import nodes
import torch
from comfy_api.latest import io

from ...errors import HostError

DEVICE = "device"
CHECKPOINT_PARTS = ("model", "clip", "vae")


def host_node(target: str) -> Any:
    """The node class of that id. Raises HostError when no pack provides it."""
    found = nodes.NODE_CLASS_MAPPINGS.get(target)
    if found is None:
        raise HostError(f"the node {target} is not there; install the pack that provides it, or use another loader")
    return found


def is_there(target: str) -> bool:
    return target in nodes.NODE_CLASS_MAPPINGS


def mismatch(target: str, returns: tuple[str, ...], *, more_allowed: bool = False) -> str | None:
    """What is not as expected of a pack's node that is there, in words; None if it can be used.

    It returns these types, and with `more_allowed` perhaps others after them.
    """
    try:
        found = tuple(host_node(target).RETURN_TYPES)
        inputs_of(target), outputs_of(target)
    except Exception as problem:  # noqa: BLE001  another pack's code may raise anything
        return f"{target} cannot tell its inputs and outputs ({problem!r})"
    same = found[: len(returns)] == returns if more_allowed else found == returns
    return None if same else f"{target} returns {', '.join(found)} instead of {', '.join(returns)}"


def _is_v3(node: Any) -> bool:
    return hasattr(node, "define_schema")


def title_of(target: str) -> str:
    """The name that users see."""
    return str(nodes.NODE_DISPLAY_NAME_MAPPINGS.get(target, target))


def inputs_of(target: str, *, without: str = "") -> list[Any]:
    """The inputs of a node, in its order, for a schema of ours; the one named `without` is left out."""
    return [given for given in _inputs(host_node(target)) if given.id != without]


def _inputs(node: Any) -> list[Any]:
    return list(node.define_schema().inputs if _is_v3(node) else _translated(node.INPUT_TYPES()))


def _translated(input_types: dict[str, Any]) -> Iterator[Any]:
    for section in ("required", "optional"):
        for name, (kind, *rest) in input_types.get(section, {}).items():
            options = dict(rest[0]) if rest else {}
            optional = section == "optional"
            if isinstance(kind, (list, tuple)):
                yield io.Combo.Input(name, options=[*kind], optional=optional, extra_dict=options)
            else:
                yield io.Custom(kind).Input(name, optional=optional, extra_dict=options)


def outputs_of(target: str) -> list[Any]:
    node = host_node(target)
    names = getattr(node, "RETURN_NAMES", None) or node.RETURN_TYPES
    kinds = zip(node.RETURN_TYPES, names, strict=True)
    return [io.Custom(kind).Output(display_name=name) for kind, name in kinds]


def call(node: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a node returns for these inputs."""
    if _is_v3(node):  # as the host calls it: it may read `cls.hidden`, and return a tuple as well as a `NodeOutput`
        return tuple(node.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**arguments).result)
    return tuple(getattr(node(), node.FUNCTION)(**arguments))


class LoaderCall(Protocol):
    """A loader with its inputs, ready to run."""

    @property
    def single(self) -> bool:
        """Whether it returns one component only."""

    def run(self, device: torch.device | None) -> tuple[Any, ...]:
        """The components, loaded for the current device, which is `device`; None is the host's own choice."""


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A loader node of the host or of another pack, with its inputs."""

    target: str
    arguments: Mapping[str, Any]

    @property
    def single(self) -> bool:
        return len(host_node(self.target).RETURN_TYPES) == 1

    def run(self, device: torch.device | None) -> tuple[Any, ...]:
        """A node that has a choice of device itself (`default` or `cpu`) is told the same as `device`."""
        node, arguments = host_node(self.target), dict(self.arguments)
        if DEVICE in (given.id for given in _inputs(node)):
            arguments[DEVICE] = "cpu" if device is not None and device.type == "cpu" else "default"
        return call(node, arguments)


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One part of a checkpoint, `model`, `clip` or `vae`, read alone so that it is loaded for a device of its own."""

    name: str
    part: str

    @property
    def single(self) -> bool:
        return True

    def run(self, device: torch.device | None) -> tuple[Any, ...]:
        path = folder_paths.get_full_path_or_raise("checkpoints", self.name)
        wanted = {f"output_{part}": part == self.part for part in CHECKPOINT_PARTS}
        embeddings = folder_paths.get_folder_paths("embeddings")
        loaded = comfy.sd.load_checkpoint_guess_config(path, embedding_directory=embeddings, **wanted)
        return (loaded[CHECKPOINT_PARTS.index(self.part)],)
