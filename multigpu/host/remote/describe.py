"""A component as data, so that another machine can make something that looks like it, and making that.

Sent are names of classes, which both machines have, and attributes that are plain values. No weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...errors import InputError, NotSendable, RemoteMismatch
from ...remote.codec import pack
from ..components import find_component
from ..engine.model_states import ATTACHMENT

MOST_BYTES = 2**20
"""Attributes with more bytes than this are weights, or as large as weights; they stay where they are."""
MADE_HERE = ("model_sampling", "latent_format", "extra_conds", "concat_cond", "manual_cast_dtype")
"""What an object patch may replace in a model: it is sent, or used on the worker only. The weights' modules, too."""
DIFFUSION = "diffusion_model"
AFTER = "put the node that sets it behind the place node"


def describe(component: Any, kind: str) -> dict[str, Any]:
    """A CLIP, VAE or MODEL. Raises InputError, with what to do, for one that cannot be used from another machine."""
    found = find_component(component)
    if found is None or kind not in DESCRIBED:
        raise InputError(f"a {type(component).__name__} ({kind}) cannot be used from another machine")
    return {"name": found.name, "kind": kind, **DESCRIBED[kind](component)}


def _clip(clip: Any) -> dict[str, Any]:
    if clip.patcher.forced_hooks is not None or clip.apply_hooks_to_conds is not None:
        raise _refused("CLIP", "hooks")
    return {
        "layer_idx": clip.layer_idx,
        "use_clip_schedule": clip.use_clip_schedule,
        "tokenizer_options": clip.tokenizer_options,
    }


def _vae(vae: Any) -> dict[str, Any]:
    return {
        "attributes": plain(vars(vae)),
        "compression": [
            vae.spacial_compression_decode(), vae.spacial_compression_encode(), vae.temporal_compression_decode()
        ],
        "inner": plain(vars(vae.first_stage_model)),
    }  # fmt: skip


def _model(patcher: Any) -> dict[str, Any]:
    options = {name: value for name, value in patcher.model_options.items() if name != "transformer_options"}
    kept = plain(options)
    patched = [name for name in patcher.object_patches if name.partition(".")[0] not in (*MADE_HERE, DIFFUSION)]
    wrapped = [
        kind
        for kind, by_key in patcher.wrappers.items()
        if kind != DIFFUSION and any(calls for key, calls in by_key.items() if key != ATTACHMENT)
    ]  # our own wrapper of a placed model only saves time
    for what in (*(options.keys() - kept.keys()), *patched, *wrapped):
        raise _refused("MODEL", what)
    model = patcher.model
    sampling = patcher.get_model_object("model_sampling")
    return {
        "class": name_of(type(model)),
        "attributes": {**plain(vars(model)), "manual_cast_dtype": patcher.get_model_object("manual_cast_dtype")},
        "model_type": model.model_type.name,
        "config": _thing(model.model_config),
        "latent": _thing(patcher.get_model_object("latent_format")),
        "sampling": {
            "classes": [name_of(cls) for cls in _lasting(type(sampling))],
            "attributes": plain(vars(sampling)),
            "buffers": dict(sampling.named_buffers()),
        },
        "diffusion": {"attributes": plain(vars(model.diffusion_model)), "name": type(model.diffusion_model).__name__},
        "options": kept,
        "free": int(patcher.get_free_memory(patcher.load_device)),
    }


DESCRIBED = {"clip": _clip, "vae": _vae, "model": _model}
"""The kinds of components that can be used from another machine, and what is told of each."""


def _refused(kind: str, what: str) -> InputError:
    return InputError(f"a {kind} with {what} set cannot be used from another machine; {AFTER}")


def _thing(thing: Any) -> dict[str, Any]:
    return {"class": name_of(type(thing)), "attributes": plain(vars(thing))}


def plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be sent and are small."""
    found = {}
    for name, value in attributes.items():
        if isinstance(name, str) and not name.startswith("_"):
            try:
                if pack(value).size <= MOST_BYTES:
                    found[name] = value
            except NotSendable:
                continue
    return found


def name_of(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def _lasting(cls: type) -> list[type]:
    """A class, or the nearest bases of it that can be found by their names: nodes make classes while they run."""
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
        return [cls]
    own = [name for name in vars(cls) if not name.startswith("__")]
    if own:
        raise InputError(f"{cls.__qualname__} ({', '.join(own)}) cannot be made on another machine; {AFTER}")
    return [found for base in cls.__bases__ if base is not object for found in _lasting(base)]


def class_of(name: Iterable[str], base: type = object) -> Any:
    """The class of that name, if this process has it. Nothing is imported for it. Raises `RemoteMismatch`."""
    module, qualname = name
    found: Any = getattr(sys.modules.get(module), qualname, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise RemoteMismatch(f"{module}.{qualname} is not on this machine; install the pack that provides it here, too")
    return found


def made(cls: type, attributes: Mapping[str, Any]) -> Any:
    """An object of a class with these attributes, made without its `__init__`, which would want weights."""
    new: Any = object.__new__(cls)
    if isinstance(new, torch.nn.Module):
        torch.nn.Module.__init__(new)
    for name, value in attributes.items():
        setattr(new, name, value)
    return new


def made_thing(told: Mapping[str, Any]) -> Any:
    return made(class_of(told["class"]), told["attributes"])


def made_sampling(told: Mapping[str, Any]) -> Any:
    classes = tuple(map(class_of, told["classes"]))
    cls = classes[0] if len(classes) == 1 else type("ModelSampling", classes, {})
    new = made(cls, told["attributes"])
    for name, tensor in told["buffers"].items():
        new.register_buffer(name, tensor)
    return new
