"""A hundred cycles of load, sample and free with changing flags leave nothing behind. `tests.host.soak` runs more."""

from __future__ import annotations

import pytest

from tests.host.lifecycle import Keeper
from tests.host.soak import WARM, cycle, footprint

CYCLES = 100


@pytest.mark.newest
@pytest.mark.timeout(600)
def test_a_hundred_cycles_leave_nothing_behind(keeper: Keeper) -> None:
    for number in range(1, WARM + 1):
        cycle(keeper, number)
    early = footprint(keeper)
    for number in range(WARM + 1, CYCLES + 1):
        cycle(keeper, number)
    late = footprint(keeper)
    assert abs(late.resident - early.resident) < 0.02 * early.resident
    assert late.threads == early.threads
    bounded = {name: count for name, count in late.lists.items() if name != "snapshots"}
    assert bounded == {name: count for name, count in early.lists.items() if name != "snapshots"}
    assert late.lists["snapshots"] <= 256
    assert "should have stayed loaded but is gone" not in keeper.log()
    assert "memory leak" not in keeper.log()
