"""`dev.py test`: every part of the suite that the repository has, and one summary."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .console import Console
from .guard import Guarded
from .hosts import HOSTS
from .places import Places
from .prepare import prepare, prepare_environment
from .reports import Report, counts, read_junit

NOTHING_COLLECTED = 5
PURE_COVERED = "multigpu/plan"
"""Every line and branch of it must be reached by the unit tests."""


@dataclass(frozen=True)
class Job:
    """What a part needs to know to run."""

    places: Places
    console: Console
    expression: str | None

    def command(self, name: str, *command: str | Path, **environment: str) -> tuple[int, float]:
        """Run a tool in the repository, its output shown. Returns its exit code and how long it took."""
        self.console.heading(name)
        started = time.monotonic()
        dropped = ("PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONHOME")
        kept = {key: value for key, value in os.environ.items() if key not in dropped}
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        tool = [self.places.python, "-m", *command]
        with Guarded(tool, cwd=self.places.root, env=kept | quiet | environment, show=True) as child:
            return child.wait(), time.monotonic() - started

    def check(self, name: str, *command: str | Path) -> Report:
        """A tool that counts as one test."""
        code, seconds = self.command(name, *command)
        return Report(name, passed=int(code == 0), failures=[name] if code else [], seconds=seconds)

    def pytest(self, name: str, *arguments: str | Path, **environment: str) -> Report:
        xml = self.places.dev / "reports" / f"{name.replace(' ', '-')}.xml"
        xml.parent.mkdir(parents=True, exist_ok=True)
        xml.unlink(missing_ok=True)
        selection = ["-k", self.expression] if self.expression else []
        tidy = ["-o", "tmp_path_retention_policy=failed"]
        command = ["pytest", "-q", *arguments, f"--junit-xml={xml}", *tidy, *selection]
        code, seconds = self.command(name, *command, **environment)
        report = read_junit(name, xml) if xml.exists() else Report(name)
        if code not in (0, NOTHING_COLLECTED) and not report.failures:
            report.failures.append(f"{name}: pytest ended with exit code {code}")
        report.seconds = seconds
        return report


def _lint(job: Job) -> list[Report]:
    return [
        job.check("lint", "ruff", "check", "--output-format", "concise", "."),
        job.check("format", "ruff", "format", "--check", "."),
    ]


def _types(job: Job) -> list[Report]:
    return [job.check("types", "mypy")]


def _unit(job: Job) -> list[Report]:
    report = "--cov-report=term-missing:skip-covered"
    coverage = [f"--cov={PURE_COVERED}", "--cov-branch", report, "--cov-fail-under=100"]
    enforced = (job.places.root / PURE_COVERED).is_dir() and not job.expression
    return [job.pytest("unit", "tests/unit", *(coverage if enforced else ()))]


def _engine(job: Job) -> list[Report]:
    """One process for each host version and each kind of device; without a kind, the CPU."""
    return [
        job.pytest(f"engine {host.version} {kind or 'cpu'}", "tests/engine", MULTIGPU_HOST=host.version, SIMDEV=kind)
        for host in HOSTS
        for kind in ("", "cuda", "npu")
    ]


def _sim(job: Job) -> list[Report]:
    return [job.pytest(f"sim {kind}", "tests/sim", SIMDEV=kind) for kind in ("cuda", "npu")]


@dataclass(frozen=True)
class Part:
    """`folder` must exist for the part to be listed; `hosts` says whether it needs ComfyUI and the tiny models."""

    run: Callable[[Job], list[Report]]
    folder: str
    hosts: bool = False


_PARTS = {
    "lint": Part(_lint, "."),
    "types": Part(_types, "multigpu"),
    "unit": Part(_unit, "tests/unit"),
    "dev": Part(lambda job: [job.pytest("dev", "tests/dev")], "tests/dev", hosts=True),
    "host": Part(lambda job: [job.pytest("host", "tests/host")], "tests/host", hosts=True),
    "engine": Part(_engine, "tests/engine", hosts=True),
    "sim": Part(_sim, "tests/sim", hosts=True),
    "browser": Part(lambda job: [job.pytest("browser", "tests/browser")], "tests/browser", hosts=True),
}

PARTS = tuple(_PARTS)


def run(places: Places, console: Console, *, only: Sequence[str] | None, expression: str | None) -> int:
    """Run the parts; the last line printed is `N passed, N failed, N skipped`. Returns 1 if any failed."""
    chosen = [name for name in PARTS if (not only or name in only) and (places.root / _PARTS[name].folder).is_dir()]
    if expression:
        chosen = [name for name in chosen if name not in ("lint", "types")]
    console.line("MultiGPU for ComfyUI: development set-up")
    if any(_PARTS[name].hosts for name in chosen):
        prepare(HOSTS, places, console)
    else:
        prepare_environment(places, console)
    job = Job(places, console, expression)
    reports = [report for name in chosen for report in _PARTS[name].run(job)]
    _summarise(reports, console)
    return int(any(report.failures for report in reports))


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
