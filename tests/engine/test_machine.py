"""Runs the state machine of `machine.py`; see `tests/machines.py` for running it longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import FOREMOST
from tests.engine.machine import EngineMachine, Workshop
from tests.engine.studio import Studio
from tests.machines import explore


@pytest.mark.timeout(0)
def test_any_order(studio: Studio, tmp_path: Path) -> None:
    workshop = Workshop(studio, tmp_path)
    explore(lambda: EngineMachine(workshop), few=20 if FOREMOST else 10, steps=15)
