"""`multigpu worker`, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from multigpu.cli import FAILED, WRONG_INPUT, main
from multigpu.cli.worker import ready, split
from multigpu.remote import cluster


def arguments(folder: Path, **changed: str) -> list[str]:
    given = {"name": "node-b", "head": "127.0.0.2:6379", "comfyui": str(folder)} | changed
    return ["worker", *(f"--{name}={value}" for name, value in given.items())]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "node b"}, "'node b' names no node"),
        ({"head": "127.0.0.2"}, "'127.0.0.2' is no address of a head; give HOST:PORT"),
        ({"head": "ray://a/b:1"}, "'ray://a/b:1' is no address of a head"),
        ({"comfyui": "nowhere"}, "nowhere has no main.py; give the folder of ComfyUI"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], words: str
) -> None:
    (tmp_path / "main.py").touch()
    assert main(arguments(tmp_path, **changed)) == WRONG_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert main(arguments(tmp_path)) == FAILED
    assert f"; pip install '{cluster.REQUIRED}'" in capsys.readouterr().err


def test_what_comes_after_two_dashes_is_for_comfyui() -> None:
    assert split(["--name", "a", "--", "--cpu", "--", "x"]) == (["--name", "a"], ["--cpu", "--", "x"])
    assert split(["--name", "a"]) == (["--name", "a"], [])


def test_when_it_is_ready_it_says_what_to_type_elsewhere() -> None:
    devices = [{"name": "cuda:0", "total": 24 * 2**30}, {"name": "mps", "total": None}]
    text = ready("node-b", "192.168.1.20:6379", {"devices": devices})
    assert "\n  ray://node-b/cuda:0  24.00 GiB\n  ray://node-b/mps\n" in text
    assert "MULTIGPU_RAY=192.168.1.20:6379\n" in text
