"""Steps show their results whole or not at all, and know when they were done."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from devtools import console, hosts
from devtools.client import Client
from devtools.hosts import HOSTS, NEWEST, find
from devtools.places import Places
from devtools.problem import Problem
from devtools.steps import fingerprint, make_once, only_one, remove
from devtools.suite import Task, counted, finished, outcome


class Elsewhere(Places):
    """Another clone with the packages of this one."""

    python = Places.here().python


def _make(target: Path, inputs: str, text: str) -> None:
    def make(part: Path) -> None:
        assert list(part.iterdir()) == []
        (part / "file").write_text(text)
        if text == "fail":
            raise ValueError(text)

    make_once(target, inputs, make, target.parent / "lock", "It", "Making it")


def _content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_made_once_for_the_same_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made"
    _make(target, "a", "first")
    _make(target, "a", "second")
    assert (target / "file").read_text() == "first"
    assert capsys.readouterr().out.splitlines() == ["  Making it", "    done in 0 s", "  It: ready"]
    _make(target, "b", "third")
    assert (target / "file").read_text() == "third"
    assert _content(tmp_path) == ["lock", "made"]


def test_a_folder_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "made"
    _make(target, "a", "old")
    (tmp_path / ".made.part" / "left").mkdir(parents=True)  # by a run that was killed
    with pytest.raises(ValueError, match="fail"):
        _make(target, "b", "fail")
    assert (target / "file").read_text() == "old"
    assert _content(tmp_path) == ["lock", "made"]


def test_a_folder_without_its_stamp_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    _make(tmp_path / "made", "a", "new")
    assert (tmp_path / "made" / "file").read_text() == "new"


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "folder", target_is_directory=True)
    remove(tmp_path / "link")
    assert _content(tmp_path) == ["folder"]
    remove(tmp_path / "folder")
    remove(tmp_path / "folder")
    assert _content(tmp_path) == []


def test_a_fingerprint_is_of_the_contents_of_files(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("a")
    before = fingerprint("x", file)
    assert fingerprint("x", file) == before
    file.write_text("b")
    assert fingerprint("x", file) != before


def test_parts_of_a_fingerprint_do_not_run_together() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_one_at_a_time_and_a_dead_holder_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    hold = f"""
from pathlib import Path
import time
from devtools.steps import only_one
with only_one(Path({str(lock)!r})):
    print("held", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", hold], cwd=Places.here().root, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        monkeypatch.setattr(console, "line", lambda text: holder.kill())
        with only_one(lock):  # it has to wait, says so, and only the holder's death lets it in
            assert holder.wait(20) != 0


def _archive(path: Path, *members: tuple[str, bytes | None]) -> Path:
    """A tar file; a member without content is a symbolic link to /etc."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if content is not None else None)
    return path


def test_only_regular_files_of_the_tree_are_extracted(tmp_path: Path) -> None:
    archive = _archive(
        tmp_path / "a.tar.gz",
        ("c-1/vendor/ComfyUI/main.py", b"main"), ("c-1/vendor/ComfyUI/comfy/ops.py", b"ops"), ("c-1/setup.py", b"no"),
        ("c-1/vendor/ComfyUI/../../../out.py", b"no"), ("c-1/vendor/ComfyUI/link", None),
    )  # fmt: skip
    hosts.extract(archive, tmp_path / "tree")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"a.tar.gz", "tree/main.py", "tree/comfy/ops.py"}


def test_an_archive_without_a_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="carries no ComfyUI tree"):
        hosts.extract(_archive(tmp_path / "a.tar.gz", ("c-1/setup.py", b"")), tmp_path / "tree")


def test_a_download_with_another_hash_is_refused(tmp_path: Path) -> None:
    """By pip, and before anything of it is kept."""
    pins = Path("requirements", "hosts", f"{NEWEST.version}.txt")
    text = (Places.here().root / pins).read_text()
    places = Elsewhere(root=tmp_path / "clone", cache=tmp_path / "cache")
    (places.root / pins).parent.mkdir(parents=True)
    (places.root / pins).write_text(text.replace(text.partition("sha256:")[2][:4], "0000", 1))
    with pytest.raises(Problem, match="does not have the hash that is expected"):
        hosts.fetch(NEWEST, places)
    assert _content(places.dev / "hosts") == []


def test_every_host_of_the_table_can_be_found_by_version() -> None:
    assert [find(host.version) for host in HOSTS] == list(HOSTS)  # so no version is there twice
    with pytest.raises(Problem, match=r"0\.24\.1, 0\.30\.0"):
        find("1.0")


PYTEST = """..F
SKIPPED [2] tests/test_a.py:3: no GPU
FAILED tests/test_a.py::two - assert False
ERROR tests/test_a.py::four - no fixture
1 failed, 3 passed, 2 skipped, 1 error in 0.12s
a library says something when the process ends"""


def test_counts_come_from_what_pytest_says() -> None:
    tests, lint = Task("unit", ("pytest", "tests/unit")), Task("lint", ("ruff", "check"))
    counts, notes = outcome(tests, 1, PYTEST)
    assert counted(counts) == "3 passed, 2 failed, 2 skipped"
    assert [note.split(" ")[0] for note in notes] == ["SKIPPED", "FAILED", "ERROR"]
    assert counted(outcome(tests, 5, "no tests ran in 0.01s")[0]) == "0 passed, 0 failed, 0 skipped"
    assert counted(outcome(lint, 0, "All checks passed!")[0]) == "1 passed, 0 failed, 0 skipped"
    assert outcome(lint, 1, "")[1] == ["FAILED ruff ended with exit code 1"]


@pytest.mark.parametrize("end", ["", "INTERNALERROR> boom", "5 passed in 1.00s"])
def test_a_pytest_that_fails_without_a_failed_test_counts_as_one(end: str) -> None:
    """It crashed, or the coverage is below its limit."""
    counts, notes = outcome(Task("unit", ("pytest", "tests/unit")), 3, end)
    assert counts["failed"] == 1 and notes == ["FAILED pytest ended with exit code 3"]


def test_steps_and_tables_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with console.step("Working"):
        console.detail("a part")
    console.table([("a", "bb"), ("ccc", "d")])
    expected = ["  Working", "    a part", "    done in 0 s", "  a    bb", "  ccc  d"]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_client_without_a_server_says_so() -> None:
    with pytest.raises(OSError, match="refused"):
        Client("http://127.0.0.1:9").get("/system_stats")


def test_tasks_run_at_once_and_end_with_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tools: one whose tests pass and fail, one that succeeds, one that fails; and one that would never end."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "failing.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "test_one.py").write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert False\n")
    places = Places(root=tmp_path, cache=tmp_path)
    tasks = [Task("tests", ("pytest", "test_one.py")), Task("good", ("this",)), Task("bad", ("failing",))]
    results = {task.name: (text, *outcome(task, code, text)) for task, code, text, _ in finished(tasks, places)}
    assert {name: counted(counts) for name, (_, counts, _) in results.items()} == {
        "tests": "1 passed, 1 failed, 0 skipped",
        "good": "1 passed, 0 failed, 0 skipped",
        "bad": "0 passed, 1 failed, 0 skipped",
    }
    assert "assert False" in results["tests"][0] and "Beautiful is better than ugly." in results["good"][0]
    assert results["bad"][2] == ["FAILED failing ended with exit code 3"]

    def interrupt(text: str) -> None:
        if "zen" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(console, "line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(finished([Task("sleep", ("sleeper",)), Task("zen", ("this",))], places))
