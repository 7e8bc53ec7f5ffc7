"""Bytes per link: what crosses, when it is read, where types are converted."""

from __future__ import annotations

import pytest
import torch


def test_bytes_and_copies_per_link(sim):
    zero, one = sim.device(0), sim.device(1)
    a = torch.ones(1000)
    b = a.to(zero)
    c = b.to(one)
    c.cpu()
    c + c  # stays on the device
    c.to(torch.float64)  # so does this
    torch.empty(1000, device=one).copy_(b)
    assert sim.links() == {("cpu", zero): 4000, (zero, one): 8000, (one, "cpu"): 4000}
    assert (sim.moved(zero, one), sim.copies(zero, one)) == (8000, 2)
    assert (sim.moved(one, zero), sim.copies(one, zero)) == (0, 0)
    assert [(c.src, c.dst, c.bytes) for c in sim.copy_log()][0] == ("cpu", zero, 4000)


def test_reading_a_number_is_not_a_copy(sim):
    x = torch.ones(10, device=sim.device(0))
    sim.reset()
    assert x.sum().item() == 10
    assert sim.links() == {}


@pytest.mark.parametrize(
    ("non_blocking", "crossed"), [(False, 2000), (True, 4000)], ids=["converts on the host", "converts on the device"]
)
def test_upload_with_conversion(sim, non_blocking, crossed):
    x = torch.randn(1000)
    there = torch.empty(1000, dtype=torch.bfloat16, device=sim.device(0))
    there.copy_(x, non_blocking=non_blocking)
    assert sim.moved("cpu", sim.device(0)) == crossed
    assert torch.equal(there.cpu(), x.bfloat16())


@pytest.mark.parametrize(("non_blocking", "crossed"), [(False, 4000), (True, 2000)])
def test_download_with_conversion(sim, non_blocking, crossed):
    x = torch.randn(1000)
    there = x.to(sim.device(0))
    back = torch.empty(1000, dtype=torch.bfloat16)
    back.copy_(there, non_blocking=non_blocking)
    assert sim.moved(sim.device(0), "cpu") == crossed
    assert torch.equal(back, x.bfloat16())


def test_conversion_on_the_device_takes_memory_there(sim):
    x = torch.ones(1_000_000)
    there = torch.empty(1_000_000, dtype=torch.bfloat16, device=sim.device(0))
    before = sim.allocated(0)
    there.copy_(x)
    assert sim.peak(0) == before
    there.copy_(x, non_blocking=True)
    assert sim.peak(0) - before >= 4_000_000


def test_layout_survives(sim):
    x = torch.randn(6, 8)
    for view in (x.t(), x[:, ::2], x[1:3].expand(2, 8), x.view(2, 3, 8).permute(2, 0, 1)):
        assert torch.equal(view.to(sim.device(0)).cpu(), view)
        there = torch.empty_like(view, device=sim.device(1)).copy_(view.to(sim.device(0)))
        assert torch.equal(there.cpu(), view)


def test_pageable_sources_are_staged(sim):
    x = torch.ones(4)
    there = x.to(sim.device(0), non_blocking=True)
    x.fill_(7)
    assert torch.equal(there.cpu(), torch.ones(4))


def test_pinned_sources_are_read_late(sim):
    x = torch.ones(4).pin_memory()
    there = x.to(sim.device(0), non_blocking=True)
    x.fill_(7)
    assert torch.equal(there.cpu(), torch.full((4,), 7.0))
    assert [race.kind for race in sim.take_races()] == ["host overwrite"]


def test_a_blocking_copy_may_be_followed_by_anything(sim):
    x = torch.ones(4).pin_memory()
    there = x.to(sim.device(0))
    x.fill_(7)
    assert torch.equal(there.cpu(), torch.ones(4))


def test_downloads_to_pinned_memory_need_a_wait(sim):
    module = torch.get_device_module(sim.kind)
    there = torch.ones(4, device=sim.device(0))
    back = torch.zeros(4, pin_memory=True)
    back.copy_(there, non_blocking=True)
    assert not torch.equal(back, torch.ones(4))
    module.synchronize(sim.device(0))
    assert torch.equal(back, torch.ones(4))
    pageable = torch.zeros(4)
    pageable.copy_(there, non_blocking=True)
    assert torch.equal(pageable, torch.ones(4))


def test_non_blocking_download_makes_pinned_memory(sim):
    back = torch.ones(3, device=sim.device(0)).to("cpu", non_blocking=True)
    assert back.is_pinned()
    torch.get_device_module(sim.kind).synchronize(sim.device(0))
    assert torch.equal(back, torch.ones(3))


def test_peer_access_per_pair(sim):
    module = torch.get_device_module(sim.kind)
    zero, one, two = sim.devices
    assert module.can_device_access_peer(zero, one)
    assert not module.can_device_access_peer(zero, zero)
    sim.peer_access(zero, one, False)
    assert not module.can_device_access_peer(zero, one)
    assert not module.can_device_access_peer(one, zero)
    assert module.can_device_access_peer(zero, two)
    x = torch.randn(100)
    assert torch.equal(x.to(zero).to(one).cpu(), x)
    assert sim.moved(zero, one) == 400


@pytest.mark.parametrize(
    ("peer", "non_blocking", "crossed"), [(True, False, 4000), (False, True, 4000), (False, False, 2000)]
)
def test_conversion_between_devices(sim, peer, non_blocking, crossed):
    """The source converts, so the wider target type crosses; without peer access a blocking copy converts last."""
    zero, one = sim.device(0), sim.device(1)
    sim.peer_access(zero, one, peer)
    x = torch.randn(1000).bfloat16()
    there = torch.empty(1000, dtype=torch.float32, device=one)
    there.copy_(x.to(zero), non_blocking=non_blocking)
    assert sim.moved(zero, one) == crossed
    assert torch.equal(there.cpu(), x.float())
