"""Running the tools of the suite, several at once, each in a process of its own that ends when this one does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from .console import Console
from .guard import Guarded
from .places import Places
from .reports import Report, read_junit

NOTHING_COLLECTED = 5
"""pytest's exit code when no test was selected."""


@dataclass(frozen=True)
class Task:
    """A tool, run as `python -m COMMAND` in the repository. pytest's tests are counted; another tool counts as one."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-")


class TaskRunner:
    """Runs tasks. One at a time they write straight to the output; several at once, each writes when it is over."""

    def __init__(self, places: Places, console: Console, expression: str | None) -> None:
        self._places = places
        self._console = console
        self._expression = expression
        self._running: list[Guarded] = []
        self._interrupted = False
        self._reports = places.dev / "reports"

    def run(self, tasks: Sequence[Task], at_once: int) -> list[Report]:
        """The reports, in the order of the tasks. An interruption ends what is running."""
        self._reports.mkdir(parents=True, exist_ok=True)
        if at_once == 1 or len(tasks) == 1:
            return [self._live(task) for task in tasks]
        with ThreadPoolExecutor(at_once) as pool:
            futures = {pool.submit(self._logged, task): task for task in tasks}
            try:
                for future in as_completed(futures):
                    self._tell(futures[future], future.result())
            except BaseException:
                self._interrupted = True
                pool.shutdown(wait=False, cancel_futures=True)
                for child in list(self._running):
                    child.stop()
                raise
        return [future.result() for future in futures]

    def _live(self, task: Task) -> Report:
        self._console.heading(task.name)
        return self._report(task, None)

    def _logged(self, task: Task) -> Report:
        self._console.line(f"  started {task.name}")
        log = self._reports / f"{task.file_name}.log"
        log.unlink(missing_ok=True)
        return self._report(task, log)

    def _tell(self, task: Task, report: Report) -> None:
        self._console.heading(f"{task.name}: {report.counts} in {report.seconds:.0f} s")
        log = self._reports / f"{task.file_name}.log"
        self._console.line(log.read_text(encoding="utf-8", errors="replace").rstrip())

    def _report(self, task: Task, log: Path | None) -> Report:
        started = time.monotonic()
        xml = self._reports / f"{task.file_name}.xml"
        xml.unlink(missing_ok=True)
        command = list(task.command)
        if command[0] == "pytest":
            command += ["-q", f"--junit-xml={xml}", "-o", "tmp_path_retention_policy=failed"]
            command += ["-k", self._expression] if self._expression else []
        code = self._call(command, task.environment, log)
        report = read_junit(task.name, xml) if xml.exists() else Report(task.name)
        report.seconds = time.monotonic() - started
        if command[0] != "pytest":
            report.passed = int(code == 0)
        if code != 0 and not report.failures and (command[0], code) != ("pytest", NOTHING_COLLECTED):
            report.failures.append(f"{command[0]} ended with exit code {code}")
        return report

    def _call(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> int:
        dropped = ("PYTEST_ADDOPTS", "PYTHONPATH", "PYTHONHOME")
        kept = {key: value for key, value in os.environ.items() if key not in dropped}
        added = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MULTIGPU_DEV_CACHE": str(self._places.cache)}
        tool = [self._places.python, "-m", *command]
        sys.stdout.flush()
        with Guarded(
            tool, cwd=self._places.root, env=kept | added | dict(environment), log=log, show=log is None
        ) as child:
            self._running.append(child)
            try:
                return child.stop() if self._interrupted else child.wait()
            finally:
                self._running.remove(child)
