"""The components of a workflow (model, text encoder, VAE, ControlNet, CLIP vision) and the patcher inside each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ..devices.torch_devices import current_device, device_name, device_of
from ..errors import InputError

PATCHER = ("patcher", "control_model_wrapped")
"""Where the host's own components keep their patcher."""
DEVICE = ("device", "load_device")
"""Where they keep the device of their patcher as well."""
MARKS = ("cond_stage_model", "first_stage_model", "get_control", "encode_image")
"""What only components have. In an object with one of these, a patcher is looked for under any name."""


@dataclass(frozen=True, slots=True)
class Component:
    """A component with its patcher. `rebuilt` makes a copy of the component around another patcher.

    It raises InputError, with the reason, if the component cannot be copied so.
    """

    patcher: ModelPatcher
    rebuilt: Callable[[ModelPatcher], Any]

    @property
    def name(self) -> str:
        """The class of the model, for people."""
        return type(self.patcher.model).__name__


def find_component(value: Any) -> Component | None:
    """The component that a value of a workflow is; None if there is not one patcher in it."""
    found = None if isinstance(value, ModelPatcher) else _patchers_in(value)
    if found:
        patcher = [*found.values()][0]
        rebuilt = functools.partial(_rebuilt, value, patcher, patcher.load_device)
        return Component(patcher, rebuilt) if len({*map(id, found.values())}) == 1 else None
    return Component(value, lambda patcher: patcher) if _is_patcher(value) else None


def component_of(value: Any) -> Component:
    """The component that a value of a workflow is. Raises `InputError`, with the reason, if it has no patcher."""
    found = find_component(value)
    if found is None:
        several = ", ".join(_patchers_in(value))
        raise _refused(
            value,
            f"it keeps its weights in several of ComfyUI's model patchers ({several})"
            if several
            else "it does not keep its weights in one of ComfyUI's model patchers, so ComfyUI loads it by other means",
        )
    return found


def _refused(value: Any, why: str, instead: str = "connect a component that another loader made") -> InputError:
    cls = type(value)
    return InputError(f"a {cls.__name__} cannot be placed: {why}; remove the place node, or {instead}")


def _is_patcher(thing: Any) -> bool:
    wanted = ("clone", "load_device", "offload_device", "attachments", "model", "_load_list", "is_dynamic")
    return all(hasattr(thing, name) for name in wanted) and isinstance(thing.model, torch.nn.Module)


def _patchers_in(value: Any) -> dict[str, ModelPatcher]:
    """The patchers in a component by attribute: the one in the usual place, otherwise all that there are."""
    for name in PATCHER:
        usual: Any = getattr(value, name, None)
        if _is_patcher(usual):
            return {name: usual}
    if not _is_patcher(value) and not any(hasattr(value, mark) for mark in MARKS):
        return {}
    return {name: held for name, held in _attributes(value) if isinstance(held, ModelPatcher) and _is_patcher(held)}


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The names of an object's own attributes, and what they hold."""
    slots = (getattr(cls, "__slots__", ()) for cls in type(value).__mro__)
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    names += [*getattr(value, "__dict__", ())]
    if isinstance(value, torch.nn.Module):
        names += value._modules
    return ((name, getattr(value, name)) for name in names if name != "__dict__" and hasattr(value, name))


def _rebuilt(value: Any, old: ModelPatcher, device: torch.device, patcher: ModelPatcher) -> Any:
    """A copy of a component with `patcher`, its model and its device wherever `value` has those of `old`.

    `device` is the one for which `value` was made. Raises InputError if code of the component would still use the old
    model. `value` is not changed.
    """
    if value is old.model:
        raise _refused(value, "it is itself the model in its patcher, and cannot be copied without it")
    new, elsewhere = _copy(value), False
    parts = {id(module): name for name, module in old.model.named_modules()}
    for name, held in _attributes(value):
        if held is old:
            _set(new, name, patcher)
        elif name in DEVICE and isinstance(held, torch.device):
            _set(new, name, patcher.load_device)
        elif isinstance(held, ElsewhereModel) or (held is old.model and hasattr(value, "get_control")):
            _set(new, name, ElsewhereModel(patcher.model, patcher.load_device))
            elsewhere = True
        elif isinstance(held, torch.nn.Module) and patcher.model is not old.model:
            _set(new, name, _counterpart(value, name, held, parts, patcher.model))
    if hasattr(value, "get_control") and not elsewhere and patcher.load_device != device:
        why = f"it calls its model in a way of its own, with inputs on {device_name(device)}"
        raise _refused(value, why, f"choose {device_name(device)} as its compute device")
    if patcher not in _patchers_in(new).values():
        raise _refused(value, "it makes its patcher anew whenever it is asked for it")
    if patcher.model is not old.model and patcher.cached_patcher_init is not None and patcher.load_device != device:
        _use_dtype(new)
    return new


def _copy(value: Any) -> Any:
    """A shallow copy with dicts of its own, made without any code of the component's class."""
    new = object.__new__(type(value))
    for name, held in _attributes(value):
        if not isinstance(value, torch.nn.Module) or name not in value._modules:
            object.__setattr__(new, name, held.copy() if isinstance(held, dict) else held)
    return new


def _set(new: Any, name: str, held: Any) -> None:
    """Set an attribute, of a frozen object too; a module knows by itself where it keeps its submodules."""
    (setattr if isinstance(new, torch.nn.Module) else object.__setattr__)(new, name, held)


def _counterpart(
    value: Any, name: str, held: torch.nn.Module, parts: dict[int, str], model: torch.nn.Module
) -> torch.nn.Module:
    """What `held`, a part of a component's old model, is in its new one; itself if it has nothing of the old one."""
    if id(held) in parts:
        return model.get_submodule(parts[id(held)])
    if any(id(module) in parts for module in held.modules()):
        why = f"its {name} contains the model in its patcher, and cannot be copied to another device or read again"
        raise _refused(value, why, "choose the compute device that it was loaded for")
    return held


def _use_dtype(vae: Any) -> None:
    """A VAE that was read again for another device: it may have another data type there."""
    if hasattr(vae, "vae_dtype") and hasattr(vae, "working_dtypes"):
        vae.vae_dtype = model_management.vae_dtype(vae.device, vae.working_dtypes)


class ElsewhereModel:
    """A ControlNet's model that runs on its own device, whatever device the latents are on.

    The host calls it with tensors on the diffusion model's device and expects the result there. All other attributes
    are those of the model.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = (*named.values(), *arguments)
        back = next((device_of(value) for value in given if isinstance(value, torch.Tensor)), self._device)
        if back == self._device:
            return self._model(*arguments, **named)
        with current_device(self._device):
            result = self._model(*moved(arguments, self._device), **moved(named, self._device))
        return moved(result, back)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the plain model: the host makes a ControlNet for another device by copying its model."""
        return copy.deepcopy(self._model, memo)


def moved(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; lists, tuples and dicts are looked into."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value
