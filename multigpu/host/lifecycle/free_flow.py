"""What happens when memory is freed: our replacements of two functions of the host, and when they act.

A free is four steps on the host's prompt worker: `unload_all_models`, the executor's reset (if asked for), a garbage
collection, `soft_empty_cache`. We replace the first and the last, and see the collection through `gc.callbacks`.
`FreeCycle` knows which step comes next.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import comfy.cli_args
from comfy import model_management
from server import PromptServer

from ...devices.caches import all_reserved, clear_caches, log_given_back, trim_heap
from ...errors import HostIncompatible
from ...lifecycle.free_cycle import FreeCycle
from ...lifecycle.policy import UNLOADED, Decision, Standing, decide
from ...lifecycle.pressure import Pressure, Release
from ...plan import DeviceId
from ...telemetry.frees import Fate, Freed, FreeHistory
from ...telemetry.recorder import Recorder
from ...telemetry.snapshot import Snapshot
from ..device_memory import ram_used
from ..loaded_models import entries, standing, unload_all_but
from ..model_files import names_of
from ..replacements import Replacement
from .cache_provider import HandBack
from .retention import THIS_CYCLE, Retention, base_of, given_patcher

log = logging.getLogger("multigpu")

USUAL_LIMIT = 85
"""Percent of RAM in use."""

FOR_ONE_MORE_PROMPT = "not set to eject: until the next prompt is over"
"""Why a model stays that nothing was chosen for."""
IN_RAM = "set to keep, in RAM"
"""Why a model stays that is not loaded, but held: another one needed its device."""

Noted = tuple["weakref.ref[Any]", str, int]
"""A model that must be there at the end: itself, its class, its id."""


class FreeFlow:
    """The free flow of one process. Nothing of the host is replaced before `activate`."""

    def __init__(
        self,
        accelerators: Callable[[], Sequence[DeviceId]],
        ram_limit: int | None,
        tidy: Callable[[], None],
        learn: Callable[[], None],
        recorder: Recorder,
        lock: threading.RLock,
    ) -> None:
        """`tidy` frees what placed models that no longer exist have left on devices, and `learn` takes in what a prompt
        has shown of placed models. Both are called on the prompt worker.

        Other threads that hold models, if only for a moment, do so under the `lock`. It is held while models are
        unloaded, because the host's code for that fails if a model ceases to exist meanwhile on another thread.
        """
        self._accelerators = accelerators
        self._pressure = pressure(ram_limit)
        self.tidy = tidy
        self._learn = learn
        self._recorder = recorder
        self._lock = lock
        self.retention = Retention(lock)
        self.hand_back = HandBack(self)
        self._unload = Replacement(
            model_management, "unload_all_models", (), "pinned models stay, flagged ones leave", self._unload_all
        )
        self._soft = Replacement(
            model_management, "soft_empty_cache", ("force",), "the end of a free", self._soft_empty_cache
        )
        self.frees = FreeHistory()
        self._free_memory = False
        """Whether the next free was asked to drop the executor's cached outputs."""
        self._on = self._refused = False
        self._shown = self._noting = False
        """Whether a user has opened the panel; and whether only the host's own code frees now, and it is noted."""
        self._placed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models that our nodes have placed or loaded for a chosen device."""
        self._ejecting: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models that their user has ejected outside of any workflow, until they have left."""
        self._cycle: FreeCycle[Noted] = FreeCycle()
        self._reserved: dict[DeviceId, int | None] = {}
        """What the allocators of the devices held when the last free began."""

    # -- on and off -------------------------------------------------------------------------------------------

    def activate(self) -> bool:
        """Replace the host's two functions, once. Returns whether that worked.

        If another pack has replaced one of them, nothing is changed, and a log line says that keep and eject are off.
        """
        with self._lock:  # the panel may be the first to ask, on a thread of its own
            if self._refused:
                return False
            try:
                for replacement in (self._unload, self._soft):
                    replacement.install()
            except HostIncompatible as problem:
                self._refused = True
                self.deactivate()
                log.warning("[MultiGPU] keep and eject are off, and only ComfyUI's own code frees memory: %s", problem)
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
        for replacement in (self._soft, self._unload):
            replacement.remove()
        self.hand_back.unregister()
        self._stop_waiting()
        self.retention.clear("switched off")

    # -- the host's unload_all_models -------------------------------------------------------------------------

    def _unload_all(self) -> None:
        with self._lock:
            self._unload_all_models()

    def _unload_all_models(self) -> None:
        self.tidy()
        during_prompt = prompt_runs()  # then nobody has asked for this: what was asked for waits for its end
        free_memory = self._free_memory and not during_prompt
        self._free_memory = self._free_memory and during_prompt
        loaded = entries()
        out_of_memory = model_management.is_oom(sys.exc_info()[1])
        decision = decide([(entry, standing(entry.model.model)) for entry in loaded], out_of_memory=out_of_memory)
        freed = _freed(decision, [] if out_of_memory else self._kept_in_ram(loaded), free_memory)
        if not self._at_stake(loaded):
            self._noting = self._shown and bool(loaded)
            if self._noting:
                self.frees.begin(self._look("pre-unload"), freed)
            self._unload.original()
            return
        kept = [_noted(entry.model.model) for entry in (*decision.stay, *decision.anchor)]
        name = self._cycle.begin()
        self._reserved = self.reserved()
        self.frees.begin(self._recorder.take(name, "pre-unload"), freed)
        try:
            if out_of_memory or (decision.whole and not self.retention.pinned()):
                self.retention.clear("out of memory" if out_of_memory else "nothing is flagged or pinned")
                if not out_of_memory:  # then only this machine lacks memory
                    _unload_there(loaded)
                self._unload.original()
                self._unload_all_but([])
            else:
                self._retain(decision)
                self._unload_all_but([*decision.stay, *decision.anchor])
            if not during_prompt:
                self.retention.let_go()
                for model in [*self._ejecting]:
                    self.retention.has_left(model)
                self._ejecting.clear()
        finally:
            self._stop_waiting()
        log.info("[MultiGPU] %s: %s", name, freed.words())
        self.frees.note(self._recorder.take(name, "post-unload"))
        if not out_of_memory and not during_prompt:
            self._cycle.unloaded(threading.get_ident(), kept)
            gc.callbacks.append(self._collection)

    def _at_stake(self, loaded: Sequence[Any]) -> bool:
        """Whether a pinned, flagged or placed model is loaded, one is held, a choice was made since the last free, or a
        placed model was loaded since the last one that ran to its end.

        If not, only the host's own functions run.
        """
        chosen = any(standing(entry.model.model) is not Standing.DEFAULT for entry in loaded)
        return chosen or self._placed_among(loaded) or self._cycle.chosen or self._cycle.placed or self.held() > 0

    def _kept_in_ram(self, loaded: Sequence[Any]) -> list[Any]:
        """Patchers of pinned models that are held and not loaded."""
        there = {id(entry.model.model) for entry in loaded}
        return [
            its for its in self.held_patchers() if standing(its.model) is Standing.KEEP and id(its.model) not in there
        ]

    def _placed_among(self, loaded: Iterable[Any]) -> bool:
        return any(entry.model.model in self._placed for entry in loaded)

    def _look(self, tag: str) -> Snapshot:
        """A snapshot for the panel, during a free that only the host's own functions carry out."""
        return self._recorder.take("ComfyUI's free", tag, level=logging.DEBUG)

    def _retain(self, decision: Decision[Any]) -> None:
        self.retention.reconcile()
        self.retention.end_cycle(unless=[entry.model.model for entry in decision.anchor])
        for entry in decision.stay:
            self.retention.anchor(base_of(entry.model), "keep_loaded")
        for entry in decision.anchor:
            self.retention.anchor(base_of(entry.model), THIS_CYCLE)
        self.retention.settle()

    def _unload_all_but(self, keep: list[Any]) -> None:
        _unload_there([entry for entry in entries() if entry not in keep])
        unload_all_but(keep)
        model_management.reset_cast_buffers()

    # -- the end of a free ------------------------------------------------------------------------------------

    def _stop_waiting(self) -> None:
        self._cycle.stop()
        if self._collection in gc.callbacks:
            gc.callbacks.remove(self._collection)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python's garbage collector. The worker collects after the reset and before `soft_empty_cache`."""
        if phase == "start" and self._cycle.collects(threading.get_ident(), info["generation"]):
            gc.callbacks.remove(self._collection)
            self._recorder.take(self._cycle.name, "post-reset")

    def _soft_empty_cache(self, force: bool = False) -> None:
        """The host's function is enough: torch empties the caches of all devices of a kind, also those of plug-ins."""
        self._soft.original(force)
        cycle = self._cycle
        if self._noting:
            self._noting = False
            self.frees.note(self._look("post-gc"))
        elif cycle.ends(threading.get_ident()):
            name, kept = cycle.name, cycle.kept
            self._stop_waiting()
            trim_heap()
            log_given_back(name, self._reserved)
            cycle.placed = self._placed_among(entries())
            self.frees.note(self._recorder.take(name, "post-gc"))
            _check(name, kept)
            self._relieve()

    # -- prompts ----------------------------------------------------------------------------------------------

    def prompt_started(self, prompt_id: str) -> None:
        self._stop_waiting()
        self.tidy()
        self.retention.release_cycle("it cannot be handed back", unless_recorded=True)
        prompt = self.retention.prompt_started(prompt_id)
        if self._on and self.retention.take_words(prompt):
            self._cycle.chosen = True

    def prompt_ended(self) -> None:
        """Runs on the prompt worker just before it looks at the flags of the queue. No step is skipped if one fails."""
        self._cycle.placed = self._cycle.placed or self._placed_among(entries())  # one may have been handed back
        with ExitStack() as steps:  # which runs them from the last one to the first
            steps.callback(self._watch_pressure)
            steps.callback(self.retention.prompt_ended)
            steps.callback(self.retention.release_cycle, "the next prompt is over", unless_recorded=False)
            steps.callback(self._learn)
            steps.callback(self.tidy)

    def _watch_pressure(self) -> None:
        if self._pressure is not None and self._pressure.next_release(ram_used()) is not None:
            self.ask_for_all("RAM is short")

    def _relieve(self) -> None:
        """After a free, if RAM is still short: drop models that are held, pinned ones last."""
        while self._pressure is not None and (release := self._pressure.next_release(ram_used())) is not None:
            if release is Release.RETAINED:
                self.retention.release_cycle("RAM is short", unless_recorded=False)
                self.retention.settle()
            elif release is Release.PINNED:
                pinned = [its for its in self.held_patchers() if standing(its.model) is Standing.KEEP]
                names = ", ".join(names_of(pinned).values()) or "none"
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
        self.ask(unload_models=True, free_memory=True)
        return True

    def ask(self, *, unload_models: bool, free_memory: bool) -> None:
        """Ask the prompt worker for what `POST /free` with these flags asks for. From any thread."""
        self.asked(free_memory=free_memory)
        for flag, wanted in (("unload_models", unload_models), ("free_memory", free_memory)):
            if wanted:
                PromptServer.instance.prompt_queue.set_flag(flag, True)

    def asked(self, *, free_memory: bool) -> None:
        """Somebody asks for a free, and to drop the executor's cached outputs, if so. The history says it."""
        self._free_memory = self._free_memory or (free_memory and self._on)

    def watch_ram(self, limit: int | None) -> None:
        """Another limit for the RAM in use, in percent; None is the usual one."""
        self._pressure = pressure(limit)

    def placed(self, patcher: Any) -> None:
        """The next free, and every one that finds this model loaded, covers all devices, the CPU and the heap."""
        if self.activate():
            self._placed.add(patcher.model)
            self._cycle.placed = True

    def keep(self, component: Any, wanted: Standing) -> None:
        """Pin, flag or unpin the model in a component. The first one that is pinned or flagged calls `activate`.

        Raises InputError, and changes nothing, for what is no component with a model.
        """
        patcher = given_patcher(component)
        if wanted is Standing.DEFAULT or self.activate():
            self._cycle.chosen = self._on
            self.retention.set_standing(patcher, wanted)

    def expect_choices(self) -> None:
        """A user looks at the models, and may choose something: record from now on what could be handed back, and what
        frees do."""
        self._shown = self.activate()

    def choose(self, patcher: Any, wanted: Standing, *, lingers: bool = False) -> None:
        """Pin, flag or unpin a model as its user says outside of any workflow; see `Retention.choose`. From any thread.

        Raises HostIncompatible where keep and eject are off.
        """
        if not self.activate():
            raise HostIncompatible(
                "keep and eject are off: another pack has replaced functions of ComfyUI; see the log"
            )
        self._cycle.chosen = True
        self.retention.choose(base_of(patcher), wanted, lingers=lingers or prompt_runs())

    def eject(self, patcher: Any) -> bool:
        """Flag a model until it has left, and ask for a free that unloads it. From any thread.

        Returns whether it has to be unloaded. One that is only held for later prompts is dropped at once.
        """
        loaded = any(entry.model.model is patcher.model for entry in entries())
        self.choose(patcher, Standing.EJECT, lingers=loaded)
        if loaded:
            self._ejecting.add(patcher.model)
            self.ask(unload_models=True, free_memory=False)
        else:
            self.retention.release(patcher.model)
            self.retention.has_left(patcher.model)
        return loaded

    def unload_now(self, leave: Callable[[Standing], bool]) -> None:
        """Unload the models for whose standing `leave` is true, also in the middle of a prompt."""
        loaded = entries()
        stay = [entry for entry in loaded if not leave(standing(entry.model.model))]
        if len(stay) < len(loaded):
            self._unload_all_but(stay)

    def reserved(self) -> dict[DeviceId, int | None]:
        """What the allocators of all devices hold."""
        return all_reserved(self._accelerators())

    def clear_caches(self, what: str, before: Mapping[DeviceId, int | None] | None = None) -> dict[DeviceId, int]:
        """Empty the allocator caches of all devices for `what`, with a line for each; the bytes that they gave back.

        That is since they held what `before` says; None: what they hold now.
        """
        before = self.reserved() if before is None else before
        clear_caches(before)
        return log_given_back(what, before)

    def anchor(self, component: Any, reason: str) -> None:
        """Hold the patcher of a model: as long as that is pinned, otherwise until the next prompt is over.

        Raises InputError, and changes nothing, for what is no component with a model.
        """
        patcher = given_patcher(component)
        if self.activate():
            self.retention.anchor(patcher, reason)

    def held(self) -> int:
        """How many models are held."""
        return len(self.retention.ledger.retained_models())

    def held_patchers(self) -> list[Any]:
        """A patcher of each of them."""
        return self.retention.ledger.retained_patchers()

    # -- for the nodes ----------------------------------------------------------------------------------------

    def watch_prompts(self) -> None:
        self.hand_back.watch_prompts()

    def loaded_before(self, key: str) -> tuple[Any, ...] | None:
        return self.retention.loaded_before(key)

    def remember_loaded(self, key: str, values: dict[str, Any], components: Sequence[Any]) -> None:
        self.retention.remember_loaded(key, values, components)


def pressure(limit: int | None) -> Pressure | None:
    """What watches the RAM, at `limit` or 85 percent. None if no limit is given and the host's cache watches it."""
    arguments = comfy.cli_args.args
    watched = not (arguments.cache_classic or arguments.cache_none or arguments.cache_lru > 0)
    return None if limit is None and watched else Pressure((limit or USUAL_LIMIT) / 100)


def prompt_runs() -> bool:
    """Whether the host runs a prompt. False without a server, as in a script that imports the host."""
    server = getattr(PromptServer, "instance", None)
    return server is not None and bool(server.prompt_queue.currently_running)


def _noted(model: Any) -> Noted:
    return weakref.ref(model), type(model).__name__, id(model)


def _freed(decision: Decision[Any], in_ram: Sequence[Any], free_memory: bool) -> Freed:
    """What a free does by this decision; patchers `in_ram` are of pinned models that are not loaded."""
    concerned = (*decision.eject, *decision.delegate, *decision.stay, *decision.anchor)
    names = names_of([*(entry.model for entry in concerned), *in_ram])

    def fates(loaded: Iterable[Any], reason: str) -> list[Fate]:
        return [Fate(names[id(entry.model.model)], reason) for entry in loaded]

    row = "some pinned" if in_ram else decision.row
    left = (*fates(decision.eject, "set to eject"), *fates(decision.delegate, UNLOADED.get(row, "")))
    stays = (*fates(decision.stay, "set to keep"), *fates(decision.anchor, FOR_ONE_MORE_PROMPT))
    waits = (Fate(names[id(patcher.model)], IN_RAM) for patcher in in_ram)
    return Freed(time.time(), free_memory, left, (*stays, *waits))


def _check(name: str, kept: Iterable[Noted]) -> None:
    """Log an error for each model that should have stayed and is gone."""
    there = {id(entry.model.model) for entry in entries()}
    for reference, model, number in kept:
        if reference() is None or number not in there:
            log.error("[MultiGPU] %s: %s (id %d) should have stayed loaded but is gone", name, model, number)


def _unload_there(leaving: Sequence[Any]) -> None:
    """Unload those of the models whose weights are on another machine."""
    for entry in leaving:
        if hasattr(entry.model, "unload_there"):
            entry.model.unload_there()
