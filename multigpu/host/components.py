"""The components of a workflow (model, text encoder, VAE, ControlNet, CLIP vision) and the patcher inside each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher

from ..devices.torch_devices import current_device, device_of
from ..errors import InputError

if TYPE_CHECKING:
    from comfy.clip_vision import ClipVisionModel
    from comfy.controlnet import ControlNet
    from comfy.sd import CLIP, VAE


@dataclass(frozen=True, slots=True)
class Component:
    """A component with its patcher. `rebuilt` makes a copy of the component around another patcher."""

    patcher: ModelPatcher
    rebuilt: Callable[[ModelPatcher], Any]

    @property
    def name(self) -> str:
        """The class of the model, for people."""
        return type(self.patcher.model).__name__


def find_component(value: Any) -> Component | None:
    """The component that a value of a workflow is; None if it has no patcher."""
    for attribute, patcher, rebuilt in _KINDS:
        if hasattr(value, attribute):
            inside: Any = getattr(value, patcher, None)
            return Component(inside, functools.partial(rebuilt, value)) if _is_patcher(inside) else None
    return Component(value, lambda patcher: patcher) if _is_patcher(value) else None


def component_of(value: Any) -> Component:
    """The component that a value of a workflow is. Raises `InputError`, with the reason, if it has no patcher."""
    found = find_component(value)
    if found is None:
        raise InputError(
            f"a {type(value).__name__} cannot be placed: it does not keep its weights in one of ComfyUI's model "
            "patchers, so ComfyUI loads it by other means; connect a component that one of ComfyUI's own loaders made"
        )
    return found


def _is_patcher(thing: Any) -> bool:
    wanted = ("clone", "load_device", "offload_device", "attachments", "model", "_load_list", "is_dynamic")
    return all(hasattr(thing, name) for name in wanted) and isinstance(thing.model, torch.nn.Module)


def _rebuilt_clip(clip: CLIP, patcher: ModelPatcher) -> CLIP:
    new = clip.clone()
    new.patcher = patcher
    new.cond_stage_model = patcher.model
    return new


def _rebuilt_vae(vae: VAE, patcher: ModelPatcher) -> VAE:
    new = copy.copy(vae)
    reloaded = patcher.model is not vae.first_stage_model and patcher.cached_patcher_init is not None
    new.patcher = patcher
    new.first_stage_model = patcher.model
    new.device = patcher.load_device
    if reloaded and new.device != vae.device:
        new.vae_dtype = model_management.vae_dtype(new.device, new.working_dtypes)
    return new


def _rebuilt_vision(vision: ClipVisionModel, patcher: ModelPatcher) -> ClipVisionModel:
    new = copy.copy(vision)
    new.patcher = patcher
    new.model = patcher.model
    new.load_device = patcher.load_device
    return new


def _rebuilt_control(control: ControlNet, patcher: ModelPatcher) -> ControlNet:
    new = control.copy()
    new.load_device = patcher.load_device
    new.control_model_wrapped = patcher
    new.control_model = ElsewhereModel(patcher.model, patcher.load_device)
    return new


class ElsewhereModel:
    """A ControlNet's model that runs on its own device, whatever device the latents are on.

    The host calls it with tensors on the diffusion model's device and expects the result there. All other attributes
    are those of the model.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        back = next((device_of(value) for value in named.values() if isinstance(value, torch.Tensor)), self._device)
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


_KINDS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    ("cond_stage_model", "patcher", _rebuilt_clip),
    ("first_stage_model", "patcher", _rebuilt_vae),
    ("control_model_wrapped", "control_model_wrapped", _rebuilt_control),
    ("encode_image", "patcher", _rebuilt_vision),
)
"""An attribute that only this kind of component has, the one with its patcher, and how it is rebuilt."""
