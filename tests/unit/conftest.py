"""Settings of the property tests, and what happens where there is no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("multigpu", deadline=None)  # no deadline per example, because machines are noisy
settings.load_profile("multigpu")

NO_TORCH = importlib.util.find_spec("torch") is None
LEFT_OUT = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Without torch, the files whose imports need it are left out. Any other failed import is an error, as always."""
    report = yield
    if NO_TORCH and report.failed and "ModuleNotFoundError: No module named 'torch'" in str(report.longrepr):
        collector.config.stash.setdefault(LEFT_OUT, []).append(collector.name)
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line, which `dev.py test` repeats in its summary."""
    if left_out := config.stash.get(LEFT_OUT, []):
        names = ", ".join(sorted(left_out))
        terminalreporter.line(f"LEFT OUT {len(left_out)} files that import torch, which is not installed here: {names}")
