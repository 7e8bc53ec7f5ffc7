"""Tensors that are sent once, and then referred to by numbers: what one machine has sent, and what the other keeps.

A batch is sent as its rows, because the host puts the conditions of a step together anew: what is in two batches is
sent once. So is what the host has only converted to another data type since.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch

KEPT = "kept by the worker"
"""The key of what stands for a tensor that was sent before: the numbers of its rows."""
WORTH_KEEPING = 4096
"""Tensors, and rows, with at least so many bytes are sent once."""
MOST_KEPT = 64
MOST_KEPT_BYTES = 256 * 2**20
"""How many tensors of one component are kept, and bytes; the one that was not used for longest goes first."""


class Sent:
    """What the other machine keeps for one component, by number."""

    def __init__(self) -> None:
        self.tensors: OrderedDict[int, torch.Tensor] = OrderedDict()
        """The one that was not used for longest comes first."""
        self.numbers = itertools.count(1)

    def forget(self) -> None:
        """It is not known what the other machine has. Numbers are never used again."""
        self.tensors.clear()

    def surplus(self, used: Collection[int]) -> list[int]:
        """Forget what is more than is kept, but nothing that is used in this call. Returns the numbers."""
        spare, gone = [number for number in self.tensors if number not in used], []
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        while spare and (len(self.tensors) > MOST_KEPT or size > MOST_KEPT_BYTES):
            gone.append(spare.pop(0))
            size -= self.tensors.pop(gone[-1]).nbytes
        return gone


class Sending:
    """One call. `new` are tensors that the other machine has not, `converted` those that it can make of what it has."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self.new: dict[int, torch.Tensor] = {}
        self.converted: dict[int, tuple[int, torch.dtype]] = {}
        self.used: set[int] = set()
        self._given: dict[tuple[int, ...], torch.Tensor] = {}

    def short(self, value: Any) -> Any:
        """The value with numbers in the place of large tensors."""
        if isinstance(value, torch.Tensor) and value.nbytes >= WORTH_KEEPING:
            numbers = [self._number(row) for row in _rows(value)]
            self._given[tuple(numbers)] = value
            return {KEPT: numbers}
        if type(value) in (list, tuple):
            return type(value)(self.short(item) for item in value)
        return value

    def whole(self, answer: Any) -> Any:
        """An answer with the tensors of this call that it refers to."""
        return _with(answer, self._given.__getitem__)

    def _number(self, row: torch.Tensor) -> int:
        known = self._sent.tensors
        alike = [
            number for number, its in reversed(known.items()) if its.shape == row.shape and its.stride() == row.stride()
        ]
        found = next((each for each in alike if known[each].dtype is row.dtype and known[each].equal(row)), None)
        if found is None:
            found = next(self._sent.numbers)
            source = next((each for each in alike if _converts(known[each], row)), None)
            if source is None:
                self.new[found] = row
            else:
                self.converted[found] = source, row.dtype
            known[found] = row.clone()
        known.move_to_end(found)
        self.used.add(found)
        return found


class Keeping:
    """The other side: the tensors that were sent for one component."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def take(self, new: Mapping[int, torch.Tensor], converted: Mapping[int, Any], forget: Collection[int]) -> None:
        """What came with a call: tensors, those to be made of others, and numbers that are not used any more."""
        self._tensors.update(new)
        for number, (source, dtype) in converted.items():
            self._tensors[number] = self._tensors[source].to(dtype)
        for number in forget:
            self._tensors.pop(number, None)

    def whole(self, value: Any, named: dict[int, list[int]]) -> Any:
        """A value with the tensors that it refers to. `named` gets the numbers of each, by its `id`."""

        def tensor(numbers: tuple[int, ...]) -> torch.Tensor:
            rows = [self._tensors[number] for number in numbers]
            found = rows[0] if len(rows) == 1 else torch.cat(rows)
            named[id(found)] = list(numbers)
            return found

        return _with(value, tensor)


def short(answer: Any, named: Mapping[int, list[int]]) -> Any:
    """An answer in which the tensors that came with the call are only named."""
    if isinstance(answer, torch.Tensor):
        return {KEPT: named[id(answer)]} if id(answer) in named else answer
    if isinstance(answer, dict):
        return {key: short(item, named) for key, item in answer.items()}
    return type(answer)(short(item, named) for item in answer) if type(answer) in (list, tuple) else answer


def _with(value: Any, tensor: Any) -> Any:
    """A value in which `tensor` has made something of each reference."""
    if isinstance(value, dict):
        return tensor(tuple(value[KEPT])) if KEPT in value else {key: _with(its, tensor) for key, its in value.items()}
    return type(value)(_with(its, tensor) for its in value) if type(value) in (list, tuple) else value


def _rows(value: torch.Tensor) -> list[torch.Tensor]:
    """A tensor in RAM, without gaps; as its rows, if it is a batch of large ones."""
    here = value.detach().cpu()
    if not here.is_contiguous():
        return [here.clone()]
    batch = here.dim() > 1 and 1 < len(here) <= MOST_KEPT and here[0].nbytes >= WORTH_KEEPING
    return [here[number : number + 1] for number in range(len(here))] if batch else [here]


def _converts(known: torch.Tensor, row: torch.Tensor) -> bool:
    """Whether the one is the other in another data type."""
    floats = known.is_floating_point() and row.is_floating_point()
    return floats and known.dtype is not row.dtype and known.to(row.dtype).equal(row)
