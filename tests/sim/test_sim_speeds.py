"""Speeds are measured as the machine has them: links through the lane that streaming uses, compute by its own clock."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from multigpu.plan import CPU, DeviceId
from multigpu.stream import speeds
from multigpu.stream.lanes import StreamLane
from multigpu.stream.speeds import layer_flops, link_bandwidth
from tests.sim.simdev import World

MIB = 1 << 20


@pytest.fixture
def ids(sim: World) -> list[DeviceId]:
    return [DeviceId.parse(device) for device in sim.devices]


@pytest.fixture(autouse=True)
def narrow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, which computes for the simulated devices, takes a minute for a product of the full width in 16 bits."""
    monkeypatch.setattr(speeds, "WIDTH", 512)


def test_the_link_from_ram_is_measured_as_it_streams(sim: World, ids: list[DeviceId]) -> None:
    """The engine pins RAM for CUDA only; elsewhere streaming copies from pageable memory, and so does measuring."""
    sim.set_bandwidth("cpu", ids[0].index, 20e9, pageable=2e9)
    assert link_bandwidth(CPU, ids[0]) == pytest.approx(20e9 if sim.kind == "cuda" else 2e9)


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_link_has_the_same_speed_in_every_process(
    sim: World, ids: list[DeviceId], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It wakes up during the first copies, and now and then other work takes half of it."""
    chance, real, copies = random.Random(seed), StreamLane.copy, itertools.count()

    def noisy(lane: StreamLane, *arguments: Any) -> Any:
        share = 0.5 if next(copies) < 12 or chance.random() < 0.3 else chance.uniform(0.98, 1.0)
        sim.set_bandwidth("cpu", 0, 55e9 * share)
        return real(lane, *arguments)

    monkeypatch.setattr(StreamLane, "copy", noisy)
    assert link_bandwidth(CPU, ids[0]) == pytest.approx(55e9, rel=0.025)


def test_links_between_devices_have_a_direction(sim: World, ids: list[DeviceId]) -> None:
    sim.set_bandwidth(1, 0, 8e9)
    sim.set_bandwidth(0, 1, 3e9)
    assert link_bandwidth(ids[1], ids[0]) == pytest.approx(8e9)
    assert link_bandwidth(ids[0], ids[1]) == pytest.approx(3e9)
    assert link_bandwidth(ids[0], ids[0]) is None


def test_without_peer_access_both_links_to_ram_count(sim: World, ids: list[DeviceId]) -> None:
    """Each copy goes in pieces over both links, which are busy at once."""
    sim.peer_access(1, 0, False)
    sim.set_bandwidth(1, 0, 50e9)
    sim.set_bandwidth(1, "cpu", 12e9)
    sim.set_bandwidth("cpu", 0, 12e9)
    assert link_bandwidth(ids[1], ids[0]) == pytest.approx(12e9)


def test_the_compute_rate(sim: World, ids: list[DeviceId]) -> None:
    sim.set_compute_rate(0, flops=1e10)
    sim.set_compute_rate(1, flops=4e10)
    assert layer_flops(ids[0]) == pytest.approx(1e10)
    assert layer_flops(ids[1]) == pytest.approx(4e10)


def test_the_trial_grows_until_starting_it_no_longer_counts(sim: World, ids: list[DeviceId]) -> None:
    sim.set_compute_rate(0, flops=2e10, per_op=1e-3)
    assert layer_flops(ids[0]) == pytest.approx(2e10, rel=0.2)


def test_a_clock_that_stands_still_tells_nothing(sim: World, ids: list[DeviceId]) -> None:
    assert link_bandwidth(CPU, ids[0]) is None
    assert link_bandwidth(ids[1], ids[0]) is None
    assert layer_flops(ids[0]) is None


def test_without_room_nothing_is_told_and_nothing_is_left(sim: World, ids: list[DeviceId]) -> None:
    sim.set_bandwidth("cpu", 0, 20e9)
    sim.set_bandwidth(1, 0, 20e9)
    sim.set_compute_rate(0, flops=1e10)
    before = [sim.allocated(device) for device in sim.devices]
    sim.limit(0, sim.allocated(0) + MIB // 4)
    assert link_bandwidth(CPU, ids[0]) is None
    assert link_bandwidth(ids[1], ids[0]) is None
    assert layer_flops(ids[0]) is None
    assert [sim.allocated(device) for device in sim.devices] == before
    assert sim.pinned_bytes() == 0


def test_measuring_leaves_the_process_as_it_was(sim: World, ids: list[DeviceId]) -> None:
    module = torch.get_device_module(sim.kind)
    sim.set_bandwidth("cpu", 0, 20e9)
    sim.set_bandwidth(1, 0, 20e9)
    sim.set_compute_rate(0, flops=1e10)

    def state() -> list[object]:
        streams = [module.current_stream(device) for device in sim.devices]
        memory = [(sim.allocated(device), sim.reserved(device)) for device in sim.devices]
        return [module.current_device(), streams, memory, torch.is_inference_mode_enabled()]

    module.empty_cache()
    with module.device(2), torch.inference_mode():
        before = state()
        assert link_bandwidth(CPU, ids[0]) and link_bandwidth(ids[1], ids[0]) and layer_flops(ids[0])
        assert state() == before
    assert sim.pinned_bytes() == 0
    assert all(sim.peak(device) < 100 * MIB + sim.allocated(device) for device in sim.devices)
