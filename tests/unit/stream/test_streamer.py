"""Staging on a device without streams: the same code, synchronously. (Streams are tested on simulated accelerators.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multigpu.stream import arena as arena_module
from multigpu.stream.arena import PAGE, Arena
from multigpu.stream.census import bytes_by_device
from multigpu.stream.first_uses import FirstUses, Told
from multigpu.stream.homes import HomedBlock, fill, lay_out_block, settle_in
from multigpu.stream.lanes import open_lane
from multigpu.stream.streamer import Spare, Streamer

CPU = torch.device("cpu")
BLOCK = 16 * 16 * 4 + 256


class Chain(torch.nn.Module):
    """Blocks that can be run in any order."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(count)).requires_grad_(False)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def homed(model: Chain) -> list[HomedBlock]:
    """Every block of the model in an arena of its own kind of memory: RAM, as the compute device is here."""
    blocks = []
    for index, module in enumerate(model.blocks):
        laid, size = lay_out_block(module)
        room = Arena(CPU, [size]).room(size)
        fill(room, laid)
        blocks.append(HomedBlock(str(index), module, room, settle_in(room, laid)))
    return blocks


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ring bytes are overwritten after use, so that a missing wait shows as wrong numbers."""
    monkeypatch.setattr(Streamer, "poison", True)


@pytest.fixture
def model() -> Chain:
    return Chain(6)


X = torch.linspace(-1, 1, 16)
ORDERS: list[Sequence[int]] = [
    range(6), range(6), [0, 2, 4], [5, 4, 3, 2, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1], [3], range(6), range(6),
]  # fmt: skip


@pytest.mark.parametrize("ring", [1, 2 * BLOCK, 4 * BLOCK, 100 * BLOCK])
def test_any_order_of_execution_gives_the_same_numbers(model: Chain, ring: int) -> None:
    expected = [model(X, order) for order in ORDERS]
    streamer = Streamer(homed(model), CPU, ring)
    streamer.attach()
    for order, numbers in zip(ORDERS, expected, strict=True):
        assert torch.equal(model(X, order), numbers)
    streamer.close()
    assert streamer.counters.uses == sum(len(order) for order in ORDERS)


def test_in_a_steady_rhythm_each_block_is_copied_once_per_round(model: Chain) -> None:
    streamer = Streamer(homed(model), CPU, 2 * BLOCK)
    streamer.attach()
    model(X, range(6))
    copies, misses = streamer.counters.copies, streamer.counters.misses
    for _ in range(5):
        model(X, range(6))
    assert streamer.counters.copies - copies == 5 * 6
    assert streamer.counters.misses == misses
    streamer.close()


def test_a_block_used_twice_in_a_row_is_copied_once(model: Chain) -> None:
    streamer = Streamer(homed(model), CPU, 3 * BLOCK)
    streamer.attach()
    order = [0, 0, 1, 2, 3]
    for _ in range(3):
        model(X, order)
    copies = streamer.counters.copies
    for _ in range(4):
        model(X, order)
    assert streamer.counters.copies - copies == 4 * 4
    streamer.close()


def test_tensors_rest_at_home_between_uses_and_after_closing(model: Chain) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks = homed(model)
    streamer = Streamer(blocks, CPU, 2 * BLOCK)
    streamer.attach()
    model(X, range(6))
    assert all(block.is_home() for block in blocks)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    streamer.close()
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_is_put_right_before_the_next_use(model: Chain, error: Any) -> None:
    expected = model(X, range(6))
    blocks = homed(model)
    streamer = Streamer(blocks, CPU, 2 * BLOCK)
    streamer.attach()
    model(X, range(6))

    class Breaks(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise error

    with pytest.raises(error):
        model.blocks[3](X.as_subclass(Breaks))
    assert torch.equal(model(X, range(6)), expected)
    streamer.close()
    assert all(block.is_home() for block in blocks)


def test_weights_that_someone_else_moved_are_left_alone(model: Chain) -> None:
    streamer = Streamer(homed(model), CPU, 2 * BLOCK)
    streamer.attach()
    model(X, range(6))
    model.blocks[2].weight = torch.nn.Parameter(torch.eye(16), requires_grad=False)
    changed = model(X, [2])
    assert torch.allclose(changed, torch.tanh(X + model.blocks[2].bias))
    assert streamer.counters.foreign == 1
    streamer.close()
    assert torch.equal(model.blocks[2].weight, torch.eye(16))


def test_changed_bytes_are_seen_after_quiescing(model: Chain) -> None:
    blocks = homed(model)
    streamer = Streamer(blocks, CPU, 100 * BLOCK)
    streamer.attach()
    model(X, range(6))
    streamer.quiesce()
    for tensor in blocks[0].tensors:
        tensor.home.zero_()
    assert torch.equal(model(X, [0]), torch.zeros(16))
    streamer.close()


def test_the_census_counts_shared_memory_once() -> None:
    tied = torch.nn.Linear(8, 8, bias=False)
    other = torch.nn.Linear(8, 8, bias=False)
    other.weight = tied.weight
    assert bytes_by_device(torch.nn.ModuleList([tied, other])) == {CPU: 8 * 8 * 4}


def test_arena_segments_hold_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", 1024)
    arena = Arena(CPU, [512, 512, 1024, 256])
    rooms = [arena.room(size) for size in (512, 512, 1024, 256)]
    assert [segment.data.numel() for segment in arena.segments] == [1024, 1024, 256]
    starts = [room.flat.data_ptr() - room.segment.data.data_ptr() for room in rooms if room.segment is not None]
    assert starts == [0, 512, 0, 0]
    assert all(segment.data.data_ptr() % PAGE == 0 for segment in arena.segments)
    assert arena.pin(CPU) is False and arena.pinned_bytes == 0


def test_without_streams_a_copy_is_done_when_it_returns() -> None:
    lane = open_lane(CPU, CPU)
    target, source = torch.zeros(4), torch.ones(4)
    assert lane.copy(target, source, []) is None
    assert torch.equal(target, source)


@given(st.lists(st.sampled_from([-1, 0, 1200, 3000, 1 << 20]), min_size=len(ORDERS), max_size=len(ORDERS)))
def test_blocks_that_come_and_go_as_there_is_room_give_the_same_numbers(rooms: list[int]) -> None:
    model = Chain(6)
    want = [model(X, order) for order in ORDERS]
    blocks, room = homed(model), 0
    streamer = Streamer(blocks, CPU, 2560, lambda: room)
    streamer.attach()
    for order, expected, room in zip(ORDERS, want, rooms, strict=True):
        streamer.retain_more()
        assert torch.equal(model(X, order), expected)
        assert streamer.retained_bytes <= sum(block.size for block in blocks)
        if room < 0:
            streamer.release(1)
    streamer.close()
    assert streamer.retained_bytes == 0


def test_room_is_looked_at_after_a_whole_pass_of_a_run(model: Chain) -> None:
    """Before that nobody knows how much memory a pass needs. The first one, in which weights come, tells nothing."""
    looked: list[bool] = []
    streamer = Streamer(homed(model), CPU, 2560, Spare(lambda: looked.append(True) or 0, lambda sizes, room: ()))
    streamer.attach()
    order = [1, 0, 3, 2, 2, 5, 4]  # not the order of declaration
    for count in (0, 0, 1, 2):
        model(X, order)
        assert len(looked) == count
    streamer.retain_more()  # the next run begins
    for count in (2, 3):
        model(X, order)
        assert len(looked) == count


def test_patches_that_come_in_part_are_not_mixed_with_what_is_staged(model: Chain) -> None:
    """The weight has them at home, the bias has not yet, and a copy without any is expected to be used once more."""
    blocks = homed(model)
    patched = Chain(6)
    patched.blocks[0].weight *= 2
    patched.blocks[0].bias *= 3
    fails = iter([True])

    class Homes:
        def homed(self, block: str) -> HomedBlock:
            return blocks[int(block)]

        def warm_up(self) -> None:
            pass

        def complete(self) -> None:
            pass

        def passing(self, block: str, tensors: Any) -> dict[str, torch.Tensor]:
            done = {}
            for name, factor in (("weight", 2), ("bias", 3)):
                at_home = next(each.home for each in blocks[0].tensors if each.name == name)
                if torch.equal(at_home, getattr(patched.blocks[0], name)):
                    continue
                if name == "bias" and next(fails, False):
                    raise MemoryError
                done[name] = tensors[name] * factor
                blocks[0].write(name, done[name])
            return done

    homes: Any = Homes()
    homes.told = Told(homes.passing)
    due = FirstUses(CPU, homes)
    streamer = Streamer(blocks, CPU, 3 * BLOCK, None, due)
    streamer.attach()
    order = [0, 0, 1]
    for _ in range(3):
        model(X, order)
    due.await_patches(["0"], {})
    with pytest.raises(MemoryError):
        model(X, order)
    assert torch.equal(model(X, order), patched(X, order))
    streamer.close()
