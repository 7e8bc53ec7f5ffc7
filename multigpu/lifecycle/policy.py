"""The decision table: which models are unloaded and which stay when the host is asked to unload all models.

                          flagged     pinned    unmanaged
some model is flagged     ejected     stays     stays, anchored until the next prompt is over
none flagged, some pinned             stays     unloaded, as the host would
none flagged, none pinned                       the host's own unload
inside an exception       everything is unloaded by the host's own unload, and all anchors are removed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from ..errors import InputError

FLAG = "_mgpu_unload_distorch_model"
"""The attribute on the inner model, which all clones of its patcher share; other packs may read and set it."""

Model = TypeVar("Model")


class Standing(Enum):
    """What the user chose for a model. The value is the choice of the `keep_loaded` widget."""

    DEFAULT = "default"
    KEEP = "keep"
    EJECT = "eject"

    @classmethod
    def read(cls, value: object) -> Standing:
        """The standing that a widget or a caller names. Raises `InputError` for what names none."""
        word = str(value).strip().lower() if isinstance(value, (str, bool)) else ""
        word = {"true": cls.KEEP.value, "false": cls.EJECT.value}.get(word, word)
        if word not in [each.value for each in cls]:
            raise InputError(
                f"keep_loaded is {value!r}; it can be default, keep or eject (or true for keep, false for eject)"
            )
        return cls(word)


class Step(Enum):
    """What happens to a model in one unload: the fields of `Decision`, in their order."""

    EJECT = "ejected"
    STAY = "stays"
    ANCHOR = "stays for this cycle"
    DELEGATE = "unloaded as ComfyUI does"


TABLE: dict[str, dict[Standing, Step]] = {
    "some flagged": {Standing.EJECT: Step.EJECT, Standing.KEEP: Step.STAY, Standing.DEFAULT: Step.ANCHOR},
    "some pinned": {Standing.KEEP: Step.STAY, Standing.DEFAULT: Step.DELEGATE},
    "nothing said": {Standing.DEFAULT: Step.DELEGATE},
    "out of memory": dict.fromkeys(Standing, Step.DELEGATE),
}


UNLOADED = {
    "some pinned": "not set to keep",
    "nothing said": "nothing is set to keep",
    "out of memory": "out of memory",
}
"""Why a row unloads what it delegates to the host."""


@dataclass(frozen=True)
class Decision(Generic[Model]):
    """The result of applying the row `row` of the table. Every given model is in exactly one of the tuples.

    If `whole`, the host's own unload is called and all anchors are removed.
    """

    row: str
    eject: tuple[Model, ...]
    stay: tuple[Model, ...]
    anchor: tuple[Model, ...]
    delegate: tuple[Model, ...]

    @property
    def whole(self) -> bool:
        return not self.eject and not self.stay and not self.anchor


def standing_of(flag: object) -> Standing:
    """The standing for a value of the attribute: True is flagged, False is pinned, anything else is unmanaged."""
    if flag is True:
        return Standing.EJECT
    return Standing.KEEP if flag is False else Standing.DEFAULT


def decide(models: Sequence[tuple[Model, Standing]], *, out_of_memory: bool = False) -> Decision[Model]:
    """Look the models up in the table."""
    said = {standing for _, standing in models}
    if out_of_memory:
        row = "out of memory"
    elif Standing.EJECT in said:
        row = "some flagged"
    elif Standing.KEEP in said:
        row = "some pinned"
    else:
        row = "nothing said"
    steps = [(model, TABLE[row][standing]) for model, standing in models]
    return Decision(row, *(tuple(model for model, its in steps if its is step) for step in Step))
