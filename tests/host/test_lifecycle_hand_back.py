"""What a retained model gives the next prompt: the same object, no file read, nothing of the old prompt's LoRA."""

from __future__ import annotations

import os
import shutil

import pytest

from devtools.client import Workflow
from tests.host import file_opens
from tests.host.conftest import StartHost
from tests.host.lifecycle import BOTH, FILES, LORA, PACKS, Keeper, flux, own_models, short
from tests.host.workflows import node

linux = pytest.mark.skipif(not file_opens.AVAILABLE, reason="inotify is a part of Linux")


def another_workflow(seed: int) -> Workflow:
    """One that uses none of the Flux workflow's models: a picture through another VAE."""
    return {
        "image": node("EmptyImage", width=64, height=64, batch_size=1, color=seed),
        "vae": node("VAELoader", vae_name="toy_wan_vae.safetensors"),
        "encode": node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
        "decode": node("VAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="another"),
    }


@linux
def test_the_lora_of_the_old_prompt_is_not_left_behind(keeper: Keeper) -> None:
    plain, patched = keeper.draw(short(61)), keeper.draw(short(61, lora=1.0))
    keeper.forget()
    assert keeper.draw(short(61, lora=1.0, model="keep")) == patched != plain
    kept = keeper.objects()["Flux"][1]
    keeper.free(**BOTH)
    with file_opens.watch(keeper.server.spec.models) as opens:
        assert keeper.draw(short(61, model="keep")) == plain
        assert FILES["model"] not in opens.take()
        keeper.free(**BOTH)
        assert keeper.draw(short(61, lora=0.5, model="keep")) not in (plain, patched)
        keeper.free(**BOTH)
        assert keeper.draw(short(61, lora=1.0, model="keep")) == patched
        opened = opens.take()
        assert FILES["model"] not in opened and opened[LORA] > 0
    assert keeper.objects()["Flux"][1] == kept


@linux
def test_a_pinned_model_outlives_another_workflow(keeper: Keeper) -> None:
    """The executor's cache drops what other workflows made; the pinned model is there all the same."""
    picture = keeper.draw(short(62, model="keep", vae="keep"))
    before = keeper.objects()
    keeper.run(another_workflow(62))
    keeper.free(**BOTH)
    keeper.run(another_workflow(63))
    with file_opens.watch(keeper.server.spec.models) as opens:
        assert keeper.draw(short(62, model="keep", vae="keep")) == picture
        assert opens.take() == {}
    assert keeper.objects() == before


@linux
def test_a_changed_file_is_loaded_anew_and_the_old_model_goes(keeper: Keeper) -> None:
    file = keeper.server.spec.models / FILES["vae"]
    own = file.with_suffix(".own")
    shutil.copy2(file, own)
    os.replace(own, file)  # a file of its own, which may be changed
    keeper.run(short(64, vae="keep", model="keep"))
    before = keeper.objects()
    keeper.free(**BOTH)
    os.utime(file)
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(short(64, vae="keep", model="keep"))
        opened = opens.take()
    assert set(opened) == {FILES["vae"]}
    assert keeper.objects()["TAESD"] != before["TAESD"]
    assert keeper.held() == ["Flux", "TAESD"], "one of each"
    assert keeper.names() == ["Flux", "TAESD"]


@linux
def test_changed_inputs_are_loaded_anew(keeper: Keeper) -> None:
    workflow = short(65, model="keep")
    keeper.run(workflow)
    keeper.free(**BOTH)
    workflow["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(workflow)
        assert opens.take()[FILES["model"]] > 0
    assert keeper.held() == ["Flux", "Flux"], "both were pinned, and they are different models"


@linux
def test_a_loader_whose_keep_loaded_changes_loads_nothing(keeper: Keeper) -> None:
    def loading(said: str) -> Workflow:
        workflow = short(73)
        workflow["model"] = node(
            "UNETLoaderDisTorch2MultiGPU", unet_name="toy_flux.safetensors", weight_dtype="default",
            compute_device="cpu", virtual_vram_gb=0.0, donor_device="cpu", keep_loaded=said,
        )  # fmt: skip
        return workflow

    keeper.run(loading("keep"))
    before = keeper.objects()
    keeper.free(**BOTH)
    assert keeper.objects() == {"Flux": before["Flux"]}
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(loading("keep"))
        keeper.run(loading("eject"))
        assert FILES["model"] not in opens.take()
    assert keeper.objects()["Flux"][1] == before["Flux"][1]
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"]


def test_images_and_latents_are_never_held(keeper: Keeper) -> None:
    keeper.run(short(66, model="keep", vae="keep"))
    held = keeper.client.get("/lifecycle/held")
    assert held["models"] == ["Flux", "TAESD"]
    assert held["records"] == 4, "two loaders and two place nodes"


def test_an_anchor_set_by_another_pack_lasts_for_one_cycle(keeper: Keeper) -> None:
    keeper.run(short(72, vae="keep"))
    keeper.client.raw("/lifecycle/anchor", {"model": "Flux"})
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"]
    assert keeper.held() == ["Flux", "TAESD"], "unloaded, as nobody pinned it, and alive"
    keeper.run(another_workflow(72))
    assert keeper.held() == ["TAESD"]
    assert keeper.client.post("/lifecycle/clear", {}) == 1
    assert keeper.held() == []


@linux
@pytest.mark.parametrize("cache", ["--cache-classic", "--cache-none"])
def test_with_other_caches_of_the_executor(
    start_host: StartHost, tmp_path_factory: pytest.TempPathFactory, cache: str
) -> None:
    """Handed back where the executor asks; without any cache a pinned model is replaced by its successor, never two."""
    folder = own_models(tmp_path_factory.mktemp("models"))
    own = Keeper(start_host(packs=PACKS, models=folder, flags=("--cpu", cache)).server)
    workflow = short(67, vae="keep", model="eject")
    picture = own.draw(workflow)
    before = own.objects()["TAESD"]
    for _ in range(3):
        own.free(**BOTH)
        assert "TAESD" in own.names()
        with file_opens.watch(folder) as opens:
            assert own.draw(workflow) == picture
            reads = opens.take()[FILES["vae"]]
        assert (reads == 0) == (cache == "--cache-classic")
        assert own.held() == ["TAESD"]
        assert own.names().count("TAESD") == 1
    assert (own.objects()["TAESD"] == before) == (cache == "--cache-classic")


def test_a_pack_that_patched_first_is_left_alone(
    start_host: StartHost, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pack = tmp_path_factory.mktemp("other") / "first"
    pack.mkdir()
    pack.joinpath("__init__.py").write_text(
        "import comfy.model_management as m\n"
        "kept = m.soft_empty_cache\n"
        "m.soft_empty_cache = lambda force=False: kept(force)\n"
        "NODE_CLASS_MAPPINGS = {}\n"
    )
    own = start_host(packs={**PACKS, "a_first": pack})
    assert own.run(short(68, model="keep")).images
    own.free(**BOTH)
    assert own.models() == []
    (warning,) = (line for line in own.log().splitlines() if "keep and eject are off" in line)
    assert "comfy.model_management.soft_empty_cache was replaced by another pack" in warning
    assert {row["name"] for row in own.patched()} == {"comfy.model_management.soft_empty_cache"}


def test_short_ram_takes_what_is_held_and_pinned_models_last(
    start_host: StartHost, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a limit that is always exceeded: after the prompt everything is given up, with a warning, in order."""
    folder = own_models(tmp_path_factory.mktemp("models"))
    own = Keeper(start_host(packs=PACKS, models=folder, environment={"MULTIGPU_RAM_LIMIT": "1"}).server)
    own.run(flux(69, model="keep", vae="eject"))
    own.wait_idle()
    own.collect()
    assert own.models() == [] and own.held() == []
    log = own.log()
    order = [
        "asks ComfyUI to unload models and empty its cache (RAM is short)",
        "TAESD unloaded (set to eject)",
        "no longer held in memory (RAM is short): SD3ClipModel_",
        "models that were set to keep are dropped (Flux)",
        "no longer held in memory (RAM is short): Flux",
    ]
    assert [log.count(text) for text in order] == [1] * len(order)
    assert [log.index(text) for text in order] == sorted(log.index(text) for text in order)
    own.run(short(70, model="keep"))
    own.wait_idle()
    assert own.held() == ["Flux"], "it rests until RAM use falls below the limit"


def test_ram_is_not_watched_twice(keeper: Keeper) -> None:
    """ComfyUI's usual cache watches the RAM, so we do not, unless a limit is given."""
    keeper.run(short(71, model="keep"))
    assert "RAM is short" not in keeper.log()
