"""Blocks that rest in the model file: nothing of them is copied to RAM, and they are read each time they are used."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.studio import Studio, load_whole

pytestmark = pytest.mark.pages

HALF = "cuda:0,40%;disk,*"


def ram_of(studio: Studio, patcher: Any) -> int:
    """Bytes of RAM that the engine holds for a model."""
    arenas = studio.states.of(patcher).residence._arenas
    return sum(segment.data.numel() for arena in arenas for segment in arena.segments)


def on_disk(studio: Studio, patcher: Any) -> set[str]:
    residence = studio.states.of(patcher).residence
    return {block for block in residence._homed if residence.is_in_file(block)}


@pytest.mark.parametrize("ring", [1, 300_000, 2 << 20])
def test_the_picture_is_the_same_and_nothing_is_copied_to_ram(studio: Studio, ring: int) -> None:
    model = studio.flux()
    want = studio.latent(model)
    studio.unload()
    placed = studio.place(studio.flux(), HALF, ring)
    before = studio.proven(placed)
    for _ in range(2):
        for seed in (1, 2):
            latent = studio.latent(placed, seed=seed)
            assert torch.equal(latent, want) == (seed == 1)
        assert studio.proven(placed) == studio.planned(placed)
        assert studio.proven(placed)["disk"] > studio.proven(placed)["cuda:0"]
        assert ram_of(studio, placed) == 0
        counters = studio.states.of(placed).residence.streamer.counters
        assert counters.copies > 0 and counters.unstaged == 0
        studio.unload()
        assert studio.proven(placed) == before, "nothing was copied back"


def test_three_kinds_of_homes_at_once(studio: Studio) -> None:
    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux(), "cuda:0,20%;cuda:1,20%;cpu,20%;disk,*")
    assert torch.equal(studio.latent(placed), want)
    assert studio.proven(placed) == studio.planned(placed) and len(studio.proven(placed)) == 4
    assert ram_of(studio, placed) < studio.proven(placed)["cpu"] * 1.1


def test_tensors_that_are_not_in_the_file_rest_in_ram_beside_it(studio: Studio) -> None:
    want = studio.latent(studio.flux())
    studio.unload()
    model = studio.flux()
    placed = studio.place(model, HALF)
    block = next(p.block for p in placed.placed.plan.streamed)
    module = model.model.get_submodule(block)
    module.register_buffer("note", torch.arange(7.0))
    assert torch.equal(studio.latent(placed), want)
    assert block in on_disk(studio, placed) and 0 < ram_of(studio, placed) < 10_000
    assert torch.equal(module.note, torch.arange(7.0))
    studio.unload()
    assert torch.equal(studio.latent(placed), want)
    del module.note


def test_auto_uses_disk_when_ram_is_short(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.host.placing import placer
    from multigpu.plan import CPU, DeviceBudget, DeviceId

    model = studio.flux()
    want, size = studio.latent(model), sum(weight.nbytes for weight in model.model.parameters())
    studio.unload()
    small = [
        DeviceBudget(DeviceId("cuda", 0), size, size // 2),
        DeviceBudget(CPU, size, size // 3),
    ]
    monkeypatch.setattr(placer, "budgets", lambda devices, needed: list(small))
    placed = studio.place(studio.flux(), "auto,0b", ring=size // 10)
    planned = studio.planned(placed)
    assert planned["disk"] > 0 and 0 < planned["cpu"] < size // 3 - size // 8
    assert torch.equal(studio.latent(placed), want)
    assert studio.proven(placed) == planned


def test_a_plan_for_more_ram_than_there_is_leaves_the_rest_in_the_file(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from multigpu.host.engine import donor_room

    want = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux(), "cuda:0,30%;cpu,*")
    most = studio.planned(placed)["cpu"] // 2
    monkeypatch.setattr(donor_room, "ram", lambda: (0, most))
    with caplog.at_level(logging.WARNING, "multigpu"):
        assert torch.equal(studio.latent(placed), want)
    assert "stays in its file instead" in caplog.text
    assert studio.proven(placed)["cpu"] <= most and studio.proven(placed)["disk"] > 0
    monkeypatch.undo()
    assert torch.equal(studio.latent(placed), want)
    assert studio.proven(placed) == studio.planned(placed), "there is room again"


def test_a_lora_is_applied_as_weights_pass(studio: Studio) -> None:
    model = studio.flux()
    want = [studio.latent(model), studio.latent(studio.lora(model, 0.8)), studio.latent(studio.lora(model, 0.3))]
    studio.unload()
    placed = studio.place(studio.flux(), HALF)
    patchers = [placed, studio.lora(placed, 0.8), studio.lora(placed, 0.3)]
    for index in (1, 2, 0, 2, 1, 0):
        assert torch.equal(studio.latent(patchers[index]), want[index])
        assert studio.proven(placed) == studio.planned(placed)
        assert ram_of(studio, placed) == 0
        filed = on_disk(studio, placed)
        assert not [key for key in placed.backup if key.rpartition(".")[0] in filed], "they are not patched at rest"
    studio.latent(patchers[1])
    studio.unload()
    assert not placed.backup
    assert torch.equal(studio.latent(patchers[2]), want[2])


def test_patched_weights_come_and_go_between_disk_and_elsewhere(studio: Studio) -> None:
    """The host asks for room, and gives it back; another plan for the same model."""
    model = studio.flux()
    want = studio.latent(studio.lora(model, 0.8))
    studio.unload()
    placed = studio.lora(studio.place(studio.flux(), HALF), 0.8)
    assert torch.equal(studio.latent(placed), want)
    before = studio.proven(placed)
    placed.partially_unload(placed.offload_device, before["cuda:0"] // 2)
    assert studio.proven(placed)["disk"] > before["disk"] and "cpu" not in studio.proven(placed)
    assert torch.equal(want, _drawn_without_loading(studio, placed))
    load_whole(placed)
    assert studio.proven(placed) == before
    assert torch.equal(studio.latent(placed), want)


def _drawn_without_loading(studio: Studio, placed: Any) -> torch.Tensor:
    """A picture, with the model as it is loaded now."""
    from unittest import mock

    with mock.patch.object(type(placed), "partially_load", lambda *_, **__: 0):
        return studio.latent(placed)


def test_another_plan_for_the_same_model_takes_over(studio: Studio) -> None:
    model = studio.flux()
    want = studio.latent(studio.lora(model, 0.8))
    studio.unload()
    own = studio.flux()
    texts = (HALF, "cuda:0,30%;cpu,*", "cuda:0,70%;disk,*", "cuda:0,30%;cuda:1,*", "cuda:0,10%;disk,*")
    for text in texts:
        placed = studio.lora(studio.place(own, text), 0.8)
        assert torch.equal(studio.latent(placed), want), text
        assert studio.proven(placed) == studio.planned(placed)


def test_weight_hooks_bring_their_blocks_to_ram(studio: Studio) -> None:
    from tests.engine.test_patches import hooked

    both = {"positive": hooked(studio, 0.7), "negative": studio.conditions(), "cfg": 2.0}
    want = studio.latent(studio.flux(), **both)
    plain = studio.latent(studio.flux())
    studio.unload()
    placed = studio.place(studio.flux(), HALF)
    assert torch.equal(studio.latent(placed), plain)
    before = studio.proven(placed)["disk"]
    assert torch.equal(studio.latent(placed, **both), want)
    assert studio.proven(placed).get("disk", 0) < before and studio.proven(placed)["cpu"] > 0
    assert torch.equal(studio.latent(placed), plain)


def test_hooks_cannot_write_into_the_file(studio: Studio) -> None:
    """Should they come while the blocks are there."""
    from multigpu.errors import HostError

    placed = studio.place(studio.flux(), HALF)
    studio.latent(placed)
    block = next(iter(on_disk(studio, placed)))
    placed.hook_patches = {"a hook": {f"{block}.weight": ()}}
    with pytest.raises(HostError, match=r"rests in the model file and cannot be written.*write cpu instead of disk"):
        placed.patch_hooks("hooks")
    placed.hook_patches = {}


def test_saving_sees_patched_weights(studio: Studio) -> None:
    import comfy.model_management as memory

    model = studio.lora(studio.flux(), 0.8)
    memory.load_models_gpu([model], force_patch_weights=True)
    want = {key: tensor.cpu().clone() for key, tensor in model.model.state_dict().items()}
    studio.unload()
    placed = studio.lora(studio.place(studio.flux(), HALF), 0.8)
    studio.latent(placed)
    memory.load_models_gpu([placed], force_patch_weights=True)
    saved = placed.model.state_dict()
    assert all(torch.equal(saved[key].cpu(), tensor) for key, tensor in want.items())


def test_a_file_that_is_overwritten_while_it_streams_raises_an_error(studio: Studio, tmp_path: Path) -> None:
    import comfy.sd

    from multigpu.errors import HostError

    file = tmp_path / "model.safetensors"
    shutil.copy(studio.models / "diffusion_models" / "toy_flux.safetensors", file)
    placed = studio.place(comfy.sd.load_diffusion_model(str(file)), HALF)
    studio.latent(placed)
    file.write_bytes(file.read_bytes())
    changed = r"has changed on disk since it was loaded.*Unload Models and Execution Cache"
    with pytest.raises(HostError, match=changed):
        _drawn_without_loading(studio, placed)
    with pytest.raises(HostError, match=changed):
        studio.latent(placed)
    studio.unload()
    with pytest.raises(HostError, match=changed):
        studio.latent(placed)


def test_an_error_of_the_driver_is_raised_and_nobody_waits_for_ever(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = studio.place(studio.flux(), f"{studio.accelerators[0]},50%;disk,*")
    want = studio.latent(placed)
    event = torch.cuda.Event

    def broken(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread().name == "multigpu-file-lane":
            raise RuntimeError("the driver has failed")
        return event(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "Event", broken)
        with pytest.raises(RuntimeError, match="the driver has failed"):
            studio.latent(placed, steps=3)
        studio.unload()
    studio.world.take_races()  # without events nothing could be ordered
    assert torch.equal(studio.latent(placed), want)


def test_what_cannot_rest_in_a_file_is_refused(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.errors import AllocationError
    from multigpu.host.engine import file_pages

    with pytest.raises(AllocationError, match="no diffusion model, and only the weights of those .* write cpu instead"):
        studio.place(studio.clip().patcher, HALF)
    model = studio.flux()
    with monkeypatch.context() as without:
        without.setattr(file_pages, "_page_of", lambda weight: None)
        with pytest.raises(AllocationError, match="DynamicVRAM is off .* write cpu instead"):
            studio.place(model, HALF)
    with pytest.raises(AllocationError, match="cast to another type"):
        from multigpu.host.placing import disk

        raise disk.refusal(model, dynamic_vram=True)


def test_weights_of_another_type_than_in_the_file_stay_or_go_to_ram(studio: Studio) -> None:
    from multigpu.errors import AllocationError

    with pytest.raises(AllocationError, match="disk is named"):
        studio.place(studio.flux("fp8_e4m3fn"), HALF)


def test_the_cpu_computes_with_weights_in_the_file(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.plan import DISK

    def own() -> Any:
        model = studio.flux()
        model.load_device = torch.device("cpu")
        return model

    want = studio.latent(studio.place(own(), "cpu,*"))
    studio.unload()
    placed = studio.place(own(), "disk,60%;cpu,*")
    assert torch.equal(studio.latent(placed), want)
    assert placed.placed.plan.bytes_on(DISK) > 0 and ram_of(studio, placed) == 0


def test_a_report_names_the_disk(studio: Studio) -> None:
    from multigpu.telemetry.report import report

    placed = studio.place(studio.flux(), HALF)
    studio.latent(placed)
    snapshot = studio.snapshot()
    (model,) = snapshot.models
    assert model.resting == studio.proven(placed)
    assert " on cuda:0, " in report(snapshot) and " on disk" in report(snapshot)


def test_its_speed_is_measured_once(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu.host.placing import disk

    asked: list[bool] = []

    def speed(pages: Any, *, cached: bool) -> float:
        asked.append(cached)
        return 1.234e9

    monkeypatch.setattr(disk, "reading_speed", speed)
    model = studio.flux()
    plans = [studio.plan(model, HALF), studio.plan(model, HALF)]
    assert asked == [True], "free RAM can hold this file"
    streamed = plans[1].bytes_by_home()
    (link,) = plans[1].forecast.links
    assert link[1] == next(count for home, count in streamed.items() if home.is_disk) / 1.2e9
    studio.plan(model, "cuda:0,40%;cpu,*")
    assert asked == [True]
