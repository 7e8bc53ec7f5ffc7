"""The machine of `lifecycle_machine.py`, for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.host.conftest import StartHost
from tests.host.lifecycle import PACKS, Keeper, own_models
from tests.host.lifecycle_machine import CACHES, LifecycleMachine

MINUTES = float(os.environ.get("MULTIGPU_MACHINE_MINUTES", "0"))
"""How long to go on with each cache, with new sequences all the time. 0: the same few sequences each time."""

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
FEW = settings(
    max_examples=6, stateful_step_count=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=CHECKS, phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
MANY = settings(FEW, max_examples=20, stateful_step_count=30, derandomize=False, phases=list(Phase))


@pytest.fixture
def own(
    request: pytest.FixtureRequest, start_host: StartHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keeper]:
    """A server with one of ComfyUI's caches."""
    folder = own_models(tmp_path_factory.mktemp("models"))
    server = start_host(packs=PACKS, models=folder, flags=("--cpu", *CACHES[request.param])).server
    yield Keeper(server)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("own", "cache"), [(cache, cache) for cache in CACHES], indirect=["own"])
def test_any_order(own: Keeper, cache: str) -> None:
    end = time.monotonic() + 60 * MINUTES
    run_state_machine_as_test(lambda: LifecycleMachine(own, cache), settings=MANY if MINUTES else FEW)
    while time.monotonic() < end:
        run_state_machine_as_test(lambda: LifecycleMachine(own, cache), settings=MANY)
