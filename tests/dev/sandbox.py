"""A copy of this clone in a folder of its own, to run `dev.py` in and to interrupt it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools.places import Places

SEE_PROCESSES = sys.platform == "linux"
needs_proc = pytest.mark.skipif(not SEE_PROCESSES, reason="processes are found through /proc, a part of Linux")

MOUNT = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
CAN_MOUNT = shutil.which("unshare") is not None and (
    subprocess.run([*MOUNT, "mount -t tmpfs -o size=1m none /mnt"], capture_output=True, check=False).returncode == 0
)
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="a disk of its own cannot be mounted here")


def assert_one_sentence(code: int, output: str, *parts: str) -> None:
    """The last line is the sentence; no traceback before it."""
    assert code == 2, output
    assert "Traceback" not in output
    last = output.rstrip().splitlines()[-1]
    assert last.endswith(".") and all(part in last for part in parts), last


class Sandbox:
    """`environment` is what `dev.py` runs with; a mark in it finds every process that came from here."""

    def __init__(self, root: Path, *, ready_environment: bool) -> None:
        """With `ready_environment` the sandbox shares the clone's environments; without, it has none."""
        self.root = root
        here = Places.here()
        for name in _files(here.root):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here.root / name, root / name)
        if ready_environment:
            (root / ".dev").mkdir()
            for folder in (here.venv, *here.dev.glob("python-*")):
                (root / folder.relative_to(here.root)).symlink_to(folder, target_is_directory=True)
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, "MULTIGPU_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run `dev.py`, its output to be read line by line."""
        return subprocess.Popen(
            [sys.executable, "-u", "dev.py", *arguments],
            cwd=self.root, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str, timeout: float = 240.0) -> tuple[int, str]:
        """Exit code and output of `dev.py`."""
        with self.start(*arguments) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return process.returncode, output

    def run_mounted(self, *arguments: str, mount: Path, options: str) -> tuple[int, str]:
        """Run `dev.py` where `mount` and what is in it are on a disk of their own, mounted with `options` of tmpfs."""
        kept = f"{mount}.kept"
        fill = f"cp -a {mount} {kept} && mount -t tmpfs none {mount} && cp -a {kept}/. {mount}/ && rm -r {kept}"
        script = f"{fill} && mount -o remount,{options} {mount} && cd {self.root} && exec {sys.executable} dev.py"
        result = subprocess.run(
            [*MOUNT, f"{script} {' '.join(arguments)}"], env=self.environment, text=True, timeout=240, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return result.returncode, result.stdout

    def go_offline(self) -> None:
        """From now on pip reaches no package index, and has nothing in its cache."""
        self.environment = {name: value for name, value in self.environment.items() if not name.startswith("PIP_")}
        self.environment |= {
            "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_NO_CACHE_DIR": "1",
            "PIP_RETRIES": "0",
        }  # fmt: skip

    def interrupt(self, *arguments: str, at: str, during: str, how: signal.Signals) -> tuple[int, str]:
        """Run `dev.py` until it has printed `at` and a process with `during` in its command runs; send a signal."""
        seen = ""
        with self.start(*arguments) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    seen += line
                    if at in line:
                        break
                while not any(during in command for command in self.processes()):
                    assert process.poll() is None, f"dev.py ended without {at!r} and {during!r}:\n{seen}"
                    time.sleep(0.01)
                process.send_signal(how)
                process.wait(30)
                seen += process.stdout.read()
            finally:
                process.kill()
        return process.returncode, seen

    def processes(self) -> list[str]:
        """Command lines of all living processes that came from here."""
        return list(_with_mark(self.mark.encode()))

    def wait_until_alone(self, timeout: float = 20.0) -> list[str]:
        """Wait for those processes to end; returns the ones that did not."""
        end = time.monotonic() + timeout
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left


def _files(root: Path) -> list[str]:
    """What a clone has, changes that are not committed included."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (root / name).is_file()]


def _with_mark(mark: bytes) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            found = mark in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if found and command:  # an ended process that nobody has waited for has no command line
            yield command.replace(b"\0", b" ").decode(errors="replace")
