"""A child process that never outlives its parent.

`Guarded` starts a command under a tiny guard: this same file, run as a script. The guard reads from a pipe whose other
end only the parent holds. When the parent lets go of it, by `stop()` or by dying in whatever way, the guard ends the
command and all of its process group. Guards nest: a guarded test run that started a guarded server leaves neither.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BASE_PYTHON = getattr(sys, "_base_executable", None) or sys.executable
"""The interpreter behind a virtual environment: still there when the environment itself is made anew."""

GRACE_SECONDS = 5.0
"""How long a command may take to leave after it was asked to, before it is killed."""

NEW_GROUP = 0x200  # what Windows calls CREATE_NEW_PROCESS_GROUP
OWN_GROUP: dict[str, Any] = {"creationflags": NEW_GROUP} if sys.platform == "win32" else {"start_new_session": True}
"""Out of reach of the terminal's Ctrl-C, which the parent handles, and able to be ended as a group."""

DROPPED = {
    "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_USER", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE",
    "PYTHONHOME", "PYTHONPATH",
}  # fmt: skip
"""Variables that no command gets: they would have it use other packages, install them elsewhere, or compile all of
ComfyUI anew whenever it starts."""


class Guarded(subprocess.Popen[bytes]):
    """A running command. `with Guarded(...)` ends it when the block ends."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        show: bool = False,
    ) -> None:
        """`env` is added to the environment. Output is appended to `log`, or shown, or else comes from `stdout`."""
        kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
        with log.open("ab") if log else contextlib.nullcontext(None if show else subprocess.PIPE) as sink:
            super().__init__(
                [BASE_PYTHON, "-I", "-S", __file__, *map(str, command)],
                cwd=cwd, env={**kept, **(env or {})}, stdin=subprocess.PIPE, stdout=sink,
                stderr=None if show else subprocess.STDOUT, **OWN_GROUP,
            )  # fmt: skip

    def stop(self) -> int:
        """End the command and all it started; returns when they are gone."""
        for pipe in filter(None, (self.stdin, self.stdout)):
            pipe.close()
        return self.wait(GRACE_SECONDS * 3)

    def __exit__(self, *_: object) -> None:
        self.stop()


def run(
    command: Sequence[str | Path], on_line: Callable[[str], object] = lambda line: None, **options: Any
) -> tuple[int, str]:
    """Run a command to its end. Returns its exit code and output; `on_line` gets every line as it comes."""
    lines = []
    with Guarded(command, **options) as child:
        for raw in child.stdout or ():
            lines.append(raw.decode(errors="replace").rstrip())
            on_line(lines[-1])
        return child.wait(), "\n".join(lines)


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
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **OWN_GROUP)
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
