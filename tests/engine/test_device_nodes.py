"""Our nodes on several devices: components compute where the workflow says, and draw what they draw elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multigpu.lifecycle.policy import Standing
from multigpu.plan import DeviceId
from tests.engine.pack import Pack, decoded, resting, text
from tests.engine.studio import Studio

UNET = {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"}
CLIP = {"clip_name": "toy_clip_l.safetensors", "type": "sd3"}
VAE = {"vae_name": "toy_taef1.safetensors"}
CHECKPOINT = {"ckpt_name": "toy_sd15.safetensors"}
CONTROL = {"control_net_name": "toy_sd15_controlnet.safetensors"}


def devices(studio: Studio) -> list[str]:
    """Another accelerator than the default one, where there is any, and the CPU."""
    return [*studio.accelerators[1:2], "cpu"]


SPREADS = ["MultiGPU", "DisTorch2MultiGPU"]


@pytest.mark.parametrize("variant", SPREADS)
def test_a_diffusion_model_computes_where_the_loader_node_says(studio: Studio, pack: Pack, variant: str) -> None:
    stock = studio.latent(studio.flux())
    for device in studio.accelerators[1:2] or ["cpu"]:
        name = "device" if variant == "MultiGPU" else "compute_device"
        model = pack.one(f"UNETLoader{variant}", **UNET, **{name: device})
        assert str(model.load_device) == device
        assert torch.equal(studio.latent(model), stock)
        if variant == "MultiGPU":
            assert resting(model).keys() == {device}
        elif studio.simulated:
            assert resting(model)["cpu"] > 10 * resting(model)[device], "the widgets' defaults send 4 GiB to the CPU"


@pytest.mark.parametrize("variant", SPREADS)
def test_a_text_encoder_computes_where_the_loader_node_says(studio: Studio, pack: Pack, variant: str) -> None:
    stock = text(studio.clip())
    for device in devices(studio):
        clip = pack.one(f"CLIPLoader{variant}", **CLIP, device=device)
        assert str(clip.patcher.load_device) == device and clip.cond_stage_model is clip.patcher.model
        assert torch.equal(text(clip), stock)
        assert device in resting(clip)


@pytest.mark.parametrize("variant", SPREADS)
def test_a_vae_computes_where_the_loader_node_says(studio: Studio, pack: Pack, variant: str) -> None:
    stock = decoded(studio.vae("toy_taef1.safetensors"))
    for device in devices(studio):
        name = "device" if variant == "MultiGPU" else "compute_device"
        vae = pack.one(f"VAELoader{variant}", **VAE, **{name: device})
        assert str(vae.device) == str(vae.patcher.load_device) == device
        assert vae.first_stage_model is vae.patcher.model
        result = decoded(vae)
        assert torch.equal(result, stock) if device != "cpu" else torch.allclose(result, stock, atol=0.05)
        assert device in resting(vae)


def test_a_checkpoint_has_a_device_for_each_part(studio: Studio, pack: Pack) -> None:
    first, second, third = studio.accelerators if studio.simulated else ["cpu"] * 3
    model, clip, vae = pack.run(
        "CheckpointLoaderAdvancedMultiGPU", **CHECKPOINT, unet_device=second, clip_device=third, vae_device=first
    )
    assert [str(part.load_device) for part in (model, clip.patcher, vae.patcher)] == [second, third, first]
    assert [*resting(model)] == [second]
    assert [*resting(clip)] == [third]
    assert [*resting(vae)] == [first]
    stock_model, stock_clip, stock_vae = studio.sd15()
    assert torch.equal(text(clip), text(stock_clip))
    assert torch.equal(decoded(vae, 4), decoded(stock_vae, 4))
    conditions = studio.conditions(768)
    empty = torch.zeros(1, 4, 8, 8)
    assert torch.equal(
        studio.latent(model, conditions, empty=empty.clone()),
        studio.latent(stock_model, conditions, empty=empty.clone()),
    )


def test_a_checkpoint_is_spread_part_by_part(studio: Studio, pack: Pack) -> None:
    first, second, third = studio.accelerators if studio.simulated else ["cpu"] * 3
    model, clip, vae = pack.run(
        "CheckpointLoaderAdvancedDisTorch2MultiGPU",
        **CHECKPOINT,
        unet_compute_device=second,
        unet_virtual_vram_gb=0.002,
        unet_donor_device=third,
        clip_compute_device="cpu",
        clip_virtual_vram_gb=2.0,
        clip_donor_device="cpu",
        vae_device=third,
    )
    assert resting(model).keys() == {second, third}
    assert resting(clip).keys() == {"cpu"}
    assert resting(vae).keys() == {third}


def test_a_loader_that_raises_leaves_the_devices_as_they_were(studio: Studio, pack: Pack) -> None:
    for device in devices(studio):
        with pytest.raises(Exception, match=r"missing\.safetensors"):
            pack.run("UNETLoaderMultiGPU", unet_name="missing.safetensors", weight_dtype="default", device=device)


def test_scopes_nest_and_threads_do_not_mix(studio: Studio, pack: Pack) -> None:
    import comfy.model_management as memory

    scope = pack.runtime.placer.scope
    default, cpu = memory.get_torch_device(), torch.device("cpu")
    other = torch.device(studio.accelerators[1]) if studio.simulated else cpu
    seen: list[torch.device] = []
    with scope.on(cpu):
        assert memory.get_torch_device() == cpu
        with scope.on(other):
            assert memory.get_torch_device() == other
            thread = threading.Thread(target=lambda: seen.append(memory.get_torch_device()))
            thread.start()
            thread.join()
        assert memory.get_torch_device() == cpu
        with pytest.raises(ZeroDivisionError), scope.on(other):
            _ = 1 / 0
        assert memory.get_torch_device() == cpu
    assert memory.get_torch_device() == default
    assert seen == [default]


def scopes_in_threads(scope: Any, count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_threads_may_choose_the_cpu_at_once(studio: Studio, pack: Pack) -> None:
    import comfy.model_management as memory

    original = memory.get_torch_device
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(50):
            with pack.runtime.placer.scope.on(torch.device("cpu")):
                if memory.get_torch_device() != torch.device("cpu"):
                    wrong.append(number)

    scopes_in_threads(pack.runtime.placer.scope, 4, work)
    assert wrong == []
    assert memory.get_torch_device is original


@pytest.mark.parametrize("choice", ["keep", "eject"])
@pytest.mark.parametrize("loader", ["CheckpointLoaderSimple", "CheckpointLoaderAdvanced"])
def test_a_checkpoint_that_lacks_parts_is_kept_and_ejected(
    studio: Studio, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, choice: str
) -> None:
    import folder_paths

    from multigpu.host.loaded_models import standing

    whole = load_file(studio.models / "checkpoints" / "toy_sd15.safetensors")
    diffusion = {name: tensor for name, tensor in whole.items() if name.startswith("model.diffusion_model.")}
    save_file(diffusion, tmp_path / "bare.safetensors")
    paths, suffixes = folder_paths.folder_names_and_paths["checkpoints"]
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", ([*paths, str(tmp_path)], suffixes))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})  # pytest removes the folder after the test
    device = {"CheckpointLoaderSimple": {"compute_device": "cpu"}, "CheckpointLoaderAdvanced": {
        "unet_compute_device": "cpu", "clip_compute_device": "cpu", "vae_device": "cpu", "unet_virtual_vram_gb": 0.0,
        "unet_donor_device": "cpu", "clip_virtual_vram_gb": 0.0, "clip_donor_device": "cpu"}}[loader]  # fmt: skip
    model, clip, vae = pack.run(
        f"{loader}DisTorch2MultiGPU", ckpt_name="bare.safetensors", keep_loaded=choice, **device
    )
    assert clip is None and getattr(vae, "first_stage_model", None) is None
    assert standing(model.model).value == choice
    pack.runtime.free_flow.keep(model, Standing.DEFAULT)


@pytest.mark.accelerator
def test_a_device_that_does_not_tell_what_is_free_is_called_unknown(studio: Studio) -> None:
    """Its driver tells the size of the memory: nothing free of that would be false."""
    from multigpu.devices.backends import Device
    from multigpu.host.snapshots import Snapshots

    cpu, silent = studio.placer.inventory.devices[-1], Device(DeviceId("nosuch", 0), "a card", 6 << 30)
    inventory: Any = SimpleNamespace(accelerators=(silent,), devices=(silent, cpu), links=dict)
    taken = Snapshots(inventory, list, threading.RLock()).take()
    assert "nosuch:0 unknown" in taken.line() and taken.to_json()["devices"][0]["used"] is None
