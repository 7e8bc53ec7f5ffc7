"""The steps of a free, and whose they are."""

from __future__ import annotations

import pytest

from multigpu.lifecycle.free_cycle import OLDEST_GENERATION, FreeCycle, Phase

WORKER, OTHER = 1, 2


@pytest.fixture
def cycle() -> FreeCycle[str]:
    """One whose models are unloaded, on the prompt worker."""
    cycle: FreeCycle[str] = FreeCycle(chosen=True)
    assert cycle.begin() == "free 1" and cycle.phase is Phase.UNLOADING and not cycle.chosen
    cycle.unloaded(WORKER, ["flux"])
    return cycle


def test_all_steps_in_order(cycle: FreeCycle[str]) -> None:
    assert not cycle.ends(WORKER), "a cache that is emptied before the collection is not the end"
    assert cycle.collects(WORKER, OLDEST_GENERATION)
    assert cycle.ends(WORKER) and cycle.kept == ["flux"]
    cycle.stop()
    assert cycle.phase is Phase.NONE and not cycle.ends(WORKER) and not cycle.kept
    assert cycle.begin() == "free 2"


def test_the_collection_is_a_full_one_of_the_worker(cycle: FreeCycle[str]) -> None:
    assert not cycle.collects(WORKER, OLDEST_GENERATION - 1)
    assert not cycle.collects(OTHER, OLDEST_GENERATION)
    assert cycle.phase is Phase.UNLOADED
    assert cycle.collects(WORKER, OLDEST_GENERATION) and not cycle.collects(WORKER, OLDEST_GENERATION)


def test_the_end_is_the_workers(cycle: FreeCycle[str]) -> None:
    cycle.collects(WORKER, OLDEST_GENERATION)
    assert not cycle.ends(OTHER) and cycle.ends(WORKER)


@pytest.mark.parametrize("collected", [False, True])
def test_a_prompt_that_starts_ends_the_waiting(cycle: FreeCycle[str], collected: bool) -> None:
    if collected:
        cycle.collects(WORKER, OLDEST_GENERATION)
    cycle.stop()
    assert not cycle.collects(WORKER, OLDEST_GENERATION) and not cycle.ends(WORKER)


def test_a_new_free_replaces_one_that_has_not_ended(cycle: FreeCycle[str]) -> None:
    cycle.collects(WORKER, OLDEST_GENERATION)
    assert cycle.begin() == "free 2" and not cycle.ends(WORKER)
    cycle.unloaded(OTHER, [])
    assert cycle.collects(OTHER, OLDEST_GENERATION) and cycle.ends(OTHER) and not cycle.ends(WORKER)
