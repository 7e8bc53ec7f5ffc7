"""A block at its home: changing its tensors, and that tensors which other code holds do not change."""

from __future__ import annotations

import gc

import pytest
import torch

from multigpu.stream.arena import Arena
from multigpu.stream.homes import HomedBlock, fill, lay_out_block, settle_in

RAM = torch.device("cpu")


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4).requires_grad_(False)


def homed(module: torch.nn.Module) -> HomedBlock:
    laid, size = lay_out_block(module)
    room = Arena(RAM, [size]).room(size)
    fill(room, laid)
    return HomedBlock("block", module, room, settle_in(room, laid))


def relocate(block: HomedBlock, **changed: torch.Tensor) -> int:
    laid, size = lay_out_block(block.module, changed)
    block.move_to(Arena(RAM, [size]).room(size), laid)
    return size


def test_a_block_at_home_has_the_same_contents(module: torch.nn.Module) -> None:
    weight, bias = module.weight.clone(), module.bias.clone()
    block = homed(module)
    assert torch.equal(module.weight, weight) and torch.equal(module.bias, bias)
    assert block.is_home() and module.weight.untyped_storage().data_ptr() == block.room.flat.data_ptr()


def test_whoever_holds_a_parameter_sees_it_move(module: torch.nn.Module) -> None:
    weight = module.weight
    block = homed(module)
    assert module.weight is weight and weight.untyped_storage().data_ptr() == block.room.flat.data_ptr()
    relocate(block)
    assert module.weight is weight and weight.untyped_storage().data_ptr() == block.room.flat.data_ptr()


def test_parameters_of_inference_mode_are_replaced() -> None:
    """They cannot be changed outside of it."""
    with torch.inference_mode():
        module = torch.nn.Linear(8, 4)
        weight = module.weight
        homed(module)
    assert module.weight is not weight and torch.equal(module.weight, weight)


def test_writing_reuses_the_memory_when_nobody_else_has_it(module: torch.nn.Module) -> None:
    block = homed(module)
    before = module.weight.data_ptr()
    assert block.write("weight", torch.full((4, 8), 3.0))
    assert module.weight.data_ptr() == before and bool((module.weight == 3).all()) and block.is_home()


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("how", ["the parameter", "an alias of it", "a part of it"])
def test_what_somebody_was_handed_keeps_its_contents(module: torch.nn.Module, name: str, how: str) -> None:
    block = homed(module)
    parameter = getattr(module, name)
    handed = {"the parameter": parameter, "an alias of it": parameter.detach(), "a part of it": parameter[1:3]}[how]
    contents = handed.clone()
    del parameter
    ours = torch.full_like(module.weight, 3.0)
    if not block.write("weight", ours):
        assert block.is_home() and not torch.equal(module.weight, ours), "refused, and nothing is changed"
        relocate(block, weight=ours)
    assert torch.equal(module.weight, ours) and torch.equal(handed, contents) and block.is_home()
    block.write("weight", ours + 1)
    assert torch.equal(handed, contents)


def test_a_held_parameter_that_changes_keeps_only_its_own_memory(module: torch.nn.Module) -> None:
    block = homed(module)
    weight, before = module.weight, module.weight.clone()
    assert block.write("weight", before + 1), "nobody else has the room any more"
    assert torch.equal(weight, before) and torch.equal(module.weight, before + 1)
    assert weight.untyped_storage().nbytes() == weight.nbytes


def test_a_held_parameter_that_does_not_change_moves_with_its_block(module: torch.nn.Module) -> None:
    """Otherwise a bias of a few bytes would keep the memory of the whole block allocated."""
    block = homed(module)
    bias = module.bias
    assert not block.write("weight", torch.full((4, 8), 3.0))
    relocate(block, weight=torch.full((4, 8), 3.0))
    assert module.bias is bias and bias.untyped_storage().data_ptr() == block.room.flat.data_ptr()


def test_a_held_parameter_of_a_vacated_room_keeps_only_its_own_memory(module: torch.nn.Module) -> None:
    """If it stayed behind: torch cannot move every parameter in place."""
    block = homed(module)
    weight, bias, before = module.weight, module.bias, module.weight.clone()
    module.weight = torch.nn.Parameter(before.clone(), requires_grad=False)
    module.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    block.vacate()
    assert torch.equal(weight, before) and weight.untyped_storage().nbytes() == weight.nbytes
    assert bias.untyped_storage().nbytes() == bias.nbytes


def test_memory_that_was_handed_out_can_be_written_once_it_is_given_back(module: torch.nn.Module) -> None:
    block = homed(module)
    handed = {"a patch": [module.weight.detach()]}
    assert not block.write("weight", torch.zeros(4, 8))
    handed.clear()
    gc.collect()
    assert block.write("weight", torch.zeros(4, 8))


def test_a_tensor_of_another_shape_or_type_moves_the_block(module: torch.nn.Module) -> None:
    block = homed(module)
    for other in (torch.ones(4, 16), torch.ones(4, 8, dtype=torch.bfloat16)):
        bias = module.bias.clone()
        assert not block.write("weight", other)
        size = relocate(block, weight=other)
        assert torch.equal(module.weight, other) and torch.equal(module.bias, bias)
        assert block.size == size and block.is_home()


def test_a_tensor_that_somebody_replaced_is_not_at_home(module: torch.nn.Module) -> None:
    block = homed(module)
    module.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    assert not block.is_home()
    module.bias = None
    assert not block.is_home()
