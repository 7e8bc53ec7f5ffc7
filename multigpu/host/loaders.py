"""The loader nodes of the host and of other packs: their inputs, their outputs, and calling them.

They are looked up when they are needed, because packs are loaded in no fixed order. They are called, never subclassed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.sd
import folder_paths
import nodes
import torch
from comfy_api.latest import io

from ..errors import HostError

DEVICE = "device"


def host_node(target: str) -> Any:
    """The node class of that id. Raises HostError when no pack provides it."""
    found = nodes.NODE_CLASS_MAPPINGS.get(target)
    if found is None:
        raise HostError(f"the node {target} is not there; install the pack that provides it, or use another loader")
    return found


def is_there(target: str) -> bool:
    return target in nodes.NODE_CLASS_MAPPINGS


def _is_v3(node: Any) -> bool:
    return hasattr(node, "define_schema")


def inputs_of(target: str, *, without: str) -> list[Any]:
    """The inputs of a host node, in its order, for a schema of ours; the one named `without` is left out."""
    node = host_node(target)
    inputs = node.define_schema().inputs if _is_v3(node) else list(_translated(node.INPUT_TYPES()))
    return [given for given in inputs if given.id != without]


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
    return [io.Custom(kind).Output(display_name=kind) for kind in host_node(target).RETURN_TYPES]


def call(target: str, arguments: dict[str, Any], device: torch.device | None) -> tuple[Any, ...]:
    """Run a host node and return what it outputs.

    A node that has a choice of device itself (`default` or `cpu`) is told the same as `device`.
    """
    node = host_node(target)
    if _is_v3(node):
        return tuple(node.execute(**arguments).result)
    if DEVICE in node.INPUT_TYPES().get("optional", {}):
        arguments = {**arguments, DEVICE: "cpu" if device is not None and device.type == "cpu" else "default"}
    return tuple(getattr(node(), node.FUNCTION)(**arguments))


def checkpoint_part(name: str, part: str) -> Any:
    """One part of a checkpoint, `model`, `clip` or `vae`, read alone so that it is loaded for the current device."""
    path = folder_paths.get_full_path_or_raise("checkpoints", name)
    wanted = {"output_model": part == "model", "output_clip": part == "clip", "output_vae": part == "vae"}
    embeddings = folder_paths.get_folder_paths("embeddings")
    loaded = comfy.sd.load_checkpoint_guess_config(path, embedding_directory=embeddings, **wanted)
    return loaded[("model", "clip", "vae").index(part)]
