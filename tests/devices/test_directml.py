"""Placing with ComfyUI's `--directml`, simulated: devices without streams, a current device or a known size of memory.

ComfyUI takes 1 GiB for the free memory of such a device, so it unloads a model as soon as the next one is loaded.
"""

from __future__ import annotations

import re

import pytest

from devtools.client import Workflow
from tests.devices.conftest import Machine
from tests.host.driver import Picture
from tests.host.lifecycle import BOTH, flux

ZERO, ONE = "directml:0", "directml:1"
TORCH_ZERO, TORCH_ONE = "privateuseone:0", "privateuseone:1"


def spread(
    seed: int, text: str, compute: str = "default", keep: str = "default", lora: float | None = None
) -> Workflow:
    """The Flux workflow with its model spread, and a Memory Report while that is loaded."""
    workflow = flux(seed, lora=lora, after="MultiGPUMemoryReport", model=keep)
    widgets = {"compute_device": compute, "mode": "expert", "expert_mode_allocations": text}
    workflow["place_model"]["inputs"] |= widgets
    return workflow


@pytest.mark.parametrize(
    ("compute", "text", "computes", "homes"),
    [
        ("default", "directml:0,50%;cpu,50%", ZERO, {ZERO, "cpu"}),
        ("directml:1", "directml:0,30%;directml:1,40%;cpu,*", ONE, {ZERO, ONE, "cpu"}),
        ("gpu:1", "directml,50%;gpu:1,50%", ONE, {ZERO, ONE}),
    ],
)
def test_a_spread_model_draws_the_same(
    machine: Machine, compute: str, text: str, computes: str, homes: set[str]
) -> None:
    stock = machine.run(flux(seed=41))
    machine.free(**BOTH)
    ours = machine.run(spread(41, text, compute))
    assert [Picture.decode(file) for file in ours.images] == [Picture.decode(file) for file in stock.images]
    (report,) = ours.history["outputs"]["after"]["text"]
    found = re.search(r"^- Flux \(default\) computes on (\S+): ([^;]+)", report, re.MULTILINE)
    assert found is not None, report
    assert found[1] == computes and {part.rpartition(" on ")[2] for part in found[2].split(", ")} == homes
    machine.free(**BOTH)
    assert machine.models() == [] and machine.allocated(TORCH_ZERO) == machine.allocated(TORCH_ONE) == 0


def test_loras_come_and_go(machine: Machine) -> None:
    strengths = (0.8, 0.3, None)
    stock = [machine.draw(flux(seed=43, lora=strength)) for strength in strengths]
    machine.free(**BOTH)
    for strength, picture in zip(strengths, stock, strict=True):
        assert machine.draw(spread(43, "directml:0,30%;directml:1,40%;cpu,*", lora=strength)) == picture
    assert len(set(stock)) == 3


def test_a_kept_model_stays(machine: Machine) -> None:
    machine.run(spread(42, "directml:0,50%;cpu,50%", keep="keep"))
    machine.free(**BOTH)
    assert machine.held() == ["Flux"]
