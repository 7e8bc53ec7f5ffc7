"""The copies: as many bytes as the plan says, never late, never racing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio

pytestmark = pytest.mark.accelerator


def links_of_steps(studio: Studio, placed: Any, steps: int) -> dict[str, int]:
    """Bytes that came to the compute device, by source, in one sampling of `steps` steps."""
    studio.world.reset()
    studio.latent(placed, steps=steps)
    zero = studio.accelerators[0]
    return {source: studio.world.moved(source, zero) for source in ("cpu", *studio.accelerators[1:])}


def test_every_step_moves_exactly_the_plans_bytes(studio: Studio) -> None:
    model = studio.flux()
    studio.latent(model)
    inputs = links_of_steps(studio, model, 5)  # conditions, noise, timesteps: what an unplaced model receives
    resident = studio.place(model, f"{studio.accelerators[0]},100%")
    studio.latent(resident)
    assert links_of_steps(studio, resident, 5) == inputs
    placed = studio.place(model)
    planned = studio.planned(placed)
    studio.latent(placed)
    moved = links_of_steps(studio, placed, 5)
    assert moved == {source: inputs[source] + 5 * planned[source] for source in inputs}


def test_after_the_first_step_every_use_is_expected(studio: Studio) -> None:
    placed = studio.place(studio.flux())
    studio.latent(placed, steps=2)
    counters = studio.states.of(placed).residence.streamer.counters
    misses = counters.misses
    studio.latent(placed, steps=4)
    assert counters.misses == misses
    assert counters.unstaged == counters.foreign == 0


@pytest.mark.cuda
def test_a_snapshot_waits_for_no_device(studio: Studio) -> None:
    """Neither for what computes nor for what is copied when it is taken."""
    from multigpu.host.snapshots import Snapshots

    placed = studio.place(studio.flux())
    studio.latent(placed)
    zero, *_ = studio.accelerators
    studio.world.set_compute_rate(zero, flops=1e6)
    matrix = torch.zeros(100, 100, device=zero)
    torch.cuda.synchronize(zero)
    before = studio.world.clock()
    matrix @ matrix
    (pending := torch.cuda.Event()).record()
    taken = Snapshots(studio.placer.inventory, list, threading.RLock()).take()
    assert taken.models[0].plan is not None and studio.world.clock() == before
    assert not pending.query(), "it still computes"
    pending.synchronize()
    assert studio.world.clock() > before


@pytest.mark.cuda
def test_a_removed_wait_is_seen(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward no longer waits for its copy: numbers go wrong and the race detector says so."""
    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    placed = studio.place(model)
    stream = type(torch.cuda.current_stream())
    real = stream.wait_event

    def forgetful(self: Any, event: Any) -> None:
        if self.stream_id != torch.cuda.default_stream(self.device).stream_id:
            real(self, event)

    monkeypatch.setattr(stream, "wait_event", forgetful)
    broken = studio.latent(placed)
    monkeypatch.undo()
    assert studio.world.take_races()
    assert not torch.equal(broken, stock)


def test_overwriting_ring_bytes_too_early_is_seen(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.stream.streamer import Streamer

    placed = studio.place(studio.flux())
    monkeypatch.setattr(Streamer, "_overwrite", lambda self, extent: [])
    studio.latent(placed)
    monkeypatch.undo()
    assert studio.world.take_races()


@pytest.mark.cuda
def test_donors_without_peer_access_go_through_ram(studio: Studio) -> None:
    zero, one, two = studio.accelerators
    studio.world.peer_access(zero, one, False)
    studio.world.set_bandwidth(one, zero, 1e9)
    studio.world.set_bandwidth(one, "cpu", 20e9)
    studio.world.set_bandwidth("cpu", zero, 20e9)
    model = studio.flux()
    stock = studio.latent(model)
    studio.unload()
    placed = studio.place(model)
    assert torch.equal(studio.latent(placed), stock)
    links = ((one, "cpu"), (one, zero), (two, zero))
    before = [studio.world.moved(*link) for link in links]
    studio.latent(placed, steps=3)
    through, direct, other = (studio.world.moved(*link) - was for link, was in zip(links, before, strict=True))
    assert through == 3 * studio.planned(placed)[one]
    assert direct == 0
    assert other == 3 * studio.planned(placed)[two]


@pytest.mark.cuda
def test_streaming_hides_behind_compute(studio: Studio) -> None:
    """By the simulator's clock: a step with a third of the bytes streamed takes little longer than a resident one."""
    zero = studio.accelerators[0]
    model = studio.flux()

    def step(text: str) -> float:
        studio.unload()
        placed = studio.place(model, text, ring=None)
        studio.latent(placed)
        torch.cuda.synchronize()
        begin = studio.world.clock()
        studio.latent(placed, steps=6)
        torch.cuda.synchronize()
        return (studio.world.clock() - begin) / 6

    studio.world.set_compute_rate(zero, flops=2e11)
    studio.world.set_bandwidth("cpu", zero, 25e9)
    resident, streamed = step(f"{zero},100%"), step(f"{zero},67%;cpu,*")
    serial = resident + 0.33 * 38.9e6 / 25e9
    assert resident < streamed < resident + 0.25 * (serial - resident)
