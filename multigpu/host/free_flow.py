"""What happens when memory is freed: our replacements of two functions of the host, and when they act.

A free is four steps on the host's prompt worker: `unload_all_models`, the executor's reset (if asked for), a garbage
collection, `soft_empty_cache`. We replace the first and the last, and see the collection through `gc.callbacks`.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.cli_args
from comfy import model_management
from server import PromptServer

from ..devices.backends import Device
from ..devices.caches import clear_caches, trim_heap
from ..errors import HostIncompatible
from ..lifecycle.policy import Decision, Standing, decide
from ..lifecycle.pressure import Pressure, Release
from ..plan import DeviceId
from ..telemetry.recorder import Recorder
from ..telemetry.snapshot import Snapshot
from .hand_back import HandBack
from .memory_view import entries, look, ram_used, standing
from .patcher import PlacedPatcher
from .patches import Patch
from .retention import THIS_CYCLE, Retention, base_of

log = logging.getLogger("multigpu")

USUAL_LIMIT = 85
"""Percent of RAM in use."""

EVERYTHING = 1e30
"""More bytes than any device has: the host itself asks for so many to unload all models."""


Noted = tuple["weakref.ref[Any]", str, int]
"""A model that must be there at the end: itself, its class, its id."""


@dataclass
class Flow:
    """One free in progress. `kept` are the models that must be there at its end."""

    name: str
    thread: int
    kept: list[Noted]
    collected: bool = False


class FreeFlow:
    """The free flow of one process. Nothing of the host is replaced before `activate`."""

    def __init__(
        self, devices: Callable[[], Sequence[Device]], pressure: Pressure | None, tidy: Callable[[], None]
    ) -> None:
        """`tidy` frees what placed models that no longer exist have left on devices. Called on the prompt worker."""
        self._devices = devices
        self._pressure = pressure
        self._tidy = tidy
        self.retention = Retention()
        self.hand_back = HandBack(self.retention, self._prompt_started, self._prompt_ended, tidy)
        self.recorder = Recorder(self._look, log)
        self._unload = Patch(
            model_management, "unload_all_models", (), "pinned models stay, flagged ones leave", self._unload_all_models
        )
        self._soft = Patch(
            model_management, "soft_empty_cache", ("force",), "the caches of all devices", self._soft_empty_cache
        )
        self._on = self._refused = False
        self._said = False
        self._count = 0
        self._flow: Flow | None = None
        self._busy = False

    # -- on and off -------------------------------------------------------------------------------------------

    def activate(self) -> bool:
        """Replace the host's two functions, once. Returns whether keep and eject are on.

        If another pack has replaced one of them, nothing is changed, and a log line says that keep and eject are off.
        """
        if self._refused:
            return False
        try:
            for patch in (self._unload, self._soft):
                patch.install()
        except HostIncompatible as problem:
            self._refused = True
            self.deactivate()
            log.warning("[MultiGPU] keep and eject are off: %s", problem)
            return False
        if not self._on:
            self._on = True
            self.hand_back.register()
            atexit.register(self.deactivate)
        return True

    def deactivate(self) -> None:
        """Put the host's functions back and hold nothing."""
        self._on = False
        atexit.unregister(self.deactivate)
        for patch in (self._soft, self._unload):
            patch.remove()
        self.hand_back.unregister()
        self._stop_waiting()
        self.retention.clear("switched off")

    # -- the host's unload_all_models -------------------------------------------------------------------------

    def _unload_all_models(self) -> None:
        self._tidy()
        loaded = entries()
        if not self._at_stake(loaded):
            self._unload.original()
            return
        self._said = False
        out_of_memory = sys.exc_info()[0] is not None
        decision = decide([(entry, standing(entry.model.model)) for entry in loaded], out_of_memory=out_of_memory)
        kept = [_noted(entry.model.model) for entry in (*decision.stay, *decision.anchor)]
        words = _words(decision)
        self._count += 1
        name = f"free {self._count}"
        self.recorder.take(name, "pre-unload")
        self._busy = True
        try:
            if out_of_memory or (decision.whole and not self.retention.pinned()):
                self.retention.clear("out of memory" if out_of_memory else "nothing is flagged or pinned")
                self._unload.original()
                self._free([])
            else:
                self._retain(decision)
                self._free([*decision.stay, *decision.anchor])
        finally:
            self._busy = False
        log.info("[MultiGPU] %s: %s", name, words)
        self.recorder.take(name, "post-unload")
        if not out_of_memory and not _prompt_runs():
            self._await_end(name, kept)

    def _at_stake(self, loaded: Sequence[Any]) -> bool:
        """Whether a pinned, flagged or placed model is loaded, one is held, or a choice was made since the last free.

        If not, only the host's own functions run.
        """
        ours = any(
            standing(entry.model.model) is not Standing.UNMANAGED or isinstance(entry.model, PlacedPatcher)
            for entry in loaded
        )
        return ours or self._said or bool(self.retention.ledger.retained_models())

    def _retain(self, decision: Decision[Any]) -> None:
        self.retention.reconcile()
        self.retention.end_cycle(unless=[entry.model.model for entry in decision.anchor])
        for entry in decision.stay:
            self.retention.anchor(base_of(entry.model), "keep_loaded")
        for entry in decision.anchor:
            self.retention.anchor(base_of(entry.model), THIS_CYCLE)
        self.retention.settle()

    def _free(self, keep: list[Any]) -> None:
        """Unload all models except `keep` from every device, the CPU included."""
        for device in dict.fromkeys(entry.device for entry in entries()):
            model_management.free_memory(EVERYTHING, device, keep_loaded=keep)
        model_management.reset_cast_buffers()

    # -- the end of a free ------------------------------------------------------------------------------------

    def _await_end(self, name: str, kept: list[Noted]) -> None:
        self._flow = Flow(name, threading.get_ident(), kept)
        if self._collection not in gc.callbacks:
            gc.callbacks.append(self._collection)

    def _stop_waiting(self) -> None:
        self._flow = None
        if self._collection in gc.callbacks:
            gc.callbacks.remove(self._collection)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python's garbage collector. The worker collects after the reset and before `soft_empty_cache`."""
        flow = self._flow
        if flow is None or phase != "start" or info["generation"] < 2 or flow.thread != threading.get_ident():
            return
        gc.callbacks.remove(self._collection)
        flow.collected = True
        self.recorder.take(flow.name, "post-reset")

    def _soft_empty_cache(self, force: bool = False) -> None:
        self._soft.original(force)
        flow = self._flow
        if self._busy or (flow is None and not self._at_stake(entries())):
            return
        clear_caches(self._accelerators())
        if flow is not None and flow.collected and flow.thread == threading.get_ident():
            self._stop_waiting()
            trim_heap()
            self.recorder.take(flow.name, "post-gc")
            _check(flow)
            self._relieve()

    # -- prompts ----------------------------------------------------------------------------------------------

    def _prompt_started(self, prompt_id: str) -> None:
        self._stop_waiting()
        self._tidy()
        self.retention.ledger.release_cycle(unless_recorded=True)
        prompt = self.retention.prompt_started(prompt_id)
        if self._on and self.retention.take_words(prompt):
            self._said = True

    def _prompt_ended(self) -> None:
        """Runs on the prompt worker just before it looks at the flags of the queue."""
        self._tidy()
        self.retention.ledger.release_cycle(unless_recorded=False)
        self.retention.prompt_ended()
        if self._pressure is not None and self._pressure.look(ram_used()) is not None:
            self.ask_for_all("RAM is short")

    def _relieve(self) -> None:
        """After a free, if RAM is still short: drop models that are held, pinned ones last."""
        while self._pressure is not None and (release := self._pressure.look(ram_used())) is not None:
            if release is Release.RETAINED:
                self.retention.ledger.release_cycle(unless_recorded=False)
                self.retention.settle()
            elif release is Release.PINNED:
                names = ", ".join(type(model).__name__ for model in self.retention.pinned()) or "none"
                log.warning("[MultiGPU] RAM is short: models that were set to keep are dropped (%s)", names)
                self.retention.clear("RAM is short")
            gc.collect()
            trim_heap()

    # -- asked from outside -----------------------------------------------------------------------------------

    def ask_for_all(self, reason: str, *, force: bool = True) -> bool:
        """Ask the prompt worker for what `POST /free` with both flags asks for; it acts between prompts.

        Without `force` only if RAM use is above the limit. Returns whether it was asked for.
        """
        limit = self._pressure.limit if self._pressure is not None else USUAL_LIMIT / 100
        if not force and ram_used() <= limit:
            return False
        log.info("[MultiGPU] asks ComfyUI to unload models and empty its cache (%s)", reason)
        for flag in ("unload_models", "free_memory"):
            PromptServer.instance.prompt_queue.set_flag(flag, True)
        return True

    def keep(self, component: Any, wanted: Standing) -> None:
        """Pin, flag or unpin the model in a component. The first one that is pinned or flagged calls `activate`."""
        if wanted is Standing.UNMANAGED or self.activate():
            self._said = self._on
            self.retention.set_standing(component, wanted)

    def unload_now(self, leave: Callable[[Standing], bool]) -> list[str]:
        """Unload the models for whose standing `leave` is true, also in the middle of a prompt. Returns their names."""
        leaving = [entry for entry in entries() if leave(standing(entry.model.model))]
        names = [type(entry.model.model).__name__ for entry in leaving]
        if leaving:
            self._free([entry for entry in entries() if entry not in leaving])
        return names

    def clear_caches(self) -> dict[DeviceId, int]:
        """Empty the allocator caches of all devices; the bytes each gave back."""
        return clear_caches(self._accelerators())

    def _accelerators(self) -> list[DeviceId]:
        """Empty when the host was told to use the CPU only: asking accelerators for their memory would start them."""
        return [] if model_management.cpu_mode() else [device.id for device in self._devices()]

    def _look(self, identifier: str, tag: str) -> Snapshot:
        devices = [] if model_management.cpu_mode() else self._devices()
        return look(identifier, tag, devices, len(self.retention.ledger.retained_models()))


def pressure(limit: int | None) -> Pressure | None:
    """What watches the RAM, at `limit` or 85 percent. None if no limit is given and the host's cache watches it."""
    arguments = comfy.cli_args.args
    watched = not (arguments.cache_classic or arguments.cache_none or arguments.cache_lru > 0)
    return None if limit is None and watched else Pressure((limit or USUAL_LIMIT) / 100)


def _prompt_runs() -> bool:
    """Whether the host runs a prompt. False without a server, as in a script that imports the host."""
    server = getattr(PromptServer, "instance", None)
    return server is not None and bool(server.prompt_queue.currently_running)


def _noted(model: Any) -> Noted:
    return weakref.ref(model), type(model).__name__, id(model)


def _words(decision: Decision[Any]) -> str:
    def names(models: Iterable[Any]) -> str:
        return ", ".join(type(entry.model.model).__name__ for entry in models)

    parts = [
        f"{what} {named}"
        for what, models in (("stay", decision.stay), ("stay until the next prompt is over", decision.anchor))
        if (named := names(models))
    ]
    gone = len(decision.eject) + len(decision.delegate)
    return "; ".join([f"{decision.row}: {gone} unloaded", *parts])


def _check(flow: Flow) -> None:
    """Log an error for each model that should have stayed and is gone."""
    there = {id(entry.model.model) for entry in entries()}
    for reference, name, number in flow.kept:
        if reference() is None or number not in there:
            log.error("[MultiGPU] %s: %s (id %d) should have stayed loaded but is gone", flow.name, name, number)
