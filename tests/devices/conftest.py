"""One kind of simulated devices per process: SIMDEV is `cuda` (the default), `xpu`, `npu`, `mps` or `privateuseone`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devtools.hosts import Host, hosts_on
from devtools.server import Server
from tests.host.driver import spec_for
from tests.host.lifecycle import PACKS, Keeper, own_models
from tests.sim import simdev

KIND = os.environ.get("SIMDEV", "cuda").split(":")[0]
COUNT = 1 if KIND == "mps" else 3
FLAGS = (*simdev.HOST_FLAGS, "--directml") if KIND == "privateuseone" else simdev.HOST_FLAGS
TESTS = {
    "cuda": ["test_contexts", "test_lifecycle", "test_smart_memory"], "xpu": ["test_lifecycle", "test_old_torch"],
    "mps": ["test_one_device", "test_old_torch"], "privateuseone": ["test_directml"],
}  # fmt: skip
"""What is tested for a kind; for all other kinds `test_lifecycle`."""
SIM = Path(simdev.__file__).parents[1]


class Machine(Keeper):
    """A real ComfyUI on simulated devices."""

    def state(self) -> dict[str, Any]:
        return dict(self.client.get("/simdev"))

    def allocated(self, device: str) -> int:
        return int(self.state()["allocated"].get(device, 0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process of the same suite runs."""
    left_out = [item for item in items if item.path.stem not in TESTS.get(KIND, ["test_lifecycle"])]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@contextmanager
def started(host: Host, base: Path, *flags: str, **changes: Any) -> Iterator[Machine]:
    """ComfyUI with our pack on simulated devices, started with these flags besides the usual ones, and `changes` of the
    other fields of `ServerSpec`."""
    try:
        simdev.build(KIND)
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    spec = spec_for(
        host,
        base,
        Path(sys.executable),
        packs={**PACKS, "simdev_probe": SIM / "probe_pack"},
        models=own_models(base),
        runner=(str(SIM / "serve.py"),),
        environment={**simdev.CPU_LIMIT, "SIMDEV": f"{KIND}:{COUNT}:6g"},
        flags=(*FLAGS, *flags),
        **changes,
    )
    with Server(spec) as server:
        machine = Machine(server)
        yield machine
        assert machine.our_tracebacks() == []


@pytest.fixture(scope="module", params=hosts_on(KIND), ids=lambda host: host.version)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with started(request.param, tmp_path_factory.mktemp(f"devices-{request.param.version}")) as machine:
        yield machine


@pytest.fixture
def machine(serving: Machine) -> Iterator[Machine]:
    serving.forget()
    serving.client.post("/simdev", {"reset": True, "sabotage": None})
    yield serving
    races = serving.state()["races"]
    assert not races, f"{len(races)} races, the first: {races[0]['message']}"
