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

FLAG = "_mgpu_unload_distorch_model"
"""The attribute on the inner model, which all clones of its patcher share; other packs may read and set it."""

Model = TypeVar("Model")


class Standing(Enum):
    """What the user chose for a model. The value is the choice of the `keep_loaded` widget."""

    UNMANAGED = "default"
    PINNED = "keep"
    FLAGGED = "eject"


class Step(Enum):
    """What happens to a model in one unload."""

    EJECT = "ejected"
    STAY = "stays"
    ANCHOR = "stays for this cycle"
    DELEGATE = "unloaded as ComfyUI does"


TABLE: dict[str, dict[Standing, Step]] = {
    "some flagged": {Standing.FLAGGED: Step.EJECT, Standing.PINNED: Step.STAY, Standing.UNMANAGED: Step.ANCHOR},
    "some pinned": {Standing.PINNED: Step.STAY, Standing.UNMANAGED: Step.DELEGATE},
    "nothing said": {Standing.UNMANAGED: Step.DELEGATE},
    "out of memory": dict.fromkeys(Standing, Step.DELEGATE),
}


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
        return Standing.FLAGGED
    return Standing.PINNED if flag is False else Standing.UNMANAGED


def flag_for(standing: Standing) -> bool | None:
    """The attribute's value for a standing; None when there must be no attribute."""
    return {Standing.FLAGGED: True, Standing.PINNED: False}.get(standing)


def decide(models: Sequence[tuple[Model, Standing]], *, out_of_memory: bool = False) -> Decision[Model]:
    """Look the models up in the table."""
    said = {standing for _, standing in models}
    if out_of_memory:
        row = "out of memory"
    elif Standing.FLAGGED in said:
        row = "some flagged"
    elif Standing.PINNED in said:
        row = "some pinned"
    else:
        row = "nothing said"
    steps = [(model, TABLE[row][standing]) for model, standing in models]

    def taking(step: Step) -> tuple[Model, ...]:
        return tuple(model for model, its in steps if its is step)

    return Decision(row, taking(Step.EJECT), taking(Step.STAY), taking(Step.ANCHOR), taking(Step.DELEGATE))
