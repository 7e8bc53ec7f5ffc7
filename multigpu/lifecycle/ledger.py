"""Which node made which models, and what is held so that the next prompt gets them back.

A record is the outputs of one node, by weak references. Once all models in it are to be held for the next prompt, the
record holds them by strong references, and the outputs can be handed back. Models without such a record are held by an
`Anchor` instead. Nothing here knows the host's classes: all questions about its objects go through `Ports`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Stamp = tuple[str, int, int]
"""A file's path, size and time of change in nanoseconds."""


def stamp(path: str) -> Stamp:
    """Identifies one version of a file. A file that does not exist has a stamp that no existing file has."""
    try:
        status = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Ports:
    """What the ledger needs to know of the host's objects."""

    patcher_of: Callable[[Any], Any]
    """The patcher inside a value (a patcher, CLIP, VAE, ...), or None when it holds no model."""
    model_of: Callable[[Any], Any]
    """The inner model of a patcher: what all clones share."""
    is_root: Callable[[Any], bool]
    """Whether a patcher came from a loader rather than from another patcher of the same model."""
    is_clean: Callable[[Any], bool]
    """Whether a patcher has nothing on top of its model, such as a LoRA."""
    is_empty: Callable[[Any], bool]
    """Whether a value without a patcher is a component without a model, as a checkpoint without a VAE has."""


GONE = object()
PLAIN = (type(None), bool, int, float, str)
"""Values that are kept as they are: a checkpoint without a text encoder has None in its place."""


def _reference(value: Any, ports: Ports) -> Callable[[], Any]:
    """A function that returns the value as long as it exists, then GONE."""
    if _is_plain(value, ports):
        return lambda: value
    weak = weakref.ref(value)
    return lambda: GONE if (found := weak()) is None else found


def _is_plain(value: Any, ports: Ports) -> bool:
    """Whether a value takes no memory to speak of, so that it can be kept."""
    return isinstance(value, PLAIN) or ports.is_empty(value)


class Record:
    """The outputs of one node: a list of slots, each a list of values."""

    def __init__(
        self, outputs: Sequence[Sequence[Any]], stamps: frozenset[Stamp], ports: Ports, version: str = ""
    ) -> None:
        self._ports = ports
        self.version = version
        self._slots = [[_reference(value, ports) for value in slot] for slot in outputs]
        self._held: list[list[Any]] | None = None
        self._made = [weakref.ref(ports.model_of(patcher)) for patcher in self.patchers() if ports.is_root(patcher)]
        self.stamps = stamps

    def outputs(self) -> list[list[Any]] | None:
        """The values, or None when one of them is gone."""
        values = [[reference() for reference in slot] for slot in self._slots]
        return None if any(value is GONE for slot in values for value in slot) else values

    def patchers(self) -> list[Any]:
        """The patchers inside the values that still exist."""
        values = (reference() for slot in self._slots for reference in slot)
        found = (self._ports.patcher_of(value) for value in values if value is not GONE)
        return [patcher for patcher in found if patcher is not None]

    def models(self) -> list[Any]:
        return [self._ports.model_of(patcher) for patcher in self.patchers()]

    def made(self) -> list[Any]:
        """The models that this node itself loaded and that still exist, even if its outputs do not."""
        return [model for model in (reference() for reference in self._made) if model is not None]

    def current(self) -> bool:
        """Whether the files are unchanged since they were loaded."""
        return all(stamp(path) == (path, size, time) for path, size, time in self.stamps)

    def hold(self, strongly: bool) -> None:
        self._held = self.outputs() if strongly else None

    @property
    def held(self) -> bool:
        return self._held is not None


@dataclass(frozen=True)
class Anchor:
    """A patcher that is held without a record: as long as its model is pinned, or else until the next prompt begins."""

    patcher: Any
    reason: str
    pinned: bool


class Ledger:
    """The records and anchors of one process. Used by the host's prompt worker and by callers of our API."""

    def __init__(self, ports: Ports, released: Callable[[Any], None] = lambda model: None) -> None:
        """`released` is called with each model that is released: whoever holds it in another way drops it, too."""
        self._ports = ports
        self._released = released
        self.records: dict[str, Record] = {}
        self._anchors: dict[int, Anchor] = {}
        self._seen: weakref.WeakKeyDictionary[Any, set[Stamp]] = weakref.WeakKeyDictionary()
        """All versions of their files that models were recorded with."""

    # -- records ----------------------------------------------------------------------------------------------

    def remember(self, key: str, outputs: Sequence[Sequence[Any]], stamps: Iterable[Stamp], version: str = "") -> bool:
        """Record the outputs of a node, if they are models (or plain values beside models). Replaces an older record.

        `key` says what the node asks for: two nodes with the same key get the same. `version` differs when the node
        would make something else than before, although it asks for the same.
        """
        others = [value for slot in outputs for value in slot if self._ports.patcher_of(value) is None]
        if not all(_is_plain(value, self._ports) for value in others) or len(others) == sum(map(len, outputs)):
            return False
        record = Record(outputs, frozenset(stamps), self._ports, version)
        for model in record.models():
            self._add_older_stamps(record, model)
        self.forget(key, successors=record.models())
        self.records[key] = record
        return True

    def _add_older_stamps(self, record: Record, model: Any) -> None:
        """Add the stamps with which the model was recorded before.

        A node may run after a file has changed, on a model that an earlier node loaded before. Then the record has two
        stamps for the file, and is not handed back.
        """
        seen = self._seen.setdefault(model, set())
        paths = {path for path, *_ in record.stamps}
        record.stamps |= {stamp for stamp in seen if stamp[0] in paths}
        seen |= record.stamps

    def hand_back(self, key: str, version: str = "") -> list[list[Any]] | None:
        """The recorded outputs for the key, if all of them still exist and files and version are unchanged.

        Otherwise the record is forgotten, and the models its node loaded are released: the node is about to load them
        again, and there must never be two copies.
        """
        record = self.records.get(key)
        if record is None:
            return None
        outputs = record.outputs() if record.version == version and record.current() else None
        if outputs is None:
            self.forget(key)
        return outputs

    def forget(self, key: str, successors: Sequence[Any] = ()) -> None:
        """Drop a record and release the models its node loaded, except those that are among `successors`."""
        record = self.records.pop(key, None)
        for model in record.made() if record is not None else ():
            if not any(model is its for its in successors):
                self.release(model)

    def knows(self, key: str) -> bool:
        return key in self.records

    def models(self, key: str) -> list[Any]:
        """The models in the record of the key that still exist."""
        return self.records[key].models() if key in self.records else []

    def made(self, key: str) -> list[Any]:
        """The models that the node of the key loaded itself and that still exist."""
        return self.records[key].made() if key in self.records else []

    def together(self, *models: Any) -> bool:
        """Whether one node has made or passed on all of these models."""
        wanted = {id(model) for model in models}
        return any(wanted <= {id(model) for model in record.models()} for record in self._all())

    def is_whole(self, key: str) -> bool:
        """Whether the record of the key could be handed back now."""
        record = self.records.get(key)
        return record is not None and record.outputs() is not None and record.current()

    def _all(self) -> list[Record]:
        return list(self.records.values())

    # -- anchors ----------------------------------------------------------------------------------------------

    def anchor(self, patcher: Any, reason: str, *, pinned: bool) -> None:
        """Hold a patcher. A model has one anchor; a new one replaces the old one."""
        self._anchors[id(self._ports.model_of(patcher))] = Anchor(patcher, reason, pinned)

    def anchored(self, model: Any) -> bool:
        return id(model) in self._anchors

    def release(self, model: Any) -> bool:
        """Stop holding a model, by its anchor and by every record that has it. Returns whether it had an anchor."""
        for record in self._all():
            if record.held and any(its is model for its in record.models()):
                record.hold(False)
        self._released(model)
        return self._anchors.pop(id(model), None) is not None

    def release_cycle(self, *, unless_recorded: bool) -> list[Any]:
        """Remove the anchors of models that are not pinned. Returns their patchers.

        With `unless_recorded` only those whose model is in no held record, and so could not be handed back.
        """
        recorded = {id(model) for record in self._all() if record.held for model in record.models()}
        over = [
            key
            for key, anchor in self._anchors.items()
            if not anchor.pinned and not (unless_recorded and key in recorded)
        ]
        return [self._anchors.pop(key).patcher for key in over]

    def clear(self) -> int:
        """Stop holding anything. Returns how many models were held."""
        count = len(self.retained_models())
        self._anchors.clear()
        for record in self._all():
            record.hold(False)
        return count

    def anchors(self) -> list[Anchor]:
        return list(self._anchors.values())

    def known_models(self) -> list[Any]:
        """Every existing model that was recorded or is held, once."""
        return self._models(self._all())

    def recorded_models(self) -> list[Any]:
        """Every existing model that a node was seen to make or to pass on; it may be there several times."""
        return [model for record in self._all() for model in (*record.models(), *record.made())]

    def retained_models(self) -> list[Any]:
        """Every model that is held, once."""
        return self._models([record for record in self._all() if record.held])

    def retained_patchers(self) -> list[Any]:
        """A patcher of each of them: the anchored one, or else one that is recorded."""
        return self._patchers([record for record in self._all() if record.held])

    def _models(self, records: list[Record]) -> list[Any]:
        return [self._ports.model_of(patcher) for patcher in self._patchers(records)]

    def _patchers(self, records: list[Record]) -> list[Any]:
        """One for each model."""
        patchers = [patcher for record in records for patcher in record.patchers()]
        patchers += [anchor.patcher for anchor in self.anchors()]
        return list({id(self._ports.model_of(patcher)): patcher for patcher in patchers}.values())

    # -- settling ---------------------------------------------------------------------------------------------

    def settle(self, retained: Collection[Any]) -> None:
        """Hold exactly the records that can be handed back: those whose models are all in `retained`.

        A record also needs patchers that come from a loader, or the anchored one if it has no patches. Other patchers
        carry what a prompt added (a LoRA); their nodes run again.
        """
        wanted = {id(model) for model in retained}
        for key, record in list(self.records.items()):
            if record.outputs() is None and not any(id(model) in wanted for model in record.made()):
                self.records.pop(key, None)
            else:
                record.hold(all(self._counts(patcher, wanted) for patcher in record.patchers()))

    def _counts(self, patcher: Any, wanted: set[int]) -> bool:
        model = id(self._ports.model_of(patcher))
        anchor = self._anchors.get(model)
        chosen = anchor is not None and anchor.patcher is patcher and self._ports.is_clean(patcher)
        return model in wanted and (chosen or self._ports.is_root(patcher))
