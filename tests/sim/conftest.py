"""One simulated backend per process. SIMDEV chooses it: `cuda`, the default, or `npu` (simdev.install_from_text)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sim import simdev


@pytest.fixture(scope="session")
def simulated_world() -> simdev.World:
    try:
        return simdev.install_from_text(os.environ.get("SIMDEV", "cuda"))
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture
def sim(simulated_world: simdev.World) -> Iterator[simdev.World]:
    """The simulated machine with fresh counters. A race that the test did not take (`sim.take_races()`) fails it."""
    simulated_world.reset()
    yield simulated_world
    races = simulated_world.take_races()
    simulated_world.reset()
    assert not races, "races were seen:\n" + "\n".join(str(race) for race in races)
