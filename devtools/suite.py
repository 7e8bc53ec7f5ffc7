"""`dev.py test`: every part of the suite, several tools at once, and one summary."""

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import console, models, pythons, side_packages
from .guard import Guarded
from .hosts import FRONTENDS, HOSTS, fetch_newest_frontend
from .places import Places
from .problem import Problem

AT_ONCE = min(4, 1 + (os.cpu_count() or 1))
"""How many tasks run at the same time. Each keeps one core busy for most of its time."""

COVERED = ("--cov=multigpu/plan", "--cov-branch", "--cov-report=term-missing:skip-covered", "--cov-fail-under=100")
"""Every line and branch of the planner must be reached by the unit tests."""


@dataclass(frozen=True)
class Task:
    """A tool, run as `python -m COMMAND` in the repository. pytest's tests are counted; another tool counts as one.

    It runs with the Python of `.venv` unless another is given.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    python: Path = Path(sys.executable)


def _tests(part: str, *environments: dict[str, str], options: tuple[str, ...] = ()) -> tuple[Task, ...]:
    """The folder of a part, tested once in each environment. Its values are in the task's name."""
    quiet = ("-q", "-ra", "--color=no", "--durations=10", "-o", "tmp_path_retention_policy=failed")
    command = ("pytest", f"tests/{part}", *quiet, *options)
    name = part.replace("/", " ")
    return tuple(Task(" ".join([name, *filter(None, each.values())]), command, each) for each in environments or ({},))


KINDS = ({"SIMDEV": ""}, {"SIMDEV": "cuda"}, {"SIMDEV": "npu"})
VERSIONS = [{"MULTIGPU_HOST": host.version} for host in HOSTS]

# The quick ones first, then the longest, so that all cores have work until the end. Tracing is slow, so only the tests
# that reach the planner are traced.
PARTS = {
    "lint": (
        Task("lint", ("ruff", "check", "--output-format", "concise", ".")),
        Task("format", ("ruff", "format", "--check", ".")),
    ),
    "types": (Task("types", ("mypy",)),),
    "unit": (*_tests("unit/plan", options=COVERED), *_tests("unit", options=("--ignore=tests/unit/plan",))),
    "host": _tests("host", *VERSIONS[::-1]),
    "engine": _tests(
        "engine", *(version | KINDS[1] for version in VERSIONS[::-1]), *(VERSIONS[-1] | kind for kind in KINDS[::2])
    ),
    "dev": _tests("dev"),
    "sim": _tests("sim", *KINDS[1:]),
    "remote": _tests("remote"),
    "devices": _tests("devices", *KINDS[1:], *({"SIMDEV": kind} for kind in ("xpu", "mps", "privateuseone"))),
    "browser": _tests("browser", *({"MULTIGPU_TEST_FRONTEND": frontend.name} for frontend in FRONTENDS)),
}
WITHOUT_HOSTS = {"lint", "types", "unit"}
"""The parts that need neither ComfyUI nor the tiny models."""


def run(places: Places, *, only: Sequence[str] | None, expression: str | None) -> int:
    """Run the parts; the last line printed is `N passed, N failed, N skipped`. Returns 1 if any failed.

    Raises Problem when `expression` matches no test at all.
    """
    chosen = [name for name in PARTS if not only or name in only]
    if not set(chosen) <= WITHOUT_HOSTS:
        models.prepare(HOSTS, places)
    if "browser" in chosen:
        fetch_newest_frontend(places)
        for host in HOSTS:
            side_packages.comfyui_manager(host, places)
    tasks = [task for name in chosen for task in PARTS[name]]
    if "remote" in chosen:
        packages = {"PYTHONPATH": str(side_packages.ray(places))}
        (remote,) = PARTS["remote"]
        tasks[tasks.index(remote)] = replace(remote, environment=packages)
    if "unit" in chosen:
        own = tasks.index(PARTS["unit"][-1])
        tasks[own + 1 : own + 1] = unit_on_other_pythons(places)
    if expression:
        tasks = [selecting(task, expression) for task in tasks if task.command[0] == "pytest"]
    rows, notes, total = [], [], Counter[str]()
    for task, code, text, seconds in finished(tasks, places):
        counts, lines = outcome(task, code, text)
        console.heading(f"{task.name}: {counted(counts)} in {seconds:.0f} s")
        console.line(text)
        rows.append((task.name, counted(counts), f"{seconds:.0f} s"))
        notes += [(task.name, line) for line in lines]
        total += counts
    console.heading("Summary")
    console.table(rows)
    for title, starts in (("Failed", ("FAILED", "ERROR")), ("Skipped", ("SKIPPED",)), ("Left out", ("LEFT OUT",))):
        if found := [note for note in notes if note[1].startswith(starts)]:
            console.heading(title)
            console.table(found)
    console.line("\n" + counted(total))
    if expression and not total:
        raise Problem(f"No test of {', '.join(chosen)} matches -k {expression!r}; give a part of a test's name.")
    return int(total["failed"] > 0)


def unit_on_other_pythons(places: Places) -> list[Task]:
    """The unit tests that do without torch, with every other supported Python of this machine. No coverage."""
    (unit,) = _tests("unit")
    found = pythons.prepare(places)
    return [replace(unit, name=f"unit {version}", python=python) for version, python in found.items()]


def selecting(task: Task, expression: str) -> Task:
    """Some of a task's tests. Without the coverage limit: a few tests cannot reach it."""
    return replace(task, command=(*(word for word in task.command if word not in COVERED), "-k", expression))


def finished(tasks: Sequence[Task], places: Places) -> Iterator[tuple[Task, int, str, float]]:
    """Run tasks, several at once. Yields each with its exit code, output and seconds, the one that ends first first.

    An interruption ends what is running.
    """
    folder = places.dev / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    added = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MULTIGPU_DEV_CACHE": str(places.cache)}
    waiting, running = list(tasks), {}
    with contextlib.ExitStack() as children:
        while waiting or running:
            if waiting and len(running) < AT_ONCE:
                task = waiting.pop(0)
                console.line(f"  started {task.name}")
                log = folder / f"{task.name.replace(' ', '-')}.log"
                log.unlink(missing_ok=True)
                command = [task.python, "-m", *task.command]
                child = Guarded(command, cwd=places.root, env={**added, **task.environment}, log=log)
                running[task] = children.enter_context(child), log, time.monotonic()
            for task, (child, log, started) in list(running.items()):
                if (code := child.poll()) is not None:
                    del running[task]
                    text = log.read_text(encoding="utf-8", errors="replace").rstrip()
                    yield task, code, text, time.monotonic() - started
            time.sleep(0.05)


def outcome(task: Task, code: int, text: str) -> tuple[Counter[str], list[str]]:
    """How many tests passed, failed and were skipped, and pytest's lines about what did not pass, from its output."""
    if task.command[0] != "pytest":
        counts, notes = Counter(passed=int(code == 0)), []
    else:
        summary = re.findall(r"^.*\d+ \w+ in [\d.]+s.*$", text, re.MULTILINE)[-1:]
        found = re.findall(r"(\d+) (passed|failed|skipped|error)", "".join(summary))
        counts = Counter({kind: int(number) for number, kind in found})
        counts["failed"] += counts.pop("error", 0)
        notes = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR ", "SKIPPED ", "LEFT OUT "))]
    if code not in (0, 5) and not counts["failed"]:  # pytest ends with 5 when no test was selected
        counts["failed"] = 1
        notes.append(f"FAILED {task.command[0]} ended with exit code {code}")
    return counts, notes


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
