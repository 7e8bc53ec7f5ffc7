"""Starting the runtime outside a host: it says what is off, and which settings mean nothing."""

from __future__ import annotations

import logging

import pytest

from multigpu.host.surface import Feature
from multigpu.runtime import LOGGER, Runtime


def test_one_line_and_one_more_for_each_feature_that_is_off(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime.start({})
    first, *rest = caplog.records
    assert first.levelno == logging.INFO and "on ComfyUI unknown" in first.getMessage()
    assert [record.levelno for record in rest] == [logging.WARNING] * len(Feature)
    assert "placement is off: comfy.model_patcher.ModelPatcher is missing" in rest[1].getMessage()
    assert runtime.nodes() == []


def test_switched_off_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Runtime.start({"MULTIGPU_ENABLED": "off"})
    assert "switched off by MULTIGPU_ENABLED" in caplog.records[0].getMessage()


def test_the_log_level_is_that_of_our_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger().level
    Runtime.start({"MULTIGPU_LOG": "error"})
    assert logging.getLogger(LOGGER).level == logging.ERROR and logging.getLogger().level == root
    assert caplog.records == []


def test_settings_that_mean_nothing_take_one_line_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Runtime.start({"MULTIGPU_LOG": "perhaps", "MULTIGPU_ENABLED": "maybe", "MULTIGPU_FALLBACK": "on"})
    state, wrong, unknown, *_ = caplog.records
    assert "switched off" not in state.getMessage()
    assert [wrong.levelno, unknown.levelno] == [logging.WARNING] * 2
    assert "MULTIGPU_LOG is 'perhaps'" in wrong.getMessage() and "MULTIGPU_ENABLED is 'maybe'" in wrong.getMessage()
    assert "there is no setting MULTIGPU_FALLBACK" in unknown.getMessage()
    assert logging.getLogger(LOGGER).level == logging.INFO


@pytest.fixture(autouse=True)
def level_as_before(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    yield
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)
