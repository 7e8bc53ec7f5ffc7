"""`dev.py test`: every part of the suite that the repository has, and one summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .console import Console
from .hosts import HOSTS, NEWEST
from .places import Places
from .prepare import prepare, prepare_environment
from .problem import Problem
from .reports import Report, counts
from .tasks import Task, TaskRunner

AT_ONCE = min(4, 1 + (os.cpu_count() or 1))
"""How many tasks run at the same time. Each keeps one core busy for most of its time."""

COVERED = ("--cov=multigpu/plan", "--cov-branch", "--cov-report=term-missing:skip-covered", "--cov-fail-under=100")
"""Every line and branch of the planner must be reached by the unit tests."""


@dataclass(frozen=True)
class Part:
    """`folder` must exist for the part to be listed; `hosts` says whether it needs ComfyUI and the tiny models."""

    folder: str
    tasks: tuple[Task, ...]
    hosts: bool = False


# The quick ones first, then the longest, so that all cores have work until the end.
_PARTS = {
    "lint": Part(".", (
        Task("lint", ("ruff", "check", "--output-format", "concise", ".")),
        Task("format", ("ruff", "format", "--check", ".")),
    )),
    "types": Part("multigpu", (Task("types", ("mypy",)),)),
    "unit": Part("tests/unit", (Task("unit", ("pytest", "tests/unit", *COVERED)),)),
    "host": Part("tests/host", tuple(
        Task(f"host {host.version}", ("pytest", "tests/host"), {"MULTIGPU_HOST": host.version}) for host in HOSTS
    ), hosts=True),
    "sim": Part("tests/sim", tuple(
        Task(f"sim {kind}", ("pytest", "tests/sim"), {"SIMDEV": kind}) for kind in ("cuda", "npu")
    ), hosts=True),
    "engine": Part("tests/engine", tuple(
        Task(f"engine {host.version} {kind or 'cpu'}", ("pytest", "tests/engine"),
             {"MULTIGPU_HOST": host.version, "SIMDEV": kind})
        for host in HOSTS for kind in (("", "cuda", "npu") if host is NEWEST else ("", "cuda"))
    ), hosts=True),
    "devices": Part("tests/devices", tuple(
        Task(f"devices {kind}", ("pytest", "tests/devices"), {"SIMDEV": kind}) for kind in ("cuda", "npu")
    ), hosts=True),
    "browser": Part("tests/browser", (Task("browser", ("pytest", "tests/browser")),), hosts=True),
    "dev": Part("tests/dev", (Task("dev", ("pytest", "tests/dev")),), hosts=True),
}  # fmt: skip

PARTS = tuple(_PARTS)


def run(places: Places, console: Console, *, only: Sequence[str] | None, expression: str | None) -> int:
    """Run the parts; the last line printed is `N passed, N failed, N skipped`. Returns 1 if any failed.

    Raises Problem when `expression` matches no test at all.
    """
    chosen = [name for name in PARTS if (not only or name in only) and (places.root / _PARTS[name].folder).is_dir()]
    console.line("MultiGPU for ComfyUI: development set-up")
    if any(_PARTS[name].hosts for name in chosen):
        prepare(HOSTS, places, console)
    else:
        prepare_environment(places, console)
    tasks = [task for name in chosen for task in _PARTS[name].tasks]
    if expression:
        tasks = [_selected(task) for task in tasks if task.command[0] == "pytest"]
    reports = TaskRunner(places, console, expression).run(tasks, AT_ONCE)
    _summarise(reports, console)
    if expression and not any(report.passed or report.failures or report.skips for report in reports):
        raise Problem(f"No test of {', '.join(chosen)} matches -k {expression!r}; give a part of a test's name.")
    return int(any(report.failures for report in reports))


def _selected(task: Task) -> Task:
    """The task without its coverage limit, which a few selected tests cannot reach."""
    return Task(task.name, tuple(word for word in task.command if word not in COVERED), task.environment)


def _summarise(reports: Sequence[Report], console: Console) -> None:
    console.heading("Summary")
    console.table([(report.name, report.counts, f"{report.seconds:.0f} s") for report in reports])
    failures = [(report.name, title) for report in reports for title in report.failures]
    skips = [(report.name, reason, count) for report in reports for reason, count in sorted(report.skips.items())]
    if failures:
        console.heading("Failed")
        console.table(failures)
    if skips:
        console.heading("Skipped")
        console.table([(name, f"{count} x {reason}") for name, reason, count in skips])
    console.line()
    console.line(counts(reports))
