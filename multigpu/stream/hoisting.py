"""Hoisting: layers that see one token are computed ahead for all steps of a run, and not copied in later ones.

    first pass of a run     the inputs for all coming sigmas are captured: the model runs up to the first such layer
                            each layer, when it passes, computes its outputs for all of them
    the passes after it     its weights are not copied: it returns what was kept

Every use of a kept output is checked. The input of the first layer of a pass chooses the outputs; the inputs of all
others are compared with it before the pass ends. If one differs in any bit, the pass runs again, with all weights. So a
wrong guess (samplers that take other sigmas, changed conditions, code that patches blocks) costs time and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ..units import format_bytes

if TYPE_CHECKING:
    from .homes import HomedBlock

log = logging.getLogger("multigpu")

LIMIT = 128 << 20
"""Bytes of the compute device that kept outputs may take."""
PATIENCE = 16
"""After so many passes in a row for which nothing was kept, hoisting is given up for the model."""
ROWS = 16
"""An input of more rows is not that of a layer which sees one token."""
_ALIGNED = 16
_ROUNDS = 4
"""In how many passes per step an output that was kept for one may still come to use."""

_Result = TypeVar("_Result")


class Run(Protocol):
    """One pass of a sampling run, as the host knows it."""

    @property
    def schedule(self) -> torch.Tensor | None:
        """The sigmas of the run: the same object in all of its passes."""

    def sigma(self) -> float | None:
        """That of this pass; None if it has several. May wait for the device."""

    def probe(self, sigma: float) -> None:
        """Run the model with another sigma, as far as it gets. Raises `Reached` at its first hoisted layer."""


class Reached(BaseException):
    """Ends a probe, with the bytes of the input. No `Exception`, so that a model's own code does not catch it."""

    def __init__(self, given: torch.Tensor | None) -> None:
        self.given = given


class _Stale(BaseException):
    """What was kept does not fit this pass."""


@dataclass(slots=True, eq=False)
class _Table:
    """What is kept for one condition, by sigma. `schedule`: the run that it was last looked at for.

    `forms` has the shape and type of each layer's input: not all have the same shape.
    """

    by_sigma: dict[float, _Kept] = field(default_factory=dict)
    forms: dict[int, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    schedule: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """What the hoisted layers give for one input, whose bytes are `given`; expected to be used up to the pass `until`.

    `outputs` has one for each layer, by its block's number.
    """

    given: torch.Tensor
    table: _Table
    until: int = 0
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(output.nbytes for output in self.outputs.values())


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass through the model. It uses what is kept, or makes it, or neither.

    `now` belongs to its own input, `coming` to those of coming passes, by sigma. `equal` says of each layer whether its
    input was that of the first one; still on the device.
    """

    run: Run
    begun: bool = False
    uses: _Kept | None = None
    sigma: float = 0.0
    now: _Kept | None = None
    coming: dict[float, _Kept] = field(default_factory=dict)
    skipping: int | None = None
    ran: set[int] = field(default_factory=set)
    seen: list[torch.Tensor] = field(default_factory=list)
    equal: dict[int, torch.Tensor] = field(default_factory=dict)


class Hoisting:
    """The hoisted blocks of one streamer, by their number there.

    `aside` is entered for probes. `refused` gets the names of blocks that turn out not to be such layers.
    """

    def __init__(
        self,
        blocks: Sequence[HomedBlock],
        numbers: Iterable[int],
        refused: set[str],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.numbers = {*numbers}
        self._blocks, self._refused, self._aside = blocks, refused, aside
        self._tables: list[_Table] = []
        self._stacked: tuple[list[_Kept], torch.Tensor] | None = None
        self._sigmas: tuple[torch.Tensor, list[float]] | None = None
        self._pass: _Pass | None = None
        self._passes = self._in_vain = 0

    @property
    def kept_bytes(self) -> int:
        return sum(kept.size for kept in self._every())

    @property
    def spared_bytes(self) -> int:
        """What need not be copied in a pass for which outputs are kept."""
        return sum(self._blocks[number].size for number in self.numbers)

    def forget(self) -> None:
        """Weights are about to change, or the model stops streaming: nothing that was kept may be used any more."""
        for table in self._tables:
            table.by_sigma.clear()  # which refers to the table
        self._tables.clear()
        self._stacked = self._sigmas = None

    # -- a pass -------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], _Result], run: Run) -> _Result:
        """What `call` returns, which runs the model once."""
        if self._pass is not None or not self.numbers:
            return call()
        self._passes += 1
        if run.schedule is None:
            self._miss()
            return call()
        this = self._pass = _Pass(run)
        try:
            with self._in_their_place():
                result = call()
                self._verify(this)
            self._keep(this)
            return result
        except _Stale:
            log.debug("[MultiGPU] a pass runs again: hoisted layers got other inputs than expected")
            self.forget()
            self._miss()
        finally:
            self._pass = None
        return call()

    @contextmanager
    def _in_their_place(self) -> Iterator[None]:
        """For one pass the layers' forward is ours, except where other code has put one of its own."""
        modules = {number: self._blocks[number].module for number in self.numbers}
        ours = {number: vars(module) for number, module in modules.items() if "forward" not in vars(module)}
        for number, attributes in ours.items():
            attributes["forward"] = partial(self._forward, number, modules[number])
        try:
            yield
        finally:
            for attributes in ours.values():
                attributes.pop("forward", None)

    def skips(self, number: int, given: tuple[Any, ...]) -> bool:
        """A block is about to run, and its module was given this. Whether it needs no weights."""
        this = self._pass
        if this is None or number not in self.numbers or not self._is_ours(number):
            return False
        token = _token(given)
        if token is not None and not this.begun:
            this.begun = True
            self._begin(this, token)
        this.ran.add(number)
        known = token is not None and this.uses is not None and number in this.uses.outputs
        this.skipping = number if known else None
        return known

    def _is_ours(self, number: int) -> bool:
        forward = vars(self._blocks[number].module).get("forward")
        return isinstance(forward, partial) and forward.func == self._forward

    def needed(self, number: int) -> bool:
        """Whether a block that is expected to run soon will need its weights."""
        this = self._pass
        if number not in self.numbers:
            return True
        if this is None or not this.begun:
            return not self._tables
        if this.uses is not None:
            return number not in this.uses.outputs
        return number not in this.ran or not (self._tables or this.coming)

    def reached(self, number: int, given: tuple[Any, ...]) -> None:
        """In a probe a block is about to run. Raises `Reached` if it is one of ours."""
        if number in self.numbers:
            token = _token(given)
            raise Reached(None if token is None else _bytes(token.clone()))

    def _forward(self, number: int, module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        this, compute = self._pass, partial(type(module).forward, module)
        if this is None:
            return compute(*given, **named)
        if this.skipping == number:
            this.skipping = None
            token = _token(given)
            if token is None or named or this.uses is None or this.uses.table.forms[number] != _form(token):
                raise _Stale
            this.seen.append(_bytes(token))
            if len(this.seen) == len(this.uses.outputs):  # there is still work for the device while the host waits
                self._verify(this)
            return this.uses.outputs[number].clone()
        output = compute(*given, **named)
        if this.coming and not named:
            self._make(this, number, _token(given), output, compute)
        return output

    @staticmethod
    def _verify(this: _Pass) -> None:
        """Raises `_Stale` if a layer did not get the input that its output was kept for. Waits for the device."""
        if not this.seen or this.uses is None:
            return
        seen, given = this.seen, this.uses.given
        if any(its.shape != given.shape for its in seen) or not bool((torch.stack(seen) == given).all()):
            raise _Stale
        this.seen = []

    # -- what to do in a pass -----------------------------------------------------------------------------------

    def _begin(self, this: _Pass, token: torch.Tensor) -> None:
        """The first hoisted layer is about to run: use what is kept for its input, or make it for the coming ones."""
        given = _bytes(token)
        kept = self._find(given)
        now, coming = self._missing(this.run, kept)
        if kept is not None and not coming:
            kept.until = self._in_vain = 0
            this.uses = kept
            return
        self._miss()
        count = self._room(token) - 1
        if now is None or not coming or count < 1:
            return
        with self._aside():
            if not _same(self._probed(this.run, now), given):  # then those of the others would not be theirs, either
                return
            probed = {sigma: self._probed(this.run, sigma) for sigma in coming[:count]}
        table = _Table(schedule=this.run.schedule) if kept is None else kept.table
        until = self._passes + _ROUNDS * len(probed)
        this.sigma, this.now = now, kept or _Kept(given.clone(), table)
        alike = {sigma: its for sigma, its in probed.items() if its is not None and its.shape == given.shape}
        this.coming = {sigma: _Kept(its, table, until) for sigma, its in alike.items()}

    def _find(self, given: torch.Tensor) -> _Kept | None:
        """What is kept for an input. Waits for the device."""
        if self._stacked is None or self._stacked[1].shape[1:] != given.shape:
            alike = [kept for kept in self._every() if kept.given.shape == given.shape]
            if not alike:
                return None
            self._stacked = alike, torch.stack([kept.given for kept in alike])
        alike, stacked = self._stacked
        equal = (stacked == given).all(dim=1).tolist()
        return next((kept for kept, same in zip(alike, equal, strict=True) if same), None)

    def _missing(self, run: Run, kept: _Kept | None) -> tuple[float | None, list[float]]:
        """The sigma of this pass, and those after it in the run for which nothing is kept with `kept`.

        Where something is kept for this pass, it is looked at once in a run.
        """
        schedule = run.schedule
        assert schedule is not None
        if kept is not None and kept.table.schedule is schedule:
            return None, []
        if self._sigmas is None or self._sigmas[0] is not schedule:
            self._sigmas = schedule, schedule.tolist()
        sigmas, now = self._sigmas[1], run.sigma()
        if now is None or now not in sigmas:
            return None, []
        coming = [*dict.fromkeys(sigma for sigma in sigmas[sigmas.index(now) + 1 :] if sigma)]
        if kept is None:
            return now, coming
        kept.table.schedule = schedule
        for sigma in coming:
            if sigma in kept.table.by_sigma:
                kept.table.by_sigma[sigma].until = self._passes + _ROUNDS * len(coming)
        return now, [sigma for sigma in coming if sigma not in kept.table.by_sigma]

    def _room(self, token: torch.Tensor) -> int:
        """For how many inputs outputs can be kept. What nobody expects to use any more makes room."""
        rows = token.numel() // token.shape[-1]
        width = sum(_width(self._blocks[number].module) for number in self.numbers)
        each = max(width * rows * token.element_size(), 1)
        wanted = sum(kept.size for kept in self._every() if kept.until >= self._passes)
        return (LIMIT - wanted) // each

    def _miss(self) -> None:
        self._in_vain += 1
        if self._in_vain < PATIENCE:
            return
        words = "[MultiGPU] in %d passes %s of weights could not be computed ahead: they are streamed from now on"
        log.info(words, PATIENCE, format_bytes(self.spared_bytes))
        self._refused.update(self._blocks[number].name for number in self.numbers)
        self.numbers.clear()
        self.forget()

    @staticmethod
    def _probed(run: Run, sigma: float) -> torch.Tensor | None:
        """The bytes of the first layer's input with another sigma; None if the model does not get there."""
        try:
            run.probe(sigma)
        except Reached as reached:
            return reached.given
        return None

    # -- keeping ------------------------------------------------------------------------------------------------

    def _every(self) -> Iterator[_Kept]:
        return (kept for table in self._tables for kept in table.by_sigma.values())

    def _make(
        self, this: _Pass, number: int, token: torch.Tensor | None, output: Any, compute: Callable[[Any], Any]
    ) -> None:
        """Its weights are there: compute what this layer will give in the coming passes."""
        assert this.now is not None
        if token is None or number in this.equal or not isinstance(output, torch.Tensor):
            return
        given = _bytes(token)
        if given.shape != this.now.given.shape:
            return
        if this.now.table.forms.setdefault(number, _form(token)) != _form(token):
            return
        this.equal[number] = (given == this.now.given).all()
        this.now.outputs.setdefault(number, output.clone())
        try:
            for kept in this.coming.values():
                kept.outputs[number] = compute(kept.given.view(token.dtype).view(token.shape))
        except RuntimeError:  # torch.OutOfMemoryError is one; other backends raise their own
            log.debug("[MultiGPU] nothing is computed ahead: there is no room for it", exc_info=True)
            this.coming.clear()

    def _keep(self, this: _Pass) -> None:
        """A pass is over that has made something. Layers whose input was not that of the first one are left out."""
        if this.now is None or not this.coming or not this.equal:
            return
        table, equal = this.now.table, torch.stack([*this.equal.values()]).tolist()
        table.by_sigma.update({this.sigma: this.now, **this.coming})
        if table not in self._tables:
            self._tables.append(table)
        self._stacked = None
        for number, same in zip(this.equal, equal, strict=True):
            if not same:
                self.numbers.discard(number)
                self._refused.add(self._blocks[number].name)
                for kept in self._every():
                    kept.outputs.pop(number, None)
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest of what nobody expects to use any more, until the rest fits."""
        excess = self.kept_bytes - LIMIT
        for table in [*self._tables]:
            for sigma, kept in [*table.by_sigma.items()]:
                if excess > 0 and kept.until < self._passes:
                    excess -= kept.size
                    del table.by_sigma[sigma]
            if not table.by_sigma:
                self._tables.remove(table)


def _token(given: tuple[Any, ...]) -> torch.Tensor | None:
    """The input of a layer that sees one token, or a few; None if it is none.

    None, too, if it lies in memory as no new tensor does: then other kernels might compute it, with other bits.
    """
    token = given[0] if len(given) == 1 else None
    if not isinstance(token, torch.Tensor) or not token.dim() or not 0 < token.numel() <= ROWS * token.shape[-1]:
        return None
    return token if token.is_contiguous() and token.data_ptr() % _ALIGNED == 0 else None


def _form(token: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return token.shape, token.dtype


def _bytes(token: torch.Tensor) -> torch.Tensor:
    """Compared by bytes, since zeros of either sign are equal as numbers."""
    return token.view(-1).view(torch.uint8)


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool((one == other).all())


def _width(module: torch.nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) else 0
