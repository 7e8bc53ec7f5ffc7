"""What is still due when blocks are first used, and what becomes of it when something comes in between."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio
from tests.engine.test_arrivals import residence
from tests.engine.test_failures import Stumble, streamed_block, stumble_in

pytestmark = pytest.mark.pages

LINEAR = "diffusion_model.single_blocks.1.linear1"


def break_off(studio: Studio, monkeypatch: pytest.MonkeyPatch, placed: Any) -> None:
    """A first step that breaks off in the middle. Nothing holds the patcher afterwards but the caller."""
    error = Stumble()
    _, owner, forward = stumble_in(placed, streamed_block(placed), error)
    with monkeypatch.context() as patched:
        patched.setattr(owner, "forward", forward)
        with pytest.raises(Stumble):
            studio.latent(placed)
    error.__traceback__ = None
    assert residence(studio, placed).due.outstanding


def changed(patcher: Any, key: str, strength: float = 0.5) -> Any:
    """A clone with other numbers in one weight."""
    clone = patcher.clone()
    weight = clone.model_state_dict()[key]
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
    clone.add_patches({key: ("diff", (change,))}, strength)
    return clone


@pytest.mark.parametrize("then", ["another", "none", "unload"])
def test_a_clone_takes_over_from_one_whose_first_step_broke_off(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """As with a node behind the LoRA whose widget is changed: both clones have the same patches."""
    model = studio.flux()
    stock, strong = studio.latent(model), studio.latent(studio.lora(model, 0.8))
    weak = studio.latent(studio.lora(model, 0.3))
    studio.unload()
    base = studio.place(studio.flux())
    placed = studio.lora(base, 0.8)
    first = placed.clone()
    break_off(studio, monkeypatch, first)
    gone = weakref.ref(first)
    del first
    second = placed.clone()
    assert torch.equal(studio.latent(second), strong)
    assert gone() is None
    assert all(original is not None for original in placed.backup.values())
    if then == "unload":
        studio.unload()
        assert torch.equal(studio.latent(second), strong)
    elif then == "another":
        assert torch.equal(studio.latent(studio.lora(base, 0.3)), weak)
    assert torch.equal(studio.latent(base), stock)


def test_out_of_memory_while_the_memory_for_a_model_is_taken(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for which there was room already do not count as being there."""
    import comfy.model_management as memory

    from multigpu.stream import arena

    monkeypatch.setattr(arena, "SEGMENT_BYTES", 1 << 20)
    zero = studio.accelerators[0]
    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux(), f"{zero},50%;cpu,*")
    real = memory.get_free_memory
    studio.world.limit(zero, studio.world.allocated(zero) + (8 << 20))

    def hopeful(device: Any = None, torch_free_too: bool = False) -> Any:
        free = real(device, torch_free_too)
        return free if torch_free_too else free + (6 << 30)

    with monkeypatch.context() as context:
        context.setattr(memory, "get_free_memory", hopeful)
        with pytest.raises(torch.OutOfMemoryError):
            studio.latent(placed)
    studio.world.limit(zero, 6 << 30)
    assert torch.equal(studio.latent(placed), want)
    assert studio.proven(placed) == studio.planned(placed)


def test_a_file_that_is_touched_before_patched_weights_are_used(studio: Studio, tmp_path: Path) -> None:
    import comfy.model_management as memory
    import comfy.sd

    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    model = studio.flux()
    stock, want = studio.latent(model), studio.latent(changed(model, f"{LINEAR}.weight"))
    studio.unload()
    placed = studio.place(comfy.sd.load_diffusion_model(str(file)), "cpu,*")
    assert torch.equal(studio.latent(placed), stock)
    patched = changed(placed, f"{LINEAR}.weight")
    memory.load_models_gpu([patched])
    assert residence(studio, placed).due.outstanding
    os.utime(file, ns=(os.stat(file).st_mtime_ns + 10**6,) * 2)
    assert torch.equal(studio.latent(patched), want)
    assert torch.equal(studio.latent(placed), stock)


def test_a_norm_whose_weight_is_read_and_which_is_not_called(studio: Studio) -> None:
    """As in MiniMax's attention."""
    norm = "diffusion_model.double_blocks.0.img_attn.norm"

    def draw(model: Any) -> torch.Tensor:
        its = model.model.get_submodule(norm)

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            weight = its.query_norm.weight.to(q)
            return torch.nn.functional.rms_norm(q, weight.shape, weight).to(v), its.key_norm(k).to(v)

        with torch.inference_mode(False):
            its.forward = forward
        try:
            return studio.latent(changed(model, f"{norm}.query_norm.weight"), steps=1)
        finally:
            del its.forward

    want = draw(studio.flux())
    studio.unload()
    assert torch.equal(draw(studio.place(studio.flux())), want)


def read(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a layer computes, without calling it."""
    return lambda x: torch.nn.functional.linear(x, layer.weight.to(x), layer.bias.to(x))


class Reading(torch.nn.Module):
    """A block whose second layer is not called, as in code that torch.compile has made."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.linear1, self.linear2 = block, block.linear1, block.linear2
        self.norm, self.modulation = block.norm, block.modulation

    def forward(self, *given: Any, **named: Any) -> Any:
        vars(self.block)["linear2"] = read(self.linear2)
        try:
            return self.block(*given, **named)
        finally:
            del vars(self.block)["linear2"]


@pytest.mark.parametrize("how", ["object patch", "injection"])
def test_code_of_other_nodes_that_reads_weights(studio: Studio, how: str) -> None:
    from comfy.patcher_extension import PatcherInjection

    name = "diffusion_model.single_blocks.1"

    def read_in(patcher: Any) -> Any:
        clone, block = patcher.clone(), patcher.model.get_submodule(name)
        if how == "object patch":
            clone.add_object_patch(name, Reading(block))
        else:
            inject = PatcherInjection(
                lambda _: vars(block).update(linear2=read(block.linear2)), lambda _: vars(block).pop("linear2")
            )
            clone.set_injections("reading", [inject])
        return clone

    want = studio.latent(studio.lora(studio.flux(), 0.8), steps=1)
    studio.unload()
    placed = studio.place(studio.flux())
    assert torch.equal(studio.latent(studio.lora(read_in(placed), 0.8), steps=1), want)


def test_when_all_blocks_have_come_it_is_said_also_where_none_is_streamed(studio: Studio) -> None:
    placed = studio.place(studio.flux(), f"{studio.accelerators[0]},100%")
    studio.latent(placed, steps=1)
    assert residence(studio, placed).streamer is None
    assert studio.states.of(placed).count == studio.planned(placed) == studio.proven(placed)
    assert studio.world.pinned_bytes() == 0, "the threads' buffers"


def test_a_changed_patch_of_a_small_weight_whose_block_somebody_holds(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes into new memory, and nothing has to be read by threads."""
    from multigpu.stream import file_reader

    key = f"{LINEAR}.bias"
    model = studio.flux()
    want = studio.latent(changed(model, key, 2.0), steps=1)
    studio.unload()
    monkeypatch.setattr(file_reader, "WORTH_IT", 1 << 30)
    placed = studio.place(studio.flux(), "cpu,*")
    studio.latent(changed(placed, key, 1.0), steps=1)
    held = placed.model.get_submodule(LINEAR).weight.detach()
    assert torch.equal(studio.latent(changed(placed, key, 2.0), steps=1), want)
    del held


def test_memory_is_given_back_by_another_patcher_than_the_one_with_the_patches(studio: Studio) -> None:
    import comfy.model_management as memory

    want = studio.latent(studio.lora(studio.flux(), 0.8))
    studio.unload()
    placed = studio.place(studio.flux(), fills=True)
    patched = studio.lora(placed, 0.8)
    memory.load_models_gpu([patched])
    assert placed.partially_unload(torch.device("cpu"), 8 << 20) > 0
    assert torch.equal(studio.latent(patched), want)


def test_patches_come_when_the_patcher_that_has_loaded_them_is_gone(studio: Studio) -> None:
    import comfy.model_management as memory

    from multigpu.errors import HostError

    def run(patcher: Any) -> torch.Tensor:
        layer = patcher.model.get_submodule(LINEAR)
        x = torch.linspace(-1, 1, layer.weight.shape[1], dtype=torch.bfloat16, device=patcher.load_device)
        return layer(x).cpu()

    model = studio.lora(studio.flux(), 0.8)
    memory.load_models_gpu([model])
    want = run(model)
    del model
    studio.unload()
    placed = studio.place(studio.flux(), "cpu,*")
    patched = studio.lora(placed, 0.8)
    clone = patched.clone()
    memory.load_models_gpu([clone])
    del clone
    assert torch.equal(run(placed), want), "there is another patcher with the same patches"
    studio.unload()
    memory.load_models_gpu([patched])
    del patched
    gc.collect()
    with pytest.raises(HostError, match="but the model with these patches is gone; run the workflow again"):
        run(placed)


def test_of_blocks_that_stay_in_ram_none_moves(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others have left, memory is lost, up to a limit."""
    from multigpu.stream import residence as module

    zero = studio.accelerators[0]
    want = studio.latent(studio.flux())
    studio.unload()
    first = studio.place(studio.flux(), f"{zero},20%;cpu,*")
    assert torch.equal(studio.latent(first), want)
    homed = residence(studio, first)._homed
    rooms, pinned = {name: block.room for name, block in homed.items()}, studio.world.pinned_bytes()
    assert torch.equal(studio.latent(studio.place(first, f"{zero},30%;cpu,*")), want)
    homed = residence(studio, first)._homed
    assert rooms.keys() - homed.keys(), "some have left"
    assert all(homed[name].room is rooms[name] for name in rooms.keys() & homed.keys())
    assert studio.world.pinned_bytes() >= pinned
    monkeypatch.setattr(module, "UNUSED", 0)
    assert torch.equal(studio.latent(studio.place(first, f"{zero},40%;cpu,*")), want)
    homed = residence(studio, first)._homed
    assert studio.world.pinned_bytes() == sum(block.room.size for block in homed.values())


def test_memory_that_the_driver_does_not_pin_is_no_error_of_the_next_kernel(studio: Studio) -> None:
    from multigpu.stream.arena import Arena

    zero, arena = torch.device(studio.accelerators[0]), Arena(torch.device("cpu"), [8192])
    data = arena.room(8192).segment.data
    assert studio.world.register_host(data[4096:]) == 0, "a part of it is pinned already, by other code"
    assert not arena.pin(zero)
    assert torch.zeros(1, device=zero).item() == 0
    studio.world.unregister_host(data[4096:])


def test_a_copy_beside_the_ring_is_over_before_its_memory_is_unpinned(studio: Studio) -> None:
    """As for probes of hoisted layers."""
    from multigpu.plan import CPU, DeviceId, Placement, Plan, Reason
    from multigpu.stream.residence import Residence

    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    compute, size, its = DeviceId.parse(studio.accelerators[0]), 4 * 64 * 64, Residence()
    its.apply(Plan(compute, (Placement("layer", size, CPU, compute, Reason.STREAMED),), size), {"layer": layer})
    assert its.streamer is not None
    its.streamer._copy_here(its._homed["layer"])
    its.close()
    assert studio.world.races() == []
