"""A Ray node of ours: started as a process that ends with whoever started it, with everything that Ray starts below it.

This file is also what runs there, twice. The guard waits until its input ends, which happens when its parent lets go of
it or dies in whatever way; then it kills all processes of the node's session and deletes the node's folder. The node
itself, the leader of that session, does the former if the guard is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ..errors import ClusterUnavailable

ROOT = Path(__file__).resolve().parents[2]
STARTED = "Ray runtime started"
START_SECONDS = 60.0
INSIDE = "--inside"
RUN = "from multigpu.remote.{module} import main; main()"
"""What a process of ours runs. ComfyUI imports this pack under another name, so `python -m` would not do."""

INLINE_BYTES = 6 << 20
"""Up to this size a message travels within the call; larger ones go through Ray's object store, which is faster only
from there on."""

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    "RAY_task_rpc_inlined_bytes_limit": str(INLINE_BYTES),
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # how long a lost head is waited for
    "RAY_health_check_period_ms": "500",  # a machine that no longer answers is lost after about four seconds
    "RAY_health_check_timeout_ms": "800",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
}
"""What every process of ours that has to do with Ray is started with."""

OPTIONS = (
    "--block", "--disable-usage-stats", "--include-log-monitor=false", "--num-cpus=0",
    "--num-gpus=0", "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
)  # fmt: skip
"""No CPU or GPU is offered: Ray puts nothing on the node but what asks for it by name. Free ports are used, so that
several nodes can be on one machine."""


def environment(token: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that uses Ray. An address or a token that the user has set for Ray is left out."""
    left_out = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE")
    kept = {name: value for name, value in base.items() if name not in left_out}
    paths = [str(ROOT), *filter(None, [base.get("PYTHONPATH")])]
    kept.setdefault("OMP_NUM_THREADS", str(psutil.cpu_count(logical=False) or 1))  # where Ray would say 1
    return {**kept, **ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": os.pathsep.join(paths)}


class RayNode:
    """A running node."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        """Start it and wait until it runs; `options` are those of `ray start`.

        `folder` is the node's own and deleted with it. Raises `ClusterUnavailable` with what Ray said last.
        """
        every = (str(folder), *OPTIONS, f"--temp-dir={folder / 'ray'}")
        command = [sys.executable, "-c", RUN.format(module="node"), *every, *options]
        deadline = time.monotonic() + START_SECONDS
        path = folder / "node.log"
        with path.open("wb") as log, path.open("rb") as written:
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
            said = ""
            while STARTED not in said:
                ended = self._guard.poll() is not None or time.monotonic() > deadline
                said += written.read().decode(errors="replace")
                if ended and STARTED not in said:
                    self.stop()
                    raise ClusterUnavailable(f"no Ray node could be started here: {last_line(said)}")
                time.sleep(0.05)

    def wait(self) -> None:
        """Return when it has ended."""
        self._guard.wait()

    def stop(self) -> None:
        """End it; returns when all its processes are gone."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self.wait()


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def main() -> None:
    """Be the guard, or the node that it guards."""
    first, *options = sys.argv[1:]
    if first == INSIDE:
        _node(options)
    else:
        _guard(Path(first), options)


def _guard(folder: Path, options: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everybody, the parent decides
    command = [sys.executable, "-c", RUN.format(module="node"), INSIDE, *options]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    threading.Thread(target=_wait_for_end_of_input, args=(node.kill,), daemon=True).start()
    node.wait()
    _kill_session(node.pid)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the thread sits in a read that never ends


def _node(options: Sequence[str]) -> None:
    threading.Thread(target=_wait_for_end_of_input, args=(_kill_own_session,), daemon=True).start()
    from ray.scripts.scripts import cli

    cli(["start", *options], prog_name="ray")


def _wait_for_end_of_input(then: Callable[[], object]) -> None:
    while os.read(0, 4096):
        continue
    then()


def _kill_session(leader: int) -> None:
    """Kill every process of a session. Ray's workers are in it, but have process groups of their own."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(leader)], capture_output=True, check=False)
        return
    for process in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process) == leader and process != os.getpid():
                os.kill(process, signal.SIGKILL)


def _kill_own_session() -> None:
    _kill_session(os.getpid())
    os._exit(1)
