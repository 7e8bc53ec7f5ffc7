"""The first step is the load: blocks come from the model file, and get their patches, when they are first used."""

from __future__ import annotations

import functools
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio
from tests.engine.test_failures import Stumble, streamed_block, stumble_in

pytestmark = pytest.mark.pages


def residence(studio: Studio, placed: Any) -> Any:
    return studio.states.of(placed).residence


class Gate:
    """Lets so many reads of the file pass, and the others when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from multigpu.stream.pages import PagedLeaf

        self.real, self.left, self._open = PagedLeaf.read_into, 0, threading.Event()
        self._lock = threading.Lock()
        gate = self

        def read_into(leaf: Any, memory: Any, begin: int = 0) -> None:
            with gate._lock:
                gate.left -= 1
                passes = gate.left >= 0
            if not passes:
                gate._open.wait(60)
            gate.real(leaf, memory, begin)

        monkeypatch.setattr(PagedLeaf, "read_into", read_into)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def run_of(placed: Any) -> tuple[list[str], Callable[[], None]]:
    """The modules that run from now on, in order, as far as the plan knows them."""
    ran: list[str] = []
    handles = [
        placed.model.get_submodule(placement.block).register_forward_hook(
            lambda *_, name=placement.block: ran.append(name)
        )
        for placement in placed.placed.plan.placements
        if placement.block != "(root)"
    ]
    return ran, lambda: [handle.remove() for handle in handles] and None


def test_a_load_returns_before_the_file_is_read_and_the_first_step_follows_the_reading(
    studio: Studio, gate: Gate
) -> None:
    import comfy.model_management as memory

    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux())
    gate.left = 60  # of about 4,000 parts
    memory.load_models_gpu([placed])
    assert residence(studio, placed).due.outstanding
    assert studio.states.of(placed).count is None, "nothing is claimed of bytes that are not there"
    (told,) = studio.snapshot().models
    assert told.resting["disk"] > 0
    ran, remove = run_of(placed)
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        with torch.inference_mode():
            drawn.append(studio.latent(placed))

    drawing = threading.Thread(target=draw)
    drawing.start()
    while not ran:
        drawing.join(0.01)
        assert drawing.is_alive()
    assert len(ran) < len(placed.placed.plan.placements) // 2, "it waits for what has not been read"
    gate.open()
    drawing.join()
    remove()
    assert torch.equal(drawn[0], want)
    assert not residence(studio, placed).due.outstanding
    assert studio.states.of(placed).count == studio.proven(placed) == studio.planned(placed)


def test_a_load_takes_the_memory_of_the_compute_device_at_once(studio: Studio, gate: Gate) -> None:
    """So that the host does not give it to another model meanwhile."""
    import comfy.model_management as memory

    placed = studio.place(studio.flux(), f"{studio.accelerators[0]},60%;cpu,*")
    memory.load_models_gpu([placed])
    assert residence(studio, placed).due.outstanding
    plan = placed.placed.plan
    assert studio.world.allocated(studio.accelerators[0]) >= plan.bytes_on(plan.compute) + plan.ring_bytes
    gate.open()


@pytest.mark.parametrize("then", ["again", "lora", "unload", "drop", "move"])
def test_a_first_step_that_breaks_off(studio: Studio, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """What has come stays, what has not still comes; or all of it goes."""
    model = studio.flux()
    strong, weak = studio.lora(model, 0.8), studio.lora(model, 0.3)
    want = {"again": studio.latent(strong), "lora": studio.latent(weak)}
    studio.unload()
    base = studio.place(studio.flux())
    placed = studio.lora(base, 0.8)
    error = Stumble()
    _, owner, forward = stumble_in(placed, streamed_block(placed), error)
    with monkeypatch.context() as patched:
        patched.setattr(owner, "forward", forward)
        with pytest.raises(Stumble):
            studio.latent(placed)
    assert residence(studio, placed).due.outstanding
    assert 0 < len(placed.backup) < len(placed.patches), "some have their patches, and the table knows which"
    if then == "unload":
        studio.unload()
        assert not placed.backup and set(studio.resting(placed)) == {"cpu"}
    elif then == "move":
        placed = studio.place(studio.lora(studio.flux(), 0.8), f"{studio.accelerators[0]},50%;cpu,*")
    elif then == "drop":
        del placed
        studio.settle()
        placed = studio.lora(base, 0.8)
    elif then == "lora":
        placed = studio.lora(base, 0.3)
    assert torch.equal(studio.latent(placed), want.get(then, want["again"]))
    assert studio.proven(placed) == studio.planned(placed)


def test_another_lora_reads_only_the_weights_that_it_changes(studio: Studio, gate: Gate) -> None:
    model = studio.flux()
    want = [studio.latent(studio.lora(model, strength)) for strength in (0.8, 0.3)]
    studio.unload()
    gate.open()
    placed = studio.place(studio.flux())
    first, second = studio.lora(placed, 0.8), studio.lora(placed, 0.3)
    assert torch.equal(studio.latent(first), want[0])
    homes = {placement.block: str(placement.home) for placement in placed.placed.plan.placements}
    homed = residence(studio, placed)._homed
    rooms = {name: block.room for name, block in homed.items() if homes[name] == "cpu"}
    pinned, came = studio.world.pinned_bytes(), []
    arrived = residence(studio, placed).due._arrivals.bring
    residence(studio, placed).due._arrivals.bring = lambda block: (came.append(block), arrived(block))[1]
    assert torch.equal(studio.latent(second), want[1])
    assert {*came} == {key.rpartition(".")[0] for key in second.patches}
    assert all(homed[name].room is room for name, room in rooms.items()), "the same memory"
    assert studio.world.pinned_bytes() == pinned


def test_a_lora_on_a_loaded_model_reads_nothing(studio: Studio, gate: Gate) -> None:
    model = studio.flux()
    want = studio.latent(studio.lora(model, 0.8))
    studio.unload()
    gate.left = 1 << 30
    placed = studio.place(studio.flux())
    studio.latent(placed)
    gate.left = 1 << 30
    assert torch.equal(studio.latent(studio.lora(placed, 0.8)), want)
    assert gate.left == 1 << 30
    assert studio.proven(placed) == studio.planned(placed)


def test_a_file_that_changes_while_it_is_read_is_an_error(studio: Studio, tmp_path: Path, gate: Gate) -> None:
    import comfy.model_management as memory
    import comfy.sd

    from multigpu.errors import HostError

    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(comfy.sd.load_diffusion_model(str(file)))
    memory.load_models_gpu([placed])
    with file.open("ab") as grown:
        grown.write(b" ")
    gate.open()
    for _ in range(2):
        with pytest.raises(HostError, match="has changed on disk since it was loaded"):
            studio.latent(placed)
    del placed
    studio.settle()
    again = studio.place(comfy.sd.load_diffusion_model(str(file)))
    assert torch.equal(studio.latent(again), want)


def test_a_file_that_cannot_be_read_is_an_error_and_then_it_can(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigpu.errors import HostError
    from multigpu.stream.pages import PagedLeaf

    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux())
    with monkeypatch.context() as patched:

        def broken(leaf: Any, memory: Any, begin: int = 0) -> None:
            raise OSError("Input/output error")

        patched.setattr(PagedLeaf, "read_into", broken)
        with pytest.raises(HostError, match="could not be read from its model file: Input/output error"):
            studio.latent(placed)
    assert torch.equal(studio.latent(placed), want)


def test_blocks_that_a_pass_leaves_out_come_after_it(studio: Studio) -> None:
    """A second pass begins: nothing is left on its way."""
    placed = studio.place(studio.flux())
    module = placed.model.get_submodule("diffusion_model.single_blocks.3")
    with torch.inference_mode(False):
        module.forward = lambda x, **_: x  # as a node that skips layers
    try:
        studio.latent(placed, steps=1)
        assert residence(studio, placed).due.outstanding
        studio.latent(placed, steps=2)
    finally:
        del module.forward
    assert not residence(studio, placed).due.outstanding
    assert studio.states.of(placed).count == studio.planned(placed)


@pytest.mark.parametrize("text", [None, "cuda:0,30%;cpu,10%;disk,*"])
def test_weights_are_saved_with_patches_that_were_to_come_later(studio: Studio, tmp_path: Path, text: Any) -> None:
    import comfy.sd
    from safetensors.torch import load_file

    comfy.sd.save_checkpoint(str(tmp_path / "stock.safetensors"), studio.lora(studio.flux(), 0.8))
    studio.unload()
    comfy.sd.save_checkpoint(str(tmp_path / "ours.safetensors"), studio.lora(studio.place(studio.flux(), text), 0.8))
    stock, ours = (load_file(tmp_path / f"{name}.safetensors") for name in ("stock", "ours"))
    assert stock.keys() == ours.keys() and all(torch.equal(stock[key], ours[key]) for key in stock)


@pytest.mark.parametrize("tries", [1, 1000])
def test_a_lora_for_which_there_is_no_room_is_not_left_out(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """The host leaves out a patch that runs out of memory, and only logs it. Then there may be room, or not."""
    import comfy.utils

    from multigpu.errors import DeviceError

    zero = studio.accelerators[0]
    stock = studio.latent(studio.flux())
    want = studio.latent(studio.lora(studio.flux(), 0.8))
    studio.unload()
    placed = studio.place(studio.flux(), f"{zero},20%;cpu,*")
    patched = studio.lora(placed, 0.8)
    real, left = type(patched).patch_weight_to_device, iter(range(tries))

    @functools.wraps(real)
    def scarce(self: Any, key: str, *arguments: Any, **named: Any) -> Any:
        size = 4 * comfy.utils.get_attr(self.model, key).numel()
        if size > 1 << 20 and next(left, None) is not None:  # room for the weight in 32 bits, not for the patch
            studio.world.limit(zero, studio.world.allocated(zero) + 3 * size // 2)
        try:
            return real(self, key, *arguments, **named)
        finally:
            studio.world.limit(zero, 6 << 30)

    with monkeypatch.context() as context:
        context.setattr(type(patched), "patch_weight_to_device", scarce)
        if tries == 1:
            assert torch.equal(studio.latent(patched), want)
        else:
            with pytest.raises(
                DeviceError, match=r"cuda:0 has no room to apply the patches \(LoRAs\) of .*; leave more"
            ):
                studio.latent(patched)
    assert torch.equal(studio.latent(patched), want)
    assert torch.equal(studio.latent(placed), stock)
    assert studio.proven(placed) == studio.planned(placed)


def test_a_system_without_positional_reads_and_huge_pages(
    studio: Studio, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows: threads copy from the pages of the file instead."""
    model = studio.flux()
    want = [studio.latent(model), *(studio.latent(studio.lora(model, strength)) for strength in (0.8, 0.3))]
    del model
    studio.unload()
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    gate.open()
    placed = studio.place(studio.flux())
    patchers = [placed, studio.lora(placed, 0.8), studio.lora(placed, 0.3)]
    reads = []
    for index in (0, 1, 2):
        before = gate.left
        assert torch.equal(studio.latent(patchers[index]), want[index])
        assert studio.proven(placed) == studio.planned(placed)
        reads.append(before - gate.left)
    assert reads[0] > reads[2] > reads[1] == 0, "all, none that are there, those with the other LoRA"
