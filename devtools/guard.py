"""A child process that never outlives its parent.

`Guarded` starts a command under a tiny guard: this same file, run as a script. The guard reads from a pipe whose other
end only the parent holds. When the parent lets go of it, by `stop()` or by dying in whatever way, the guard ends the
command and all of its process group. Guards nest: a guarded test run that started a guarded server leaves neither.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

BASE_PYTHON = getattr(sys, "_base_executable", None) or sys.executable
"""The interpreter behind a virtual environment: still there when the environment itself is made anew."""

GRACE_SECONDS = 5.0
"""How long a command may take to leave after it was asked to, before it is killed."""


class Guarded:
    """A running command. Output goes to `log` (a file that is appended to) or can be read from `output`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        show: bool = False,
    ) -> None:
        """With `show`, the command writes to this process's own output; without `show` and `log`, to `output`."""
        with contextlib.ExitStack() as files:
            sink: int | IO[bytes] | None = subprocess.PIPE
            if log is not None:
                sink = files.enter_context(log.open("ab"))
            elif show:
                sink = None
            self._process = subprocess.Popen(
                [BASE_PYTHON, "-I", "-S", __file__, *map(str, command)],
                cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT if sink else None,
                **_own_group(),
            )  # fmt: skip

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None, "started with log or show"
        return self._process.stdout

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def stop(self) -> int:
        """End the command and all it started; returns when they are gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait(GRACE_SECONDS * 3)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _own_group() -> dict[str, Any]:
    """Out of reach of the terminal's Ctrl-C, which the parent handles, and able to be ended as a group."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _end_group(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(child.pid)], capture_output=True, check=False)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        os.killpg(child.pid, signal.SIGKILL)


def _guard(command: list[str]) -> int:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **_own_group())
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127

    def watch_parent() -> None:
        while os.read(0, 4096):
            continue
        _end_group(child)

    threading.Thread(target=watch_parent, daemon=True).start()
    if sys.platform != "win32":
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=_end_group, args=(child,)).start())
    code = child.wait()
    if sys.platform != "win32":  # nothing that the command left behind stays either
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(_guard(sys.argv[1:]))  # not sys.exit: the watching thread sits in a read that never ends
