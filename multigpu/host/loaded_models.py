"""ComfyUI's list of loaded models, and the attribute on a model that says whether it stays. Only used through here."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection
from typing import Any

import torch
from comfy import model_management
from comfy.model_management import LoadedModel
from comfy.model_patcher import ModelPatcher

from ..lifecycle.policy import FLAG, Standing, standing_of

EVERYTHING = 1e30
"""More bytes than any device has: the host itself asks for so many to unload all models."""


def entries(device: torch.device | None = None) -> list[LoadedModel]:
    """The entries of the list whose patcher still exists; with `device` only those that compute on it."""
    living = [entry for entry in [*model_management.current_loaded_models] if entry.model is not None]
    return [entry for entry in living if device is None or entry.device == device]


def take_out(entry: LoadedModel) -> None:
    """Remove an entry from the list. Its model is not unloaded."""
    del model_management.current_loaded_models[_index(entry)]


def hand_over(entry: LoadedModel, patcher: ModelPatcher) -> None:
    """Put an entry for another patcher of the same model in the place of `entry`. Nothing moves."""
    new = LoadedModel(patcher)
    new.real_model, new.model_finalizer = entry.real_model, entry.model_finalizer
    new.currently_used = entry.currently_used
    model_management.current_loaded_models[_index(entry)] = new


def _index(entry: LoadedModel) -> int:
    """By identity: to the host, entries of the same patcher are equal."""
    return next(index for index, other in enumerate(model_management.current_loaded_models) if other is entry)


def take_out_dead(model: torch.nn.Module) -> bool:
    """Remove the entries of a model whose patchers are gone. Returns whether there was one."""
    loaded = [*model_management.current_loaded_models]
    dead = [entry for entry in loaded if entry.model is None and entry.real_model and entry.real_model() is model]
    for entry in dead:
        take_out(entry)
        entry.model_finalizer.detach()
    return bool(dead)


def unload_all_but(keep: Collection[LoadedModel], device: torch.device | None = None) -> None:
    """Unload all models except those of the given entries, from one device or from every one, the CPU included."""
    devices = [entry.device for entry in entries()] if device is None else [device]
    for each in dict.fromkeys(devices):
        model_management.free_memory(EVERYTHING, each, keep_loaded=[*keep])


def standing(model: Any) -> Standing:
    """Whether a model is set to keep, eject or default."""
    return standing_of(getattr(model, FLAG, None))


def set_standing(model: Any, wanted: Standing) -> None:
    if wanted is not Standing.DEFAULT:
        setattr(model, FLAG, wanted is Standing.EJECT)
    elif hasattr(model, FLAG):
        delattr(model, FLAG)


class Uses:
    """When the models in the list were last loaded to be used, as far as somebody has looked."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[Any, Any] | None = None
        self._when: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def look(self) -> None:
        """Take in what was used since the last look. At the first one, nobody knows when that was."""
        first = self._marks is None
        if self._marks is None:
            self._marks = weakref.WeakKeyDictionary()
        for entry in entries():
            model, mark = entry.model.model, entry.model_finalizer  # a new one each time that the host loads it
            if mark is not None and self._marks.get(model) is not mark:
                self._marks[model] = mark
                if not first:
                    self._when[model] = time.time()

    def of(self, model: Any) -> float | None:
        """In seconds since 1970; None if it was not seen to be used."""
        return self._when.get(model)
