"""Virtual time: links and devices take turns, streams overlap, and the sums come out by hand."""

from __future__ import annotations

import pytest
import torch

MB = 1_000_000


@pytest.fixture
def api(sim):
    return torch.get_device_module(sim.kind)


def pinned(size):
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def upload(sim, api, stream, size, source=None):
    with api.stream(stream):
        return (pinned(size) if source is None else source).to(sim.device(0), non_blocking=True)


def test_time_stands_still_without_rates(sim, api):
    x = torch.ones(1000).to(sim.device(0))
    (x @ x).cpu()
    api.synchronize(sim.device(0))
    assert sim.clock() == 0


def test_a_link_serves_one_copy_at_a_time(sim, api):
    sim.set_bandwidth("cpu", sim.device(0), 1e9)
    streams = [api.Stream(sim.device(0)) for _ in range(3)]
    kept = [upload(sim, api, stream, MB) for stream in streams]
    assert sim.clock() == 0  # issued, not waited for
    for stream in streams:
        stream.synchronize()
    assert sim.clock() == pytest.approx(0.003)
    assert len(kept) == 3


def test_links_are_independent_and_have_two_directions(sim, api):
    zero, one = sim.device(0), sim.device(1)
    for link in (("cpu", zero), ("cpu", one), (zero, "cpu"), (one, zero)):
        sim.set_bandwidth(*link, 1e9)
    down = torch.zeros(MB, dtype=torch.uint8, device=zero)
    target = pinned(MB)
    api.synchronize(zero)
    side = api.Stream(zero)
    up = [pinned(MB).to(device, non_blocking=True) for device in (zero, one)]
    with api.stream(side):
        target.copy_(down, non_blocking=True)
    for device in (zero, one):
        api.synchronize(device)
    assert sim.clock() == pytest.approx(0.001)
    assert len(up) == 2


def test_copies_overlap_compute_on_another_stream(sim, api):
    zero = sim.device(0)
    sim.set_bandwidth("cpu", zero, 1e9)
    sim.set_compute_rate(zero, flops=1e9)
    a = torch.zeros(100, 50, device=zero)
    b = torch.zeros(50, 200, device=zero)
    side = api.Stream(zero)
    side.wait_stream(api.current_stream(zero))
    kept = upload(sim, api, side, 3 * MB)
    a @ b  # 2 * 100 * 50 * 200 = 2 MFLOP: 2 ms beside the 3 ms of the copy
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.003)
    a @ b
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.005)
    assert kept.numel() == 3 * MB


def test_waiting_for_a_copy_costs_its_time(sim, api):
    zero = sim.device(0)
    sim.set_bandwidth("cpu", zero, 1e9)
    sim.set_compute_rate(zero, flops=1e9)
    a, b = torch.zeros(100, 50, device=zero), torch.zeros(50, 200, device=zero)
    side = api.Stream(zero)
    kept = upload(sim, api, side, 3 * MB)
    api.current_stream(zero).wait_stream(side)
    a @ b
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.005)
    del kept


def test_a_look_ahead_of_one_hides_copies_behind_compute(sim, api):
    """Four layers, each 2 ms of copy and 2 ms of compute: 16 ms in turn, 10 ms with the next copy under way."""
    zero = sim.device(0)
    sim.set_bandwidth("cpu", zero, 1e9)
    sim.set_compute_rate(zero, flops=1e9)
    a, b = torch.zeros(100, 50, device=zero), torch.zeros(50, 200, device=zero)
    slots = [torch.zeros(2 * MB, dtype=torch.uint8, device=zero) for _ in range(2)]
    source, side, current = pinned(2 * MB), api.Stream(zero), api.current_stream(zero)

    def schedule(ahead):
        start = sim.clock()
        side.wait_stream(current)
        done = [None, None]
        ready = {}

        def fetch(i):
            if done[i % 2] is not None:
                side.wait_event(done[i % 2])
            with api.stream(side):
                slots[i % 2].copy_(source, non_blocking=True)
            ready[i] = side.record_event()

        for i in range(4):
            for j in range(i, min(i + 1 + ahead, 4)):
                if j not in ready:
                    fetch(j)
            current.wait_event(ready[i])
            a @ b
            done[i % 2] = current.record_event()
            if not ahead:
                side.wait_event(done[i % 2])
        api.synchronize(zero)
        return sim.clock() - start

    assert schedule(ahead=0) == pytest.approx(0.016)
    assert schedule(ahead=1) == pytest.approx(0.010)


def test_devices_compute_side_by_side_and_streams_of_one_take_turns(sim, api):
    zero, one = sim.device(0), sim.device(1)
    for device in (zero, one):
        sim.set_compute_rate(device, flops=1e9)
    inputs = {d: (torch.zeros(100, 50, device=d), torch.zeros(50, 200, device=d)) for d in (zero, one)}
    for device in (zero, one):
        torch.mm(*inputs[device])
    for device in (zero, one):
        api.synchronize(device)
    assert sim.clock() == pytest.approx(0.002)
    side = api.Stream(zero)
    torch.mm(*inputs[zero])
    with api.stream(side):
        torch.mm(*inputs[zero])
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.006)


def test_the_cost_of_operations(sim, api):
    zero = sim.device(0)
    x = torch.zeros(1, 4, 16, 16, device=zero)
    w = torch.zeros(8, 4, 3, 3, device=zero)
    q = torch.zeros(1, 2, 32, 8, device=zero)

    def cost(function, **rate):
        sim.set_compute_rate(zero, **rate)
        api.synchronize(zero)
        start = sim.clock()
        function()
        api.synchronize(zero)
        return sim.clock() - start

    def conv():
        torch.nn.functional.conv2d(x, w)

    assert cost(lambda: x + x, bytes_per_s=1e6) == pytest.approx(3 * x.nbytes / 1e6)
    assert cost(lambda: x.add_(1), bytes_per_s=1e6) >= x.nbytes / 1e6
    assert cost(lambda: x + x, flops=1e6) == 0
    assert cost(conv, flops=1e9) == pytest.approx(2 * 8 * 14 * 14 * 4 * 9 / 1e9)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert cost(lambda: attention(q, q, q), flops=1e9) == pytest.approx(4 * 2 * 32 * 32 * 8 / 1e9)
    assert cost(lambda: x.view(-1), flops=1e9, bytes_per_s=1e6, per_op=1.0) == 0
    assert cost(lambda: x.neg(), per_op=0.5) == pytest.approx(0.5)


def test_pageable_copies_hold_the_host(sim, api):
    sim.set_bandwidth("cpu", sim.device(0), 1e9, pageable=1e8)
    torch.zeros(MB, dtype=torch.uint8).to(sim.device(0), non_blocking=True)
    assert sim.clock() == pytest.approx(0.01)


def test_without_peer_access_bytes_cross_both_host_links(sim, api):
    zero, one = sim.device(0), sim.device(1)
    sim.set_bandwidth(one, zero, 4e9)
    sim.set_bandwidth(one, "cpu", 1e9)
    sim.set_bandwidth("cpu", zero, 1e9)
    x = torch.zeros(4 * MB, dtype=torch.uint8, device=one)
    x.to(zero)
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.001)
    sim.peer_access(one, zero, False)
    x.to(zero)
    api.synchronize(zero)
    assert sim.clock() == pytest.approx(0.009)


def test_late_work_does_not_hold_a_link_before_it_can_start(sim, api):
    """A copy that waits for compute leaves the link free for one that does not, whatever the order of issue."""
    zero = sim.device(0)
    sim.set_bandwidth("cpu", zero, 1e9)
    sim.set_compute_rate(zero, flops=1e9)
    a, b = torch.zeros(100, 50, device=zero), torch.zeros(50, 200, device=zero)
    waiting, eager = api.Stream(zero), api.Stream(zero)
    a @ b
    waiting.wait_stream(api.current_stream(zero))
    kept = [upload(sim, api, waiting, MB), upload(sim, api, eager, MB)]
    eager.synchronize()
    assert sim.clock() == pytest.approx(0.001)
    waiting.synchronize()
    assert sim.clock() == pytest.approx(0.003)
    del kept
