"""Runs a command with less RAM than the machine has, in a control group (cgroup) inside that of this process.

Needs root on Linux. A hierarchy of version 1 with a memory controller is used where it is mounted; otherwise version 2,
which is mounted in a temporary folder if it is not. The command sees it where a container would, in a mount namespace
of its own. Afterwards groups and mounts are as they were.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
"""Where programs look for them."""


class CannotLimit(Exception):
    """No such group can be made here; says why."""


@dataclass(frozen=True)
class RamLimit:
    """A group with a limit. `mounted` is where version 2 is mounted, if that is not where programs look for it."""

    folder: Path
    mounted: Path | None

    def run(self, command: Sequence[str]) -> int:
        """The exit code of a command in the group; -9 if it took more than the limit."""
        enter = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        there: list[str] = []
        if self.mounted is not None:
            enter = f'mount --bind "{self.mounted}" {GROUPS} && {enter}'
            there = ["unshare", "--mount"]
        return subprocess.run([*there, "sh", "-c", enter, "sh", *command], check=False).returncode

    def report(self) -> str:
        """The most bytes that the group has had, files in the page cache included, and what happened at its limit."""
        found = []
        for name in (
            "memory.peak",
            "memory.max_usage_in_bytes",
            "memory.events",
            "memory.failcnt",
            "memory.oom_control",
        ):
            with suppress(OSError):  # each kernel and version has some of them
                found.append(f"{name}: {' '.join((self.folder / name).read_text().split())}")
        return "; ".join(found)


@contextmanager
def ram_limit(count: int) -> Iterator[RamLimit]:
    """A group that may use `count` bytes of RAM, and no swap. Raises `CannotLimit`."""
    with ExitStack() as undo:
        try:
            limit = _made(count, undo)
        except (OSError, subprocess.CalledProcessError) as reason:
            raise CannotLimit(f"a group with a limit of RAM cannot be made here: {reason}") from reason
        yield limit


def _made(count: int, undo: ExitStack) -> RamLimit:
    own = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if "memory" in own and (GROUPS / "memory").is_dir():
        folder = _folder(GROUPS / "memory" / own["memory"], undo)
        (folder / "memory.limit_in_bytes").write_text(str(count))
        with suppress(OSError):
            (folder / "memory.memsw.limit_in_bytes").write_text(str(count))
        return RamLimit(folder, None)
    if "" not in own:
        raise CannotLimit("this process is in no control group")
    top = GROUPS if (GROUPS / "cgroup.controllers").exists() else _mounted(undo)
    parent = top / own[""]
    allow(parent, "memory", undo)
    folder = _folder(parent, undo)
    (folder / "memory.max").write_text(str(count))
    with suppress(OSError):
        (folder / "memory.swap.max").write_text("0")
    return RamLimit(folder, None if top == GROUPS else top)


def _folder(parent: Path, undo: ExitStack) -> Path:
    folder = parent / "ram_limit"
    folder.mkdir()
    undo.callback(folder.rmdir)
    return folder


def _mounted(undo: ExitStack) -> Path:
    folder = undo.enter_context(tempfile.TemporaryDirectory())
    subprocess.run(["mount", "-t", "cgroup2", "none", folder], check=True)
    undo.callback(subprocess.run, ["umount", folder], check=True)
    return Path(folder)


def allow(parent: Path, controller: str, undo: ExitStack) -> None:
    """Let the groups inside a group of version 2 use a controller. Raises `CannotLimit` where it has none.

    Version 2 allows that only in a group without processes of its own, so they move into one inside it for as long.
    """
    has = (parent / "cgroup.controllers").read_text().split()
    if controller not in has:
        raise CannotLimit(f"{parent} has no {controller} controller, only {' '.join(has) or 'none'}")
    allowed = parent / "cgroup.subtree_control"
    if controller in allowed.read_text().split():
        return
    try:
        allowed.write_text(f"+{controller}")
    except OSError:
        inside = parent / "others"
        inside.mkdir()
        undo.callback(inside.rmdir)
        undo.callback(_move, inside, parent)
        _move(parent, inside)
        allowed.write_text(f"+{controller}")
    undo.callback(allowed.write_text, f"-{controller}")


def _move(one: Path, other: Path) -> None:
    """All processes of a group into another one, as far as they can be moved."""
    for _ in range(3):  # they may start new ones meanwhile
        for process in (one / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (other / "cgroup.procs").write_text(process)
