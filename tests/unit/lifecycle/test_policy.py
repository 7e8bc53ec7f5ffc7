"""The decision table, row by row, and every combination of standings."""

from __future__ import annotations

import itertools

import pytest

from multigpu.errors import InputError
from multigpu.lifecycle.policy import Decision, Standing, decide, standing_of

FLAGGED, PINNED, UNMANAGED = Standing.EJECT, Standing.KEEP, Standing.DEFAULT


def test_some_flagged() -> None:
    decision = decide([("flux", FLAGGED), ("clip", PINNED), ("vae", UNMANAGED)])
    assert decision == Decision("some flagged", eject=("flux",), stay=("clip",), anchor=("vae",), delegate=())


def test_none_flagged_some_pinned() -> None:
    decision = decide([("clip", PINNED), ("vae", UNMANAGED)])
    assert decision == Decision("some pinned", eject=(), stay=("clip",), anchor=(), delegate=("vae",))


def test_nothing_said() -> None:
    decision = decide([("clip", UNMANAGED), ("vae", UNMANAGED)])
    assert decision == Decision("nothing said", eject=(), stay=(), anchor=(), delegate=("clip", "vae"))
    assert decision.whole


def test_out_of_memory_takes_everything() -> None:
    decision = decide([("flux", FLAGGED), ("clip", PINNED), ("vae", UNMANAGED)], out_of_memory=True)
    assert decision == Decision("out of memory", eject=(), stay=(), anchor=(), delegate=("flux", "clip", "vae"))
    assert decision.whole


def test_no_model_at_all() -> None:
    assert decide([]) == Decision("nothing said", (), (), (), ())


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_every_combination(out_of_memory: bool) -> None:
    """No model is lost or decided twice; a pinned one leaves only when memory is out; a flagged one never stays."""
    for count in range(4):
        for standings in itertools.product(Standing, repeat=count):
            decision = decide(list(enumerate(standings)), out_of_memory=out_of_memory)
            parts = [*decision.eject, *decision.stay, *decision.anchor, *decision.delegate]
            assert sorted(parts) == list(range(count))
            for model, standing in enumerate(standings):
                stays = model in decision.stay or model in decision.anchor
                assert not (standing is FLAGGED and stays)
                assert stays == (
                    not out_of_memory
                    and (standing is PINNED or (standing is UNMANAGED and FLAGGED in standings))
                )  # fmt: skip


def test_the_attribute_has_three_states() -> None:
    assert [standing_of(flag) for flag in (True, False, None, "no", 0)] == [FLAGGED, PINNED] + [UNMANAGED] * 3


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("default", "default"),
        ("keep", "keep"),
        ("eject", "eject"),
        (True, "keep"),
        (False, "eject"),
        ("true", "keep"),
        ("False", "eject"),
        (" Keep ", "keep"),
    ],
)
def test_keep_loaded(said: object, meant: str) -> None:
    assert Standing.read(said) is Standing(meant)


@pytest.mark.parametrize("said", ["perhaps", "", None, 1, 0.0, []])
def test_what_keep_loaded_does_not_know(said: object) -> None:
    with pytest.raises(InputError, match="keep_loaded is .*; it can be default, keep or eject"):
        Standing.read(said)
