"""A real ComfyUI in this process, and a second one in another, which stands for the machine `node-b`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools import models
from devtools.hosts import NEWEST, find
from devtools.places import Places
from multigpu.remote.cluster import LOST, READY, Node, NodeDevice
from multigpu.units import GIB
from tests.remote.comfyui import arguments
from tests.remote.components.pipe import PipeLink, PipeWorker, loaded
from tests.remote.components.studio import Studio

HOST = find(os.environ["MULTIGPU_HOST"]) if os.environ.get("MULTIGPU_HOST") else NEWEST


class PipeCluster:
    """The machines of these tests: `node-b`."""

    def __init__(self) -> None:
        self.links: dict[str, PipeLink] = {}
        self.lost: list[str] = []

    def nodes(self) -> list[Node]:
        devices = (NodeDevice("cpu", 8 * GIB, 5 * GIB),)
        lost = [Node(name, LOST) for name in self.lost]
        return lost + [Node(name, READY, devices) for name in self.links if name not in self.lost]

    def link(self, node: str) -> PipeLink:
        return self.links[node]


@pytest.fixture(scope="session")
def tree() -> Path:
    return Places.here().host_tree(HOST.version)


def own_files(folder: Path) -> Path:
    """The tiny models in a folder of a machine's own. A file there may be replaced, but not written into."""
    return Path(shutil.copytree(models.folder(Places.here()), folder / "models", copy_function=os.link))


@pytest.fixture(scope="session")
def node_b(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipeWorker]:
    folder = tmp_path_factory.mktemp("node-b")
    worker = PipeWorker(folder, tree, arguments(folder / "base", own_files(folder), HOST))
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def studio(tree: Path, node_b: PipeWorker, tmp_path_factory: pytest.TempPathFactory) -> Studio:
    """This process as the machine where the user sits, with model files of its own."""
    base = tmp_path_factory.mktemp("here")
    own = own_files(base)
    os.environ["MULTIGPU_RAY"] = "127.0.0.1:9"
    from multigpu.host.remote.boot import boot

    service = boot(tree, arguments(base / "base", own, HOST))
    cluster = PipeCluster()
    cluster.links["node-b"] = PipeLink("node-b", node_b, loaded("host.remote.client").stop_if_interrupted)
    remote = sys.modules["comfyui_multigpu"].current().remote
    remote._cluster = cluster
    return Studio(service, remote, cluster, own, node_b.log.with_name("models"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The warnings of ComfyUI and of what it imports are not ours."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
