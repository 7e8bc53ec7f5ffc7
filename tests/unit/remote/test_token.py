"""The token's file: private from the start, and refused when it is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from multigpu.errors import ClusterUnavailable
from multigpu.remote.token import check_token, make_token, token_file

posix = pytest.mark.skipif(sys.platform == "win32", reason="file modes are those of POSIX")


def test_it_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "token"
    assert make_token(path)
    text = path.read_text()
    assert not make_token(path)
    assert path.read_text() == text and len(text) == 64
    check_token(path)


@posix
def test_nobody_else_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_token(tmp_path / "folder" / "token")
    finally:
        os.umask(before)
    assert (tmp_path / "folder" / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


@posix
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    make_token(path)
    path.chmod(mode)
    with pytest.raises(ClusterUnavailable, match=f"chmod 600 {path}"):
        check_token(path)


def test_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(ClusterUnavailable, match=r"cannot be read from .*token \(FileNotFoundError\); copy that file"):
        check_token(tmp_path / "token")


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    with pytest.raises(ClusterUnavailable, match="has 6 characters"):
        check_token(path)


def test_it_is_where_rays_own_variable_says_or_in_a_folder_of_ours(tmp_path: Path) -> None:
    assert token_file({"RAY_AUTH_TOKEN_PATH": str(tmp_path)}) == tmp_path
    assert token_file({}) == token_file({"RAY_AUTH_TOKEN_PATH": ""}) == Path.home() / ".multigpu" / "ray_token"
