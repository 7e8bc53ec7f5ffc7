"""RAM as a control group allows it, read from files such as Linux has them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from multigpu.devices import ram as module
from multigpu.devices.ram import ram

GIB = 1 << 30
MACHINE = (64 * GIB, 40 * GIB)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "_of_the_machine", lambda: MACHINE)
    return tmp_path


def member(root: Path, *lines: str) -> None:
    write(root / "proc/self/cgroup", "\n".join(lines))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group(root: Path, path: str, limit: str, use: int, files: int) -> None:
    """One of the unified hierarchy."""
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", limit)
    write(folder / "memory.current", str(use))
    write(
        folder / "memory.stat",
        f"anon {use - files}\nfile {files}\nactive_file {files // 2}\ninactive_file {files // 2}",
    )


def test_without_groups_it_is_that_of_the_machine(root: Path) -> None:
    assert ram() == MACHINE
    member(root, "0::/")
    assert ram() == MACHINE, "the top group has no such files"


def test_a_limit_and_what_of_it_is_in_use(root: Path) -> None:
    member(root, "0::/job")
    group(root, "job", str(12 * GIB), use=8 * GIB, files=6 * GIB)
    assert ram() == (12 * GIB, 10 * GIB), "the pages of files are given back when they are needed"


def test_a_group_without_a_limit_inside_one_that_has_one(root: Path) -> None:
    member(root, "0::/user/job")
    group(root, "user", str(10 * GIB), use=11 * GIB, files=0)
    group(root, "user/job", "max", use=2 * GIB, files=0)
    assert ram() == (10 * GIB, 0), "not less than none"


def test_a_limit_above_which_the_group_is_slowed_down(root: Path) -> None:
    member(root, "0::/job")
    group(root, "job", str(12 * GIB), use=2 * GIB, files=0)
    write(root / "sys/fs/cgroup/job/memory.high", str(8 * GIB))
    assert ram() == (8 * GIB, 6 * GIB)


def test_in_a_container_the_top_is_its_own_group(root: Path) -> None:
    member(root, "0::/docker/0123abcd")
    group(root, ".", str(4 * GIB), use=GIB, files=0)
    assert ram() == (4 * GIB, 3 * GIB)


def test_the_older_kind_of_groups(root: Path) -> None:
    member(root, "5:devices:/job", "4:memory:/job", "0::/")
    folder = root / "sys/fs/cgroup/memory/job"
    write(folder / "memory.limit_in_bytes", str(12 * GIB))
    write(folder / "memory.usage_in_bytes", str(8 * GIB))
    write(folder / "memory.stat", f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}")
    write(folder.parent / "memory.limit_in_bytes", str((1 << 63) - 4096))
    write(folder.parent / "memory.usage_in_bytes", str(8 * GIB))
    write(folder.parent / "memory.stat", "")
    assert ram() == (12 * GIB, 6 * GIB)


def test_files_that_say_something_else_are_no_limit(root: Path) -> None:
    member(root, "0::/job")
    group(root, "job", "plenty", use=0, files=0)
    assert ram() == MACHINE


def test_a_limit_above_the_machine(root: Path) -> None:
    member(root, "0::/job")
    group(root, "job", str(100 * GIB), use=0, files=0)
    assert ram() == MACHINE


def test_without_psutil_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10, "SC_AVPHYS_PAGES": 4}
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "os", SimpleNamespace(sysconf=told.__getitem__))
    assert ram() == (40960, 16384)
