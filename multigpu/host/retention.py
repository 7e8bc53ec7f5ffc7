"""Who is pinned and who is flagged, and what is held because of it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from comfy_execution.utils import get_executing_context

from ..errors import InputError
from ..lifecycle.ledger import Ledger, Ports
from ..lifecycle.policy import FLAG, Said, Standing, flag_for, heed, spoke_before
from .components import part_of
from .file_stamps import stamps_of
from .memory_view import standing

log = logging.getLogger("multigpu")


def patcher_of(value: Any) -> Any:
    """The patcher inside a component, None if it has none."""
    try:
        return part_of(value).patcher
    except InputError:
        return None


def is_root(patcher: Any) -> bool:
    """Whether a patcher came from a loader: it is no clone of another patcher of its model."""
    return patcher.parent is None or patcher.parent.model is not patcher.model


def base_of(patcher: Any) -> Any:
    """The patcher to hold so that `patcher`'s model stays as it is placed, without what a prompt put on top."""
    while not is_root(patcher) and type(patcher.parent) is type(patcher):
        patcher = patcher.parent
    return patcher


class Retention:
    """The flags, the records and the anchors of one process."""

    def __init__(self) -> None:
        ports = Ports(
            patcher_of=patcher_of,
            model_of=lambda patcher: patcher.model,
            is_root=is_root,
            is_clean=lambda patcher: not patcher.patches,
        )
        self.ledger = Ledger(ports)
        self._said: weakref.WeakKeyDictionary[Any, Said] = weakref.WeakKeyDictionary()

    def set_standing(self, component: Any, wanted: Standing) -> None:
        """Flag, pin or let go of the model inside a component. Raises InputError when there is none in it.

        All clones of a model share this; see `heed` for what happens when nodes disagree.
        """
        patcher = part_of(component).patcher
        model = patcher.model
        holds = self._heed(model, wanted)
        _set_flag(model, holds)
        self._let_go_of_predecessors(patcher, holds)
        if holds is Standing.PINNED:
            self.ledger.anchor(patcher, "keep_loaded", pinned=True)
            self.settle()
        elif self.ledger.release(model):
            log.info("[MultiGPU] %s is no longer kept", type(model).__name__)

    def _heed(self, model: Any, wanted: Standing) -> Standing:
        before = self._said.get(model)
        if before is None or before.standing is not standing(model):  # someone set the attribute
            before = Said(standing(model))
        self._said[model] = heed(before, _said_now(wanted))
        holds = self._said[model].standing
        if holds is not wanted and wanted is not Standing.UNMANAGED:
            log.info("[MultiGPU] %s stays: another node of this workflow keeps it", type(model).__name__)
        return holds

    def anchor(self, patcher: Any, reason: str) -> None:
        """Hold a patcher: until the user lets go if its model is pinned, otherwise for one cycle."""
        if self.ledger.anchored(patcher.model):
            return
        self.ledger.anchor(patcher, reason, pinned=standing(patcher.model) is Standing.PINNED)
        held = len(self.ledger.retained_models())
        log.info("[MultiGPU] holds %s (%s), %d held", type(patcher.model).__name__, reason, held)

    def clear(self, reason: str) -> int:
        """Let go of everything; how many models were held."""
        count = self.ledger.clear()
        if count:
            log.info("[MultiGPU] let go of %d models (%s)", count, reason)
        return count

    def pinned(self) -> list[Any]:
        """The living models that the user pinned, as far as we saw them."""
        return [model for model in self.ledger.known_models() if standing(model) is Standing.PINNED]

    def reconcile(self) -> None:
        """Let go of models that were pinned and are not any more: others may change the attribute."""
        for anchor in self.ledger.anchors():
            if anchor.pinned and standing(anchor.patcher.model) is not Standing.PINNED:
                self.ledger.release(anchor.patcher.model)

    def settle(self, for_this_cycle: Sequence[Any] = ()) -> None:
        """Hold what is pinned, and the given models."""
        self.reconcile()
        self.ledger.settle([*self.pinned(), *for_this_cycle])

    def load_once(self, key: str, load: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
        """What `load` returns, or what it returned before for `key` while that lives and its files are the same."""
        found = self.ledger.hand_back(key)
        if found is not None:
            return tuple(slot[0] for slot in found)
        loaded = tuple(load())
        self.ledger.remember(key, [[value] for value in loaded], self.stamps(loaded, {}))
        return loaded

    def remember(self, key: str, outputs: Sequence[Sequence[Any]], inputs: dict[str, Any]) -> None:
        """Record the outputs of a node that made models and nothing else; `inputs` are those of the node."""
        values = [value for slot in outputs for value in slot]
        if self.ledger.remember(key, outputs, self.stamps(values, inputs)):
            self.settle()

    def stamps(self, values: Sequence[Any], inputs: dict[str, Any]) -> frozenset[Any]:
        patchers = [patcher for patcher in map(patcher_of, values) if patcher is not None]
        return stamps_of(patchers, inputs)

    def _let_go_of_predecessors(self, patcher: Any, holds: Standing) -> None:
        """Of older copies of the same model: there are never to be two that one node keeps.

        Those that this node kept in an earlier prompt, and, if the new copy is pinned, those that no node can hand
        back. The host may have dropped and repeated a loader that ran before any node of ours was there.
        """
        now = _said_now(holds)
        for anchor in self.ledger.anchors():
            old = anchor.patcher.model
            if old is patcher.model or not _same_source(anchor.patcher, patcher):
                continue
            before = self._said.get(old)
            again = before is not None and spoke_before(before, now)
            if again or (holds is Standing.PINNED and not self.ledger.recorded(old)):
                _set_flag(old, Standing.UNMANAGED)
                self.ledger.release(old)
                log.info("[MultiGPU] an older copy of %s is no longer kept", type(old).__name__)


def _said_now(wanted: Standing) -> Said:
    context = get_executing_context()
    return Said(wanted) if context is None else Said(wanted, context.node_id, context.prompt_id)


def _set_flag(model: Any, holds: Standing) -> None:
    flag = flag_for(holds)
    if flag is not None:
        setattr(model, FLAG, flag)
    elif hasattr(model, FLAG):
        delattr(model, FLAG)


def _same_source(one: Any, other: Any) -> bool:
    """Whether two patchers were loaded alike; where the loader did not say how, alike in class and size is enough.

    Classes by name: the host makes those of some text encoders anew with each load.
    """
    if type(one.model).__qualname__ != type(other.model).__qualname__:
        return False
    if one.cached_patcher_init is None and other.cached_patcher_init is None:
        return bool(one.model_size() == other.model_size())
    return bool(one.cached_patcher_init == other.cached_patcher_init)
