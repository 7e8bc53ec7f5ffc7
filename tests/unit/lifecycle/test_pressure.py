"""What is given up when RAM runs short, in which order, and when it stops."""

from __future__ import annotations

import pytest

from multigpu.lifecycle.pressure import Pressure, Release


def looks(pressure: Pressure, *used: float) -> list[Release | None]:
    return [pressure.next_release(fraction) for fraction in used]


def test_nothing_at_the_limit() -> None:
    assert looks(Pressure(0.85), 0.1, 0.80, 0.84, 0.85) == [None] * 4


def test_one_step_at_each_look_and_pinned_models_last() -> None:
    found = looks(Pressure(0.85), 0.90, 0.90, 0.90)
    assert found == [Release.CACHES, Release.RETAINED, Release.PINNED]


def test_it_stops_as_soon_as_there_is_room() -> None:
    assert looks(Pressure(0.85), 0.90, 0.50, 0.50) == [Release.CACHES, None, None]


def test_a_second_shortage_begins_with_the_caches_again() -> None:
    assert looks(Pressure(0.85), 0.90, 0.79, 0.90) == [Release.CACHES, None, Release.CACHES]


@pytest.mark.parametrize("between", [0.80, 0.83, 0.85])
def test_hysteresis(between: float) -> None:
    """Once use fell to the limit it rests, whatever happens, until use is well below."""
    pressure = Pressure(0.85, hysteresis=0.05)
    assert looks(pressure, 0.86, between, 0.86, 0.99) == [Release.CACHES, None, None, None]
    assert looks(pressure, 0.79, 0.86) == [None, Release.CACHES]


def test_memory_that_others_hold_is_not_fought() -> None:
    """After everything was given up, nothing is freed again and again."""
    assert looks(Pressure(0.85), *[0.95] * 10)[3:] == [None] * 7
