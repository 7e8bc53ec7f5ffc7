"""Runs the state machine of `machine.py`; see `tests/machines.py` for running it longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from multigpu.plan import search, types
from tests.engine.conftest import FOREMOST
from tests.engine.machine import EngineMachine, Workshop
from tests.engine.studio import Studio
from tests.machines import explore


@pytest.mark.timeout(0)
def test_any_order(studio: Studio, tmp_path: Path) -> None:
    workshop = Workshop(studio, tmp_path)
    explore(lambda: EngineMachine(workshop), few=20 if FOREMOST else 10, steps=15)


@pytest.mark.pages
@pytest.mark.timeout(0)
@pytest.mark.parametrize("quantised", [False, True])
def test_any_order_with_layers_computed_ahead(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantised: bool
) -> None:
    studio.hoist()
    monkeypatch.setattr(types, "RAM_BANDWIDTH", 1e9)
    monkeypatch.setattr(search, "AHEAD", 0.0)
    workshop = Workshop(studio, tmp_path, steps=2, quantised=quantised)
    explore(lambda: EngineMachine(workshop), few=4, steps=15)
