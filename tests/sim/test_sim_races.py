"""Every kind of missing synchronisation is reported, and its correct counterpart is not."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def api(sim):
    return torch.get_device_module(sim.kind)


class Ring:
    """A small weight streamer: slots on the device, filled on a copy stream, used on the current one.

    Each switch removes one thing that it must do.
    """

    def __init__(self, sim, api, layers, slots=2, sabotage=None):
        self.api, self.device, self.layers, self.sabotage = api, sim.device(0), layers, sabotage
        self.stream = api.Stream(self.device, priority=-1)
        nbytes = layers[0].nbytes
        self.slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        self.free = [None] * slots
        self.stream.wait_stream(api.current_stream(self.device))

    def fetch(self, i):
        slot = i % len(self.slots)
        if self.free[slot] is not None and self.sabotage != "slot reused too early":
            self.stream.wait_event(self.free[slot])
        with self.api.stream(self.stream):
            self.slots[slot].copy_(self.layers[i].view(-1).view(torch.uint8), non_blocking=True)
        return slot, self.stream.record_event()

    def run(self, x):
        current = self.api.current_stream(self.device)
        ahead = [self.fetch(i) for i in range(len(self.slots))]
        for i, layer in enumerate(self.layers):
            slot, ready = ahead.pop(0)
            if self.sabotage != "wait removed":
                current.wait_event(ready)
            weight = self.slots[slot].view(layer.dtype).view(layer.shape)
            if self.sabotage == "wrong device":
                weight = weight.to(self.device[:-1] + "1")
            x = torch.tanh(x @ weight)
            self.free[slot] = current.record_event()
            if i + len(self.slots) < len(self.layers):
                ahead.append(self.fetch(i + len(self.slots)))
        return x


@pytest.fixture
def layers():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 8, generator=generator).bfloat16().pin_memory() for _ in range(6)]


def expected(layers, x):
    for layer in layers:
        x = torch.tanh(x @ layer)
    return x


def test_a_correct_ring_is_equal_and_silent(sim, api, layers):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    ring = Ring(sim, api, layers)
    for _ in range(2):
        result = ring.run(x.to(sim.device(0)))
        assert torch.equal(result.cpu(), expected(layers, x))
    assert sim.moved("cpu", sim.device(0)) == 2 * sum(layer.nbytes for layer in layers) + 2 * x.nbytes


def test_a_removed_wait_gives_wrong_numbers_and_a_report(sim, api, layers):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    result = Ring(sim, api, layers, sabotage="wait removed").run(x.to(sim.device(0)))
    assert not torch.equal(result.cpu(), expected(layers, x))
    races = sim.take_races()
    assert races[0].kind == "read-after-write"
    assert (races[0].lo, races[0].hi, races[0].device) == (0, 128, 0)
    assert races[0].other_op == "copy"
    assert races[0].stream == 0
    assert races[0].other_stream != 0
    assert "bytes [0, 128)" in str(races[0])


def test_a_slot_reused_too_early_is_reported(sim, api, layers):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    Ring(sim, api, layers, sabotage="slot reused too early").run(x.to(sim.device(0)))
    races = sim.take_races()
    assert {race.kind for race in races} == {"write-after-read"}
    assert races[0].op == "copy"


def test_a_wrong_device_raises(sim, api, layers):
    ring = Ring(sim, api, layers, sabotage="wrong device")
    with pytest.raises(RuntimeError, match="same device"):
        ring.run(torch.ones(2, 8, dtype=torch.bfloat16, device=sim.device(0)))
    ring.stream.synchronize()


def test_two_unordered_writes(sim, api):
    target = torch.zeros(8, device=sim.device(0))
    source = torch.ones(8).pin_memory()
    api.synchronize(sim.device(0))
    for _ in range(2):
        with api.stream(api.Stream(sim.device(0))):
            target.copy_(source, non_blocking=True)
    (race,) = sim.take_races()
    assert (race.kind, race.op, race.other_op, race.lo, race.hi) == ("write-after-write", "copy", "copy", 0, 32)
    api.synchronize(sim.device(0))


def test_other_bytes_of_the_same_block_are_no_race(sim, api):
    arena = torch.zeros(1024, dtype=torch.uint8, device=sim.device(0))
    source = torch.ones(512, dtype=torch.uint8).pin_memory()
    api.synchronize(sim.device(0))
    with api.stream(api.Stream(sim.device(0))):
        arena[:512].copy_(source, non_blocking=True)
    assert arena[512:].sum().item() == 0
    assert sim.races() == []
    assert arena[256:].view(torch.int32).sum().item() == 0  # reads the first half without a wait
    (race,) = sim.take_races()
    assert (race.lo, race.hi) == (256, 512)
    api.synchronize(sim.device(0))


def test_views_touch_no_memory(sim, api):
    target = torch.zeros(8, 8, device=sim.device(0))
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        target.copy_(torch.ones(8, 8).pin_memory(), non_blocking=True)
    view = target.t()[2:].unsqueeze(0).view(1, 6, 8).view(torch.int32)
    api.current_stream(sim.device(0)).wait_stream(side)
    assert view.view(torch.float32).sum().item() == 48


@pytest.mark.parametrize("recorded", [True, False])
def test_freeing_memory_that_another_stream_uses(sim, api, recorded):
    side = api.Stream(sim.device(0))
    x = torch.ones(4, device=sim.device(0))
    back = torch.empty(4, pin_memory=True)
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        back.copy_(x, non_blocking=True)
    if recorded:
        x.record_stream(side)
    del x
    side.synchronize()
    races = sim.take_races()
    if recorded:
        assert races == []
        assert back.tolist() == [1, 1, 1, 1]
    else:
        assert [race.kind for race in races] == ["missing record_stream"]
        assert (races[0].lo, races[0].hi, races[0].other_op) == (0, 16, "copy")
        assert torch.isnan(back).all()


def test_compute_on_another_stream_needs_record_stream_too(sim, api):
    side = api.Stream(sim.device(0))
    x = torch.ones(4, device=sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        y = x * 2
    del x
    assert [race.other_op for race in sim.take_races()] == ["aten::mul"]
    api.current_stream(sim.device(0)).wait_stream(side)
    assert y.sum().item() == 8


def test_a_wait_before_the_free_is_enough(sim, api):
    side = api.Stream(sim.device(0))
    x = torch.ones(4, device=sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        y = x * 2
    api.current_stream(sim.device(0)).wait_stream(side)
    del x
    assert y.sum().item() == 8


def test_pinned_memory_overwritten_before_its_copy_ran(sim, api):
    staging = torch.ones(4).pin_memory()
    target = torch.zeros(4, device=sim.device(0))
    target.copy_(staging, non_blocking=True)
    staging.fill_(2)
    api.synchronize(sim.device(0))
    (race,) = sim.take_races()
    assert race.kind == "host overwrite"
    target.copy_(staging, non_blocking=True)
    api.synchronize(sim.device(0))
    staging.fill_(3)
    assert sim.races() == []


def test_a_pinned_buffer_may_pass_from_device_to_device(sim, api):
    """Down and up again through one pinned buffer, all on one stream: the device's own writes are no overwrite."""
    staging = torch.empty(4, pin_memory=True)
    source = torch.ones(4, device=sim.device(0))
    for value in (1.0, 2.0):
        staging.copy_(source.fill_(value), non_blocking=True)
        target = staging.to(sim.device(0), non_blocking=True)
        assert torch.equal(target.cpu(), torch.full((4,), value))


def test_a_pinned_buffer_may_be_refilled_behind_its_copy(sim, api):
    staging = torch.ones(4).pin_memory()
    result = torch.full((4,), 2.0, device=sim.device(0))
    target = staging.to(sim.device(0), non_blocking=True)
    staging.copy_(result, non_blocking=True)
    assert torch.equal(target.cpu(), torch.ones(4))
    api.synchronize(sim.device(0))
    assert torch.equal(staging, torch.full((4,), 2.0))


def test_memory_unregistered_before_its_copy_ran(sim, api):
    arena = torch.ones(1024, dtype=torch.uint8)
    assert sim.register_host(arena) == 0
    target = torch.zeros(1024, dtype=torch.uint8, device=sim.device(0))
    target.copy_(arena, non_blocking=True)
    sim.unregister_host(arena)
    assert [race.kind for race in sim.take_races()] == ["unregistered"]
    api.synchronize(sim.device(0))


def test_strict_raises_where_it_happens(sim, api):
    target = torch.zeros(4, device=sim.device(0))
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    with api.stream(side):
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    sim.strict(True)
    with pytest.raises(RuntimeError, match=r"read-after-write: aten::sum \(read\) on stream 0"):
        target.sum()
    assert len(sim.take_races()) == 1
    side.synchronize()


def test_the_tracker_can_be_turned_off(sim, api):
    sim.track(False)
    target = torch.zeros(4, device=sim.device(0))
    with api.stream(api.Stream(sim.device(0))):
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    target.sum()
    assert sim.races() == []
