"""Which models are pinned or flagged, and which are held in memory because of that."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...errors import InputError
from ...lifecycle.ledger import Ledger, Ports
from ...lifecycle.policy import Standing
from ...lifecycle.prompt import Prompt
from ...lifecycle.words import Words
from ..components import find_component
from ..loaded_models import set_standing, standing
from ..model_files import names_of, stamps_of
from .prompts import KEEP_LOADED, PromptWatch

log = logging.getLogger("multigpu")

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

THIS_CYCLE = "this cycle"
"""Why a model is anchored that a free has left for one more prompt."""


def patcher_of(value: Any) -> Any:
    """The patcher inside a component, None if it has none."""
    found = find_component(value)
    return None if found is None else found.patcher


def given_patcher(component: Any) -> Any:
    """The patcher in what a node or another pack has given. Raises InputError if there is none."""
    patcher = patcher_of(component)
    if patcher is None:
        raise InputError(
            f"a {type(component).__name__} cannot be kept or ejected: it is no MODEL, CLIP, VAE, CONTROL_NET or "
            "CLIP_VISION whose weights are in one of ComfyUI's model patchers; give one that is, or choose default"
        )
    return patcher


def is_root(patcher: Any) -> bool:
    """Whether a patcher came from a loader: it is no clone of another patcher of its model."""
    return patcher.parent is None or patcher.parent.model is not patcher.model


def base_of(patcher: Any) -> Any:
    """The patcher to hold so that `patcher`'s model stays placed, but without patches that a prompt added (a LoRA)."""
    while not is_root(patcher) and type(patcher.parent) is type(patcher):
        patcher = patcher.parent
    return patcher


@dataclass
class Spoken:
    """The choice of a node when it ran, and the patchers it was about."""

    asked_for: str
    """The signature of the node without its choice: a node with the same one asks for the same model."""
    prompt: int
    wanted: Standing
    patchers: list[weakref.ref[Any]]

    def living(self) -> list[Any]:
        return [patcher for reference in self.patchers if (patcher := reference()) is not None]


def _one_at_a_time(
    method: Callable[Concatenate[Retention, _Given], _Result],
) -> Callable[Concatenate[Retention, _Given], _Result]:
    """The method, run under the lock of its object."""

    @functools.wraps(method)
    def locked(self: Retention, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        with self.lock:
            return method(self, *given, **named)

    return locked


class Retention:
    """The choices for models, the flags on models that follow from them, and what is held (records and anchors).

    Nearly all of it happens on the prompt worker. What a user chooses outside of a workflow comes from other threads,
    so whatever changes something takes the lock.
    """

    def __init__(self, lock: threading.RLock) -> None:
        ports = Ports(
            patcher_of=patcher_of,
            model_of=lambda patcher: patcher.model,
            is_root=is_root,
            is_clean=lambda patcher: not patcher.patches,
            is_empty=lambda value: getattr(value, "first_stage_model", value) is None,
        )
        self.lock = lock
        self.ledger = Ledger(ports, self._released)
        self.prompts = PromptWatch()
        self._words: weakref.WeakKeyDictionary[Any, Words] = weakref.WeakKeyDictionary()
        self._spoken: dict[str, Spoken] = {}
        """By the node's signature. A node whose output is cached does not run, so its choice is looked up here."""
        self._until_end: list[Any] = []
        """Models that are held until the running prompt is over: those that its nodes ask for, which the host might
        drop from its cache before a node with a changed choice runs, and those that are no longer kept."""

    # -- words ------------------------------------------------------------------------------------------------

    @_one_at_a_time
    def prompt_started(self, prompt_id: str) -> Prompt:
        """Hold the existing models that our nodes in the prompt ask for, until it is over. Returns the prompt."""
        prompt = self.prompts.start(prompt_id)
        asked_for = {prompt.signature(node_id, without=(KEEP_LOADED,)) for node_id, _ in self.prompts.words(prompt)}
        found = [spoken.living() for spoken in self._spoken.values() if spoken.asked_for in asked_for]
        self._until_end += [patcher.model for patchers in found for patcher in patchers]
        self.settle()
        return prompt

    @_one_at_a_time
    def take_words(self, prompt: Prompt) -> bool:
        """Record the choices of all nodes of the prompt, also of those that will not run because they are cached.

        Returns whether any of them was about a known model.
        """
        said = [
            (patcher, spoken.wanted if wanted is None else wanted, node_id)
            for node_id, wanted in self.prompts.words(prompt)
            if (spoken := self._spoken.get(prompt.signature(node_id))) is not None
            for patcher in spoken.living()
        ]
        for patcher, wanted, node_id in said:
            self._say(patcher, wanted, prompt, node_id)
        return bool(said)

    @_one_at_a_time
    def prompt_ended(self) -> None:
        """Stop holding the models that the prompt no longer keeps."""
        self._spoken = {key: spoken for key, spoken in self._spoken.items() if spoken.living()}
        self.let_go()

    @_one_at_a_time
    def let_go(self) -> None:
        """No prompt runs: stop holding what one might still need."""
        self._until_end.clear()
        self.settle()

    @_one_at_a_time
    def set_standing(self, patcher: Any, wanted: Standing) -> None:
        """Flag, pin or unpin a model. All clones of it share this; see `Words` for what happens when nodes disagree."""
        prompt, node_id = self.prompts.now()
        if prompt is not None:
            self._note(prompt, node_id, patcher, wanted)
        self._say(patcher, wanted, prompt, node_id)

    def _note(self, prompt: Prompt, node_id: str, patcher: Any, wanted: Standing) -> None:
        key, asked_for = prompt.signature(node_id), prompt.signature(node_id, without=(KEEP_LOADED,))
        self._let_go_of_older_copies(asked_for, patcher.model)
        spoken = self._spoken.get(key)
        if spoken is None or spoken.prompt != self.prompts.number:
            spoken = self._spoken[key] = Spoken(asked_for, self.prompts.number, wanted, [])
        elif wanted is not Standing.DEFAULT:  # a node may place its model first, and then choose
            spoken.wanted = wanted
        spoken.patchers.append(weakref.ref(patcher))

    def _say(self, patcher: Any, wanted: Standing, prompt: Prompt | None, node_id: str) -> None:
        model = patcher.model
        words = self._words_about(model)
        before = words.standing
        words.say(wanted, None if prompt is None else prompt.speaker(node_id), self.prompts.number)
        if words.standing is not wanted and wanted is not Standing.DEFAULT:
            log.info("[MultiGPU] %s is kept, not ejected: another node of this prompt says keep", type(model).__name__)
        self._follow(patcher, before, words.standing, lingers=prompt is not None)

    @_one_at_a_time
    def choose(self, patcher: Any, wanted: Standing, *, lingers: bool) -> None:
        """What the user says about a model outside of any workflow counts more than what was said before.

        It stands until a node of a later prompt chooses keep or eject. If the model is no longer kept and `lingers`, it
        is held until the running prompt, or the next free, is over.
        """
        words = self._words_about(patcher.model)
        before = words.standing
        words.say(Standing.DEFAULT)
        words.say(wanted, prompt=self.prompts.number)
        self._follow(patcher, before, wanted, lingers=lingers)

    @_one_at_a_time
    def has_left(self, model: Any) -> None:
        """A model that its user wanted to leave at once: nothing is chosen for it when it comes back."""
        if standing(model) is Standing.EJECT:
            self._words_about(model).say(Standing.DEFAULT)
            set_standing(model, Standing.DEFAULT)

    def _follow(self, patcher: Any, before: Standing, holds: Standing, *, lingers: bool) -> None:
        """Flag a model as its words say from now on, and hold it or let it go."""
        model = patcher.model
        set_standing(model, holds)
        if holds is Standing.KEEP:
            self._until_end = [its for its in self._until_end if its is not model]
            self.ledger.anchor(patcher, "keep_loaded", pinned=True)
            self.settle()
        elif before is Standing.KEEP:
            log.info("[MultiGPU] %s is no longer kept", type(model).__name__)
            self._until_end.append(model)
            if not lingers:
                self.let_go()

    def _words_about(self, model: Any) -> Words:
        words = self._words.setdefault(model, Words())
        if words.standing is not standing(model):  # other code has set the attribute
            words.say(Standing.DEFAULT)
            words.say(standing(model), prompt=self.prompts.number)
        return words

    def _let_go_of_older_copies(self, asked_for: str, model: Any) -> None:
        """Release pinned models that an equal node got in an earlier prompt and that `model` replaces.

        The host runs a loader again when its output is no longer cached and could not be handed back. What one node
        has loaded together, such as the parts of a checkpoint, are no copies of each other.
        """
        earlier = [
            its for its in self._spoken.values() if its.asked_for == asked_for and its.prompt != self.prompts.number
        ]
        older = {id(patcher.model): patcher.model for its in earlier for patcher in its.living()}
        for old in older.values():
            if old is not model and standing(old) is Standing.KEEP and not self.ledger.together(old, model):
                self._words.pop(old, None)
                set_standing(old, Standing.DEFAULT)
                self.ledger.release(old)
                log.info("[MultiGPU] an older copy of %s is no longer kept", type(old).__name__)

    # -- what is held -----------------------------------------------------------------------------------------

    @_one_at_a_time
    def anchor(self, patcher: Any, reason: str) -> None:
        """Hold a patcher: as long as its model is pinned, otherwise until the next prompt is over."""
        if self.ledger.anchored(patcher.model):
            return
        self.ledger.anchor(patcher, reason, pinned=standing(patcher.model) is Standing.KEEP)
        held = len(self.ledger.retained_models())
        log.info("[MultiGPU] %s is held in memory (%s); models held: %d", type(patcher.model).__name__, reason, held)

    @_one_at_a_time
    def clear(self, reason: str) -> int:
        """Stop holding anything. Returns how many models were held."""
        _tell(reason, self.ledger.retained_patchers())
        return self.ledger.clear()

    def pinned(self) -> list[Any]:
        """The existing models that are pinned, among those we have recorded or hold."""
        return [model for model in self.ledger.known_models() if standing(model) is Standing.KEEP]

    @_one_at_a_time
    def reconcile(self) -> None:
        """Release models that are no longer pinned: other code may change the attribute."""
        for anchor in self.ledger.anchors():
            model = anchor.patcher.model
            leaving = any(its is model for its in self._until_end)
            if anchor.pinned and standing(model) is not Standing.KEEP and not leaving:
                self.ledger.release(model)

    @_one_at_a_time
    def release(self, model: Any) -> None:
        """Stop holding a model, whatever it is held for."""
        self.ledger.release(model)

    @_one_at_a_time
    def release_cycle(self, reason: str, *, unless_recorded: bool) -> None:
        """See `Ledger.release_cycle`."""
        _tell(reason, self.ledger.release_cycle(unless_recorded=unless_recorded))

    @_one_at_a_time
    def end_cycle(self, unless: Sequence[Any]) -> None:
        """Stop holding what an earlier free has left for one more prompt, except the given models."""
        for anchor in self.ledger.anchors():
            model = anchor.patcher.model
            if anchor.reason == THIS_CYCLE and not any(model is its for its in unless):
                self.ledger.release(model)

    @_one_at_a_time
    def settle(self) -> None:
        """Hold what is pinned or anchored, and what the running prompt asks for."""
        self.reconcile()
        anchored = [anchor.patcher.model for anchor in self.ledger.anchors()]
        self.ledger.settle([*self.pinned(), *anchored, *self._until_end])

    def _released(self, model: Any) -> None:
        self._until_end = [its for its in self._until_end if its is not model]

    # -- handing back -----------------------------------------------------------------------------------------

    @_one_at_a_time
    def loaded_before(self, key: str) -> tuple[Any, ...] | None:
        """The components that `remember_loaded` got for `key`, if they still exist and their files are unchanged."""
        found = self.ledger.hand_back(key)
        return None if found is None else tuple(slot[0] for slot in found)

    @_one_at_a_time
    def remember_loaded(self, key: str, values: dict[str, Any], components: Sequence[Any]) -> None:
        """Note what was loaded for `key`. `values` are the inputs of the loader, which may name files."""
        stamps = stamps_of(_patchers(components), [values])
        self.ledger.remember(key, [[component] for component in components], stamps)

    def knows(self, node_id: str) -> bool:
        """Whether there is a record for what a node of the running prompt asks for."""
        prompt = self.prompts.running()
        return prompt is not None and self.ledger.knows(prompt.signature(node_id))

    @_one_at_a_time
    def hand_back(self, node_id: str, version: str) -> list[list[Any]] | None:
        """The recorded outputs for what a node of the running prompt asks for, if they are still valid.

        None if a loader upstream has to run again anyway, because other nodes use it too: it would load this model
        again, and there must never be two copies.
        """
        prompt = self.prompts.running()
        if prompt is None:
            return None
        key = prompt.signature(node_id)
        models = self.ledger.models(key)
        upstream = map(prompt.signature, prompt.upstream(node_id))
        loaders = {its for its in upstream if _share(self.ledger.made(its), models)}
        outputs = None if self._runs_again(prompt, node_id, loaders) else self.ledger.hand_back(key, version)
        if outputs is None and not loaders:  # we do not know which node loaded these; it is about to load them again
            for model in models:
                self.ledger.release(model)
        return outputs

    def _runs_again(self, prompt: Prompt, node_id: str, loaders: set[str]) -> bool:
        """Whether one of `loaders` has to run again: other nodes use it too, and not all of its outputs exist."""
        used = {its for each in prompt.used_outside(node_id) for its in map(prompt.signature, prompt.upstream(each))}
        return not all(map(self.ledger.is_whole, loaders & used)) if loaders else bool(used)

    @_one_at_a_time
    def remember(self, node_id: str, version: str, outputs: Sequence[Sequence[Any]]) -> None:
        """Record the outputs of a node of the running prompt, if they are models (or plain values beside models)."""
        prompt = self.prompts.running()
        if prompt is None or node_id not in prompt.nodes:
            return
        patchers = _patchers(value for slot in outputs for value in slot)
        stamps = stamps_of(patchers, prompt.values(node_id))
        if self.ledger.remember(prompt.signature(node_id), outputs, stamps, version):
            self._let_go_of_unrecorded_copies(patchers)
            self.settle()

    def _let_go_of_unrecorded_copies(self, patchers: Iterable[Any]) -> None:
        """Release pinned models that no node was seen to make, if one of these patchers was loaded by the same call.

        Such a model was loaded before anything was recorded, and pinned outside of a workflow. It could not be handed
        back, so there is a new copy now, for which the same is chosen.
        """
        recorded = self.ledger.recorded_models()
        for anchor in self.ledger.anchors():
            old, call = anchor.patcher.model, anchor.patcher.cached_patcher_init
            if not anchor.pinned or call is None or any(its is old for its in recorded):
                continue
            new = next((its for its in patchers if is_root(its) and its.cached_patcher_init == call), None)
            if new is not None:
                log.info("[MultiGPU] %s was loaded again, and is kept instead of the older copy", type(old).__name__)
                self._words[new.model] = self._words_about(old)
                set_standing(old, Standing.DEFAULT)
                self.ledger.release(old)
                self._follow(new, Standing.DEFAULT, Standing.KEEP, lingers=True)


def _tell(reason: str, patchers: Sequence[Any]) -> None:
    """Name the models that are no longer held."""
    if patchers:
        log.info("[MultiGPU] no longer held in memory (%s): %s", reason, ", ".join(names_of(patchers).values()))


def _patchers(values: Iterable[Any]) -> list[Any]:
    return [patcher for patcher in map(patcher_of, values) if patcher is not None]


def _share(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return not {id(model) for model in some}.isdisjoint(id(model) for model in others)
