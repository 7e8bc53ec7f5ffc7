"""The state of placed models, shared by all clones of their patchers."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import HostError
from ...plan import Forecast, Plan
from ...plan.replan import unhoisted
from ...stream.hoisting import Hoisting
from ...stream.homes import moved
from ...stream.originals import CarriedOriginal, FileOriginal, Original
from ...stream.residence import RAM, Residence, move
from ..loaded_models import entries, hand_over, take_out
from .blocks import join, modules_of, split
from .file_pages import FilePages, blocks_in_pages
from .measured_steps import MeasuredSteps

ATTACHMENT = "multigpu.placement"
"""The key under which a patcher's `attachments` hold its `Placed`."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What the host's `current_weight_patches_uuid` is while a model is loaded by a plan.

    It equals no patcher's uuid, so that an unplaced patcher of the model restores all weights before it loads them. And
    every load or unload by other code replaces it: as long as it is there, the model is as we left it.
    """

    patches_uuid: Any


@dataclass(slots=True)
class ModelState:
    """The state of one model, shared by all clones of its patcher."""

    backup: dict[str, Any]
    """The host's table of original weights, which all patchers of the model share. It says what is patched."""
    objects: dict[str, Any]
    """The host's table of what object patches have replaced, shared likewise."""
    residence: Residence = field(default_factory=Residence)
    steps: MeasuredSteps = field(default_factory=MeasuredSteps)
    patchers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    modules: weakref.WeakValueDictionary[str, torch.nn.Module] = field(default_factory=weakref.WeakValueDictionary)
    """The model's own modules by block, without what object patches may have put in their place."""
    loaded: Loaded | None = None
    allowed: float = 0.0
    """The bytes on the compute device that the host allowed at the last load."""
    kept_free: float = 0.0
    """The bytes there that the host wanted to be free besides."""
    count: dict[str, int] | None = None
    """Bytes by home, as counted after the last load by a plan; None if the model is not loaded so."""
    used: float | None = None
    """When the host last loaded the model to use it, in seconds since 1970."""
    expected: Forecast | None = None
    """What `forecast` has returned last. Unlike that, any thread may read it."""
    planned: Plan | None = None
    """The plan that the one in force was made of: there may have been less room than it asks for."""
    successor_is_placed: bool = False
    """Whether the patcher that the host is about to load in place of the loaded one is placed, too."""
    pages: FilePages = field(init=False)
    _unhoisted: dict[tuple[Plan, int], Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pages = FilePages(self.modules)

    def adopt(self, patcher: Any) -> None:
        """Count a patcher among those of the model. Tables that a pack gave it are replaced by the model's."""
        self.patchers.add(patcher)
        patcher.backup, patcher.object_patches_backup = self.backup, self.objects

    def misplaced(self) -> str | None:
        """A block whose weights are not at their home; None if all are."""
        return self.residence.misplaced(self.modules)

    def forecast(self) -> Forecast | None:
        """What to expect of a step: as measured, once steps were; None where nothing is streamed, or no one knows."""
        self.steps.learn(self.residence.times)
        plan = self.residence.plan
        self.expected = None if plan is None or not plan.streamed else self.steps.foreseen(plan).forecast
        return self.expected

    def hoistable(self, asked: Plan) -> Plan:
        """The plan without the hoisting that has turned out to be impossible."""
        refused = len(self.residence.unhoistable)
        if refused and (asked, refused) not in self._unhoisted:
            self._unhoisted = {(asked, refused): unhoisted(asked, self.residence.unhoistable)}
        return self._unhoisted.get((asked, refused), asked)

    def holds(self, model: torch.nn.Module) -> bool:
        """Whether the model is loaded by us and no other code has loaded or unloaded it since."""
        return self.loaded is not None and getattr(model, "current_weight_patches_uuid", None) is self.loaded

    def take_back(self, model: torch.nn.Module) -> None:
        """Give the host's entry of a loaded model to a placed patcher, if the host has given it to an unplaced one.

        It does that when the placed patcher that has loaded the model is gone: it goes on with the one that this was
        made from. But that one takes blocks on donors for blocks on the compute device when it frees memory, and it
        cannot restore weights whose file has changed.
        """
        for entry in entries():
            if entry.model.model is model and entry.model not in self.patchers:
                fits = (its for its in self.patchers if its.placed is not None)
                own = next((its for its in fits if its.load_device == self.residence.compute), None)
                if own is None:
                    take_out(entry)
                    next(iter(self.patchers)).detach()
                else:
                    hand_over(entry, own)

    def leave(self) -> dict[str, Original]:
        """Stop streaming, bring donors' bytes to RAM, and take all patches out of the weights.

        Returns the originals that cannot be read because their file has changed: those weights stay patched.
        """
        if self.backup:
            self.residence.changing()
            for block in {split(key)[0] for key in self.backup} & self.in_pages():
                self.rest_block(block)
        self.residence.leave(self.pages.rest)
        self.loaded = self.count = None
        lost: dict[str, Original] = {}
        for key, original in [*self.backup.items()]:
            if isinstance(original, Original):
                try:
                    self.restore(key)
                except HostError:
                    lost[key] = original
        return lost

    def unload(self, model: Any) -> None:
        """Move a model to RAM whose weights stay patched. Its other patchers cannot: they raise an error first."""
        for entry in [entry for entry in entries() if entry.model.model is model]:
            take_out(entry)
        for module in self.modules.values():
            move(module, RAM)
        model.device, model.model_loaded_weight_memory = RAM, 0

    def weight(self, key: str) -> torch.Tensor:
        """The present weight behind a host key."""
        block, name = split(key)
        weight: torch.Tensor = getattr(self.modules[block], name)
        return weight

    def put(self, key: str, weight: torch.Tensor) -> None:
        """Put a weight into the model as it is, on the device that it is on."""
        block, name = split(key)
        module = self.modules[block]
        slots: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        slots[name] = weight

    def carried(self, key: str, attributes: dict[str, Any], patches: Any) -> CarriedOriginal:
        """The entry of a weight that carries its patches, and had these attributes without them."""
        block, name = split(key)
        return CarriedOriginal(weakref.ref(self.modules[block]), name, attributes, patches)

    def rewrite(self, key: str, tensor: torch.Tensor, *, ours: bool = True) -> None:
        block, name = split(key)
        self.pages.written(key)
        with self.pages.moving_with(block):  # the block may get new memory
            self.residence.rewrite(block, self.modules[block], name, tensor, ours=ours)

    def in_pages(self) -> set[str]:
        """The blocks whose weights have the bytes of their pages, patches aside: they can rest there and come again."""
        return self.pages.blocks(self.backup)

    def in_file(self) -> set[str]:
        """Those of them whose home the model file can be."""
        return self.pages.homes(self.backup)

    def rest(self, key: str) -> None:
        """Take all patches out of a weight by letting it rest in its page. Raises HostError if the file has changed."""
        original = self.backup[key]
        with original.reading() as weight:
            self.put(key, moved(self.weight(key), weight))
        del self.backup[key]

    def rest_block(self, block: str) -> None:
        """Let a block that `in_pages` names rest in the pages of its file, without patches. Only after `changing`."""
        for key in [join(block, name) for name in self.modules[block]._parameters]:
            if key in self.backup:
                self.rest(key)
            else:
                self.pages.rest(*split(key))

    def restore(self, key: str) -> None:
        """Take all patches out of a weight. Raises HostError if its original is out of reach."""
        original = self.backup[key]
        if isinstance(original, CarriedOriginal):
            original.restore()
        elif isinstance(original, FileOriginal):
            page = self.pages.of(key, original)
            with original.reading() as weight:
                if page is not None and self.residence.plan is None and not self.residence.is_homed(split(key)[0]):
                    self.put(key, moved(self.weight(key), weight))
                else:
                    self.rewrite(key, weight, ours=False)
                    self.pages.cast(split(key)[0], self.residence.compute)
                    if page is not None:
                        self.pages.copied(key)
        else:
            self.rewrite(key, original.weight)
        del self.backup[key]


class ModelStates:
    """The states of all models that were ever placed and still live."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[torch.nn.Module, ModelState] = weakref.WeakKeyDictionary()
        self._without_model: deque[Residence] = deque()
        self._placed: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        self.classes: dict[type, type] = {}
        """Host patcher class -> the same with placement mixed in."""

    def of(self, patcher: Any) -> ModelState:
        state = self._states.get(patcher.model)
        if state is None:
            backup, objects = patcher.backup, patcher.object_patches_backup
            if any(other.backup is backup for other in self._states.values()):  # a pack's clone has a copy of the model
                backup, objects = {**backup}, {**objects}
            state = self._states[patcher.model] = ModelState(backup, objects)
            weakref.finalize(patcher.model, self._model_is_gone, state.residence).atexit = False
        return state

    def _model_is_gone(self, residence: Residence) -> None:
        """Free the model's memory at once if no device uses it; otherwise leave that to `settle`."""
        if residence.idle:
            residence.close()
        else:
            self._without_model.append(residence)

    def in_file(self, patcher: Any) -> set[str]:
        """The blocks of a patcher's model, placed or not, that can rest in the model file."""
        state = self._states.get(patcher.model)
        return blocks_in_pages(modules_of(patcher)) if state is None else state.in_file()

    def note_placed(self, patcher: Any, how: Any, placed: Any) -> None:
        """`placed` was made of `patcher` as `how` says."""
        self._placed.setdefault(patcher, {})[patcher.patches_uuid, how] = weakref.ref(placed)

    def placed_before(self, patcher: Any, how: Any) -> Any:
        """The placed patcher that was made of this patcher in the same way before, if it still exists."""
        found = self._placed.get(patcher, {}).get((patcher.patches_uuid, how))
        return None if found is None else found()

    def hoisting(self, model: Any) -> Hoisting | None:
        """What hoists the layers of a model, while it is streamed by a plan that says so."""
        state = self._states.get(model)
        return None if state is None else state.residence.hoisting

    def learn(self) -> None:
        """Take in what the steps of the last prompt took. On the prompt worker, when a prompt is over."""
        for state in [*self._states.values()]:
            state.forecast()

    def settle(self) -> None:
        """Free what is no longer used: by models that are gone, by models whose placed patchers are all gone, and by
        models that an unplaced patcher has loaded since.

        Python may destroy objects at any moment and in any thread. So device work is not done then, but here: on the
        prompt worker, before and after prompts, before loading, and when memory is freed.
        """
        while self._without_model:
            self._without_model.popleft().close()
        for model, state in [*self._states.items()]:
            if not state.patchers:
                if state.holds(model) and state.leave():
                    state.unload(model)
                state.residence.forget()
                del self._states[model]
            elif state.loaded is not None and not state.holds(model):
                state.loaded = None
                state.residence.forget()
            elif state.loaded is not None:
                state.take_back(model)


@dataclass(frozen=True, slots=True)
class Placed:
    """The attachment: a plan, and the states it is carried out on.

    With `fills`, streamed blocks stay on the compute device as long as there is room for them.
    """

    plan: Plan
    states: ModelStates
    fills: bool = False

    @property
    def hoists(self) -> bool:
        """Whether the model has layers that can be hoisted."""
        return any(placement.once for placement in self.plan.placements)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        """A deep copy of a patcher has the same plan, and a model with a state of its own."""
        return self
