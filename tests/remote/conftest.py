"""One cluster for the whole part: two workers with an echo service, on loopback addresses of this machine."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multigpu.remote.cluster import Cluster, Relay, start_worker
from multigpu.remote.token import make_token
from tests.remote.processes import Descendants

ECHO = "tests.remote.echo:start"
NOWHERE = Path("no ComfyUI")


@pytest.fixture(scope="session", autouse=True)
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The token of all clusters here, not that of whoever runs the tests; and a temporary folder for all processes.

    Its name is short, because Ray makes sockets in it, whose names must not be longer than about a hundred characters.
    """
    path = tmp_path_factory.mktemp("token") / "ray_token"
    make_token(path)
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("TMPDIR", folder)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torch")))  # torch leaves a folder
        patch.setattr(tempfile, "tempdir", folder)
        yield path


@pytest.fixture(scope="session")
def head() -> str:
    with socket.create_server(("127.0.0.2", 0)) as free:
        return f"127.0.0.2:{free.getsockname()[1]}"


@pytest.fixture(scope="session")
def workers(head: str) -> Iterator[dict[str, Relay]]:
    """node-b, which is the head too, and node-c. When they end, nothing of theirs is left."""
    started = Descendants()
    first = start_worker("node-b", head, NOWHERE, [], head_here=True, service=ECHO)
    found = {"node-b": first}
    try:
        found["node-c"] = start_worker("node-c", head, NOWHERE, [], head_here=False, service=ECHO)
        yield found
    finally:
        for worker in reversed(found.values()):
            worker.close()
    assert started.left() == []


@pytest.fixture(scope="session")
def cluster(head: str, workers: dict[str, Relay]) -> Iterator[Cluster]:
    cluster = Cluster(head)
    yield cluster
    cluster.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads
