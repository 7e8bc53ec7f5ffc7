"""Streams are FIFOs that run as late as the program allows; events order them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def api(sim):
    return torch.get_device_module(sim.kind)


@pytest.fixture
def queued(sim, api):
    """A pinned source of ones, a device tensor of zeros, and a side stream on which the copy between them is queued."""
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4, device=sim.device(0))
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        target.copy_(source, non_blocking=True)
    return source, target, side


def test_a_copy_is_late_until_its_stream_is_waited_for(sim, api, queued):
    _, target, side = queued
    assert target.sum().item() == 0
    assert [race.kind for race in sim.take_races()] == ["read-after-write"]
    api.current_stream(sim.device(0)).wait_stream(side)
    assert target.sum().item() == 4


def test_an_event_orders_another_stream(sim, api, queued):
    _, target, side = queued
    event = api.Event()
    event.record(side)
    api.current_stream(sim.device(0)).wait_event(event)
    assert target.sum().item() == 4


def test_an_event_covers_only_what_came_before_it(sim, api, queued):
    source, target, side = queued
    event = side.record_event()
    other = torch.zeros(4, device=sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        other.copy_(source, non_blocking=True)
    api.current_stream(sim.device(0)).wait_event(event)
    assert target.sum().item() == 4
    assert other.sum().item() == 0
    assert [race.kind for race in sim.take_races()] == ["read-after-write"]
    side.synchronize()


@pytest.mark.parametrize("how", ["event", "stream", "device", "accelerator", "query"])
def test_the_host_can_wait(sim, api, queued, how):
    _, target, side = queued
    event = side.record_event()
    if how == "query":
        assert not event.query()
        assert event.query()
    else:
        {
            "event": event.synchronize,
            "stream": side.synchronize,
            "device": lambda: api.synchronize(sim.device(0)),
            "accelerator": lambda: torch.accelerator.synchronize(sim.device(0)),
        }[how]()
    assert target.sum().item() == 4


def test_synchronising_one_device_leaves_the_others_late(sim, api, queued):
    _, target, _ = queued
    api.synchronize(sim.device(1))
    assert target.sum().item() == 0
    sim.take_races()


def test_an_event_that_was_never_recorded_holds_nobody(sim, api):
    event = api.Event()
    assert event.query()
    event.synchronize()
    api.current_stream(sim.device(0)).wait_event(event)
    assert torch.ones(2, device=sim.device(0)).sum().item() == 2


def test_recording_again_replaces_the_moment(sim, api, queued):
    source, target, side = queued
    event = side.record_event()
    with api.stream(side):
        target.mul_(3)
    side.record_event(event)
    event.synchronize()
    assert target.sum().item() == 12


def test_elapsed_time_needs_finished_timing_events(sim, api):
    sim.set_bandwidth("cpu", sim.device(0), 1e9)
    first, last = api.Event(enable_timing=True), api.Event(enable_timing=True)
    first.record()
    torch.empty(1_000_000, dtype=torch.uint8, pin_memory=True).to(sim.device(0), non_blocking=True)
    last.record()
    with pytest.raises((RuntimeError, ValueError)):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) == pytest.approx(1.0)
    with pytest.raises((RuntimeError, ValueError)):
        first.elapsed_time(api.Event())


def test_stream_contexts_nest_and_restore(sim, api):
    default_stream = getattr(api, "default_stream", api.current_stream)  # torch.xpu has none
    default, other = default_stream(sim.device(1)), default_stream(sim.device(0))
    side = api.Stream(sim.device(1), priority=-1)
    assert api.current_stream(sim.device(1)) == default
    with api.stream(side):
        assert api.current_stream(sim.device(1)) == side
        assert api.current_device() == 1
        assert api.current_stream(sim.device(0)) == other
        with api.stream(None):
            assert api.current_stream() == side
        with api.stream(default):
            assert api.current_stream() == default
        assert api.current_stream() == side
    assert api.current_device() == 0
    assert api.current_stream(sim.device(1)) == default
    assert isinstance(api.current_stream(), api.Stream)


def test_streams_come_from_a_pool(sim, api):
    """As in torch: a fixed set per device and priority, handed out in turn."""
    streams = {api.Stream(sim.device(2)).stream_id for _ in range(100)}
    assert len(streams) == 32
    urgent = {api.Stream(sim.device(2), priority=-1).stream_id for _ in range(100)}
    assert len(urgent) == 32
    assert not streams & urgent


def test_operations_wait_for_their_own_stream(sim, api, queued):
    _, target, side = queued
    with api.stream(side):
        assert (target + 1).sum().item() == 8


def test_copies_between_devices_wait_for_both_current_streams(sim, api):
    """torch orders a copy between devices after and before the current streams of both, and after nothing else."""
    source = torch.ones(4, device=sim.device(1))
    target = torch.zeros(4, device=sim.device(0))
    target.add_(1)
    target.copy_(source, non_blocking=True)
    assert target.sum().item() == 4
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    source.mul_(2)
    with api.stream(side):
        target.copy_(source, non_blocking=True)
    assert target.sum().item() == 4
    assert [race.kind for race in sim.take_races()] == ["read-after-write"]
    api.current_stream(sim.device(0)).wait_stream(side)
    assert target.sum().item() == 8


def test_not_late(sim, api):
    sim.late(False)
    target = torch.zeros(4, device=sim.device(0))
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    assert target.sum().item() == 4  # the numbers are right by luck; the tracker still knows
    assert [race.kind for race in sim.take_races()] == ["read-after-write"]
    side.synchronize()


def test_a_pinned_source_may_be_dropped_while_its_copy_is_queued(sim, api):
    target = torch.zeros(1000, device=sim.device(0))
    target.copy_(torch.ones(1000).pin_memory(), non_blocking=True)
    junk = [torch.full((1000,), 5.0).pin_memory() for _ in range(20)]
    assert target.sum().item() == 1000
    assert len(junk) == 20
