"""Snapshots of memory: what the devices, the loaded models and the models held for later prompts take.

They may be taken on any thread. Nothing moves, nothing is measured, no device is waited for, and none is used that this
process does not use yet; only while models are being unloaded, a snapshot waits until that is done. Bytes of a model
that is loaded by a plan were counted when it was loaded; those of others are counted when the host has moved them.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from ..devices.backends import Device, free_bytes, in_use
from ..devices.caches import cached_bytes
from ..devices.inventory import Inventory
from ..devices.torch_devices import device_id
from ..stream.census import bytes_by_home
from ..telemetry.snapshot import DeviceMemory, LinkSpeed, ModelMemory, Snapshot, with_ours
from .device_memory import accelerators
from .engine.file_pages import in_file
from .engine.model_states import ModelState, Placed
from .loaded_models import Uses, entries, standing
from .model_files import file_of

Held = Callable[[], Sequence[Any]]
"""The patchers that are held for later prompts."""
Elsewhere = Callable[[], Sequence[DeviceMemory]]
"""The devices of other machines, as last told; nobody is asked for it."""


class Snapshots:
    """Takes snapshots, and finds the models in them by their ids."""

    def __init__(self, inventory: Inventory, held: Held, lock: threading.RLock, elsewhere: Elsewhere = tuple) -> None:
        """Whoever has patchers in hands, here or from `find`, holds the `lock`; see `FreeFlow`."""
        self.lock = lock
        self._inventory = inventory
        self._held = held
        self._elsewhere = elsewhere
        self._numbers = itertools.count(1)
        self._ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._files: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
        self.uses = Uses()
        self._counts: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, int]]] = weakref.WeakKeyDictionary()
        """What was counted of a model, and what was true of it then."""

    def take(self, identifier: str = "", tag: str = "") -> Snapshot:
        with self.lock:
            return self._take(identifier, tag)

    def _take(self, identifier: str, tag: str) -> Snapshot:
        held = self._held()
        self.uses.look()
        models = self._models(held)
        return Snapshot(
            identifier=identifier,
            tag=tag,
            time=time.time(),
            process_bytes=psutil.Process().memory_info().rss,
            devices=with_ours((*map(_device, accelerators(self._inventory)), self._ram()), models),
            models=models,
            held=len({id(patcher.model) for patcher in held}),
            links=tuple(
                LinkSpeed(str(home), str(compute), speed) for (home, compute), speed in self._inventory.links().items()
            ),
            elsewhere=with_ours(tuple(self._elsewhere()), models),
        )

    def models(self) -> tuple[ModelMemory, ...]:
        """Those that are loaded, then those that are only held. No device is asked."""
        with self.lock:
            return self._models(self._held())

    def _models(self, held: Sequence[Any]) -> tuple[ModelMemory, ...]:
        return tuple(self._model(patcher, loaded) for patcher, loaded in self._patchers(held))

    def model(self, patcher: Any) -> ModelMemory:
        """One loaded model."""
        with self.lock:
            return self._model(patcher, loaded=True)

    def find(self, model_id: str) -> Any:
        """The patcher of a model in a snapshot by its id; None if there is no such model any more. Under the lock."""
        return next((its for its, _ in self._patchers(self._held()) if self._ids.get(its.model) == model_id), None)

    def _patchers(self, held: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """One patcher of each loaded model, then one of each model that is only held; and whether it is loaded."""
        seen = set()
        listed = ((patcher, True) for entry in entries() if (patcher := entry.model) is not None)
        for patcher, loaded in itertools.chain(listed, ((patcher, False) for patcher in held)):
            if id(patcher.model) not in seen:
                seen.add(id(patcher.model))
                yield patcher, loaded

    def _ram(self) -> DeviceMemory:
        memory, device = psutil.virtual_memory(), self._inventory.devices[-1]
        return DeviceMemory(str(device.id), memory.available, memory.total, name=device.name)

    def _model(self, patcher: Any, loaded: bool) -> ModelMemory:
        model = patcher.model
        told = getattr(patcher, "told_memory", None)
        if told is not None:  # a model of another machine
            memory: ModelMemory = told(self._id(model), standing(model), loaded)
            return memory
        placed = getattr(patcher, "placed", None)
        state = placed.states.of(patcher) if isinstance(placed, Placed) else None
        plan = state.residence.plan if state is not None and state.holds(model) else None
        count = state.count if state is not None and plan is not None else None
        return ModelMemory(
            name=type(model).__name__,
            id=self._id(model),
            device=str(device_id(patcher.load_device)),
            loaded_bytes=int(patcher.loaded_size()),
            standing=standing(model).value,
            resting=self._counted(patcher, state) if count is None else count,
            dynamic=bool(patcher.is_dynamic()),
            file=self._file(patcher),
            loaded=loaded,
            placed=state is not None,
            plan=plan,
            retained=0 if state is None else state.residence.retained_bytes,
            hoisted=0 if state is None else state.residence.hoisted_bytes,
            ring=0 if state is None else state.residence.ring_bytes,
            used=self.uses.of(model) if state is None else state.used,
            forecast=None if state is None or plan is None else state.expected,
        )

    def _id(self, model: Any) -> str:
        if model not in self._ids:
            self._ids[model] = f"m{next(self._numbers)}"
        return self._ids[model]

    def _file(self, patcher: Any) -> str | None:
        if patcher.model not in self._files:
            self._files[patcher.model] = file_of(patcher)
        return self._files[patcher.model]

    def _counted(self, patcher: Any, state: ModelState | None) -> dict[str, int]:
        """Bytes by device, counted anew if the host has loaded or unloaded the model since they were last."""
        model, loaded = patcher.model, int(patcher.loaded_size())
        truth = loaded, str(getattr(model, "device", None)), None if state is None else state.used
        known = self._counts.get(model)
        if known is not None and known[0] == truth:
            return known[1]
        try:
            count = bytes_by_home(model, in_file)
        except RuntimeError:  # another thread has added a tensor to the model meanwhile
            return {} if known is None else known[1]
        count.pop("meta", None)
        if patcher.is_dynamic() and loaded:
            device = str(device_id(patcher.load_device))
            count[device] = max(count.get(device, 0), loaded)
        self._counts[model] = truth, count
        return count


def _device(device: Device) -> DeviceMemory:
    used = in_use(device.id)
    free, cached = free_bytes(device.id) if used else None, cached_bytes(device.id) or 0
    return DeviceMemory(str(device.id), free, device.total or 0, cached, device.name, in_use=used)
