"""The other machine spreads and streams the weights as its place node asks: here on GPUs that are simulated there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devtools import models
from devtools.places import Places
from tests.host.workflows import flux, placed
from tests.remote.comfyui import arguments
from tests.remote.components.conftest import HOST
from tests.remote.components.pipe import PipeLink, PipeWorker
from tests.remote.components.studio import Studio
from tests.sim import simdev

GPU = "ray://node-g/cuda:0"


@pytest.fixture(scope="module")
def node_g(studio: Studio, tree: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipeLink]:
    """A machine with two GPUs."""
    try:
        simdev.build("cuda")
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("node-g")
    given = arguments(folder / "base", models.folder(Places.here()), HOST, simdev.HOST_FLAGS)
    worker = PipeWorker(folder, tree, given, "cuda:2:2g")
    link = studio.cluster.links["node-g"] = PipeLink("node-g", worker, studio.link.check)
    yield link
    del studio.cluster.links["node-g"]
    worker.close()


def test_weights_are_spread_over_the_devices_of_the_other_machine(studio: Studio, node_g: PipeLink) -> None:
    whole = studio.draw(placed(flux(), "model", compute_device=GPU))
    spread = placed(
        flux(), "model", compute_device=GPU, mode="expert", expert_mode_allocations="cuda:0,40%;cuda:1,20%;cpu,*"
    )
    assert torch.equal(studio.draw(spread), whole)
    told = [its.resting for its in studio.remote._runtime.snapshots.take().models if its.device == GPU]
    (resting,) = (homes for homes in told if len(homes) > 1)
    assert {device: count / sum(resting.values()) for device, count in resting.items()} == {
        GPU: pytest.approx(0.4, abs=0.05),
        "ray://node-g/cuda:1": pytest.approx(0.2, abs=0.05),
        "ray://node-g/cpu": pytest.approx(0.4, abs=0.05),
    }
