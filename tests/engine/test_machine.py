"""The machine of `machine.py`, for a while, and the cases that it has found."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.machine import EngineMachine, Workshop
from tests.engine.studio import Studio

MINUTES = float(os.environ.get("MULTIGPU_MACHINE_MINUTES", "0"))
"""How long to go on, with new sequences all the time. 0: the same few sequences each time, as in CI."""

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
FEW = settings(
    max_examples=6, stateful_step_count=14, deadline=None, derandomize=True, database=None,
    suppress_health_check=CHECKS, phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
MANY = settings(FEW, max_examples=20, stateful_step_count=25, derandomize=False, phases=list(Phase))


@pytest.fixture
def workshop(studio: Studio, tmp_path: Path) -> Workshop:
    return Workshop(studio, tmp_path)


@pytest.mark.timeout(0)
def test_any_order(workshop: Workshop) -> None:
    end = time.monotonic() + 60 * MINUTES
    run_state_machine_as_test(lambda: EngineMachine(workshop), settings=MANY if MINUTES else FEW)
    while time.monotonic() < end:
        run_state_machine_as_test(lambda: EngineMachine(workshop), settings=MANY)
