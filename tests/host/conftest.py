"""A real ComfyUI per row of the host table, started once per run; `start_host` starts further ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import models
from devtools.hosts import HOSTS, NEWEST, Host, find
from devtools.places import Places
from devtools.server import Server
from tests.host.driver import Driver, spec_for
from tests.host.lifecycle import PACKS, Keeper, own_models

StartHost = Callable[..., Driver]


ROWS = [find(os.environ["MULTIGPU_HOST"])] if os.environ.get("MULTIGPU_HOST") else HOSTS
"""Every host version, or the one that MULTIGPU_HOST names."""

PYTHON = Path(os.environ.get("MULTIGPU_TEST_PYTHON") or sys.executable).absolute()
"""What the servers run with: this Python, or another with other versions of torch and of ComfyUI's requirements."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "newest: what is tested does not depend on the version of ComfyUI")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked `newest` run on the newest ComfyUI only."""
    left_out = [item for item in items if item.get_closest_marker("newest") and _row(item) != NEWEST]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _row(item: pytest.Item) -> Host:
    row: Host = item.callspec.params["host"]  # type: ignore[attr-defined]
    return row


@pytest.fixture(scope="session", params=ROWS, ids=lambda host: host.version)
def host(request: pytest.FixtureRequest) -> Host:
    """Every test that uses this, or a fixture that does, runs for every row of the table."""
    row: Host = request.param
    places = Places.here()
    if not places.host_tree(row.version).is_dir() or not models.folder(places).is_dir():
        pytest.fail(f"ComfyUI {row.version} or the tiny models are not there; `python dev.py test` makes them")
    return row


@pytest.fixture(scope="session")
def comfy(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """The shared server of a host version. Tests must not leave models loaded that would disturb another test."""
    yield from served(host, tmp_path_factory.mktemp(f"host-{host.version}"))


@pytest.fixture(scope="module")
def untouched(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A server on which no test uses one of our nodes, to see what loading the pack alone changes."""
    yield from served(host, tmp_path_factory.mktemp(f"untouched-{host.version}"))


@pytest.fixture(scope="session")
def keeping(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    """The server of the lifecycle tests, with models and a pack of their own."""
    base = tmp_path_factory.mktemp(f"keeping-{host.version}")
    for driver in served(host, base, packs=PACKS, models=own_models(base)):
        yield Keeper(driver.server)


@pytest.fixture
def keeper(keeping: Keeper) -> Keeper:
    """That server with nothing loaded and no `keep_loaded` choice in effect."""
    keeping.forget()
    return keeping


@pytest.fixture
def start_host(host: Host, tmp_path: Path) -> Iterator[StartHost]:
    """Starts a server of one's own, with any field of `ServerSpec` changed; stopped when the test ends."""
    started: list[Iterator[Driver]] = []

    def start(**changes: Any) -> Driver:
        serving = served(host, tmp_path / f"base-{len(started)}", **changes)
        started.append(serving)
        return next(serving)

    yield start
    for serving in reversed(started):
        next(serving, None)


def served(host: Host, base: Path, **changes: Any) -> Iterator[Driver]:
    with Server(spec_for(host, base, PYTHON, **changes)) as server:
        driver = Driver(server)
        yield driver
        ours = driver.our_tracebacks()
    assert not ours, "ComfyUI logged tracebacks through our code:\n" + "\n".join(ours)
