"""Running a state machine test: a few fixed sequences, then new ones for as many minutes as MULTIGPU_TEST_MINUTES says.

MULTIGPU_TEST_MINUTES=30 python -m pytest -s tests/host/test_lifecycle_machine.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MINUTES = float(os.environ.get("MULTIGPU_TEST_MINUTES", "0"))
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]


def explore(make: Callable[[], RuleBasedStateMachine], *, few: int, steps: int) -> None:
    """Run `few` fixed sequences of at most `steps` steps. With MINUTES, go on with new ones of twice that length."""
    fixed = settings(
        max_examples=few, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
        suppress_health_check=CHECKS, phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(make, settings=fixed)
    end, sequences = time.monotonic() + 60 * MINUTES, 0
    new = settings(fixed, max_examples=20, stateful_step_count=2 * steps, derandomize=False, phases=list(Phase))
    while time.monotonic() < end:
        run_state_machine_as_test(make, settings=new)
        sequences += new.max_examples
    if MINUTES:
        print(f"{make().__class__.__name__}: {sequences} new sequences of up to {2 * steps} steps")  # noqa: T201
