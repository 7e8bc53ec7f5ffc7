"""A guarded command, and all that it started, ends when its parent does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools.guard import Guarded, run
from devtools.places import Places
from tests.dev.sandbox import needs_proc

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(PATH, 'w').close(); time.sleep(600)"
)
FAMILY = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
open(PATH, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
PARENT = """
import sys, time
from devtools.guard import Guarded
Guarded([sys.executable, "-c", SCRIPT])
time.sleep(600)
"""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between opening its file and reading it
        return False
    return state not in "ZX"


def _wait(condition: Callable[[], object], timeout: float = 20.0) -> bool:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def _pids(path: Path) -> list[int]:
    assert _wait(lambda: path.exists() and path.read_text()), "the command did not start"
    return [int(pid) for pid in path.read_text().split()]


def test_output_and_exit_code_come_through() -> None:
    command = [sys.executable, "-c", "print('hello'); print('again'); raise SystemExit(7)"]
    lines: list[str] = []
    assert run(command, lines.append) == (7, "hello\nagain")
    assert lines == ["hello", "again"]


def test_a_command_killed_by_a_signal_fails() -> None:
    with Guarded([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]) as child:
        assert child.wait(20) != 0


def test_a_command_that_is_not_there_says_so() -> None:
    code, text = run(["/no/such/command"])
    assert code == 127 and "/no/such/command" in text


def test_output_goes_to_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        with Guarded([sys.executable, "-c", f"print({word!r})"], log=log) as child:
            assert child.wait(20) == 0
    assert log.read_text().split() == ["one", "two"]


@needs_proc
def test_stop_ends_the_whole_family(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    with Guarded([sys.executable, "-c", FAMILY.replace("PATH", repr(str(said)))]):
        pids = _pids(said)
        assert all(map(_alive, pids))
    assert _wait(lambda: not any(map(_alive, pids)))


@needs_proc
def test_a_family_whose_head_ends_by_itself_ends_too(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    script = FAMILY.replace("PATH", repr(str(said))).replace("time.sleep(600)\n", "")
    with Guarded([sys.executable, "-c", script]) as child:
        pids = _pids(said)
        assert child.wait(20) == 0
        assert _wait(lambda: not any(map(_alive, pids)))


@needs_proc
@pytest.mark.parametrize("nested", [False, True])
def test_nothing_survives_a_killed_parent(tmp_path: Path, nested: bool) -> None:
    said = tmp_path / "pids"
    script = FAMILY.replace("PATH", repr(str(said)))
    if nested:
        script = PARENT.replace("SCRIPT", repr(script))
    command = [sys.executable, "-c", PARENT.replace("SCRIPT", repr(script))]
    with subprocess.Popen(command, cwd=Places.here().root) as parent:
        pids = _pids(said)
        parent.send_signal(signal.SIGKILL)
    assert _wait(lambda: not any(map(_alive, pids)))


@needs_proc
def test_a_command_that_will_not_leave_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = Guarded([sys.executable, "-c", STUBBORN.replace("PATH", repr(str(ready)))])
    assert _wait(ready.exists)
    assert child.stop() == 128 + signal.SIGKILL
