"""Who stays and who leaves when memory is freed, on the real host, over HTTP, with real models."""

from __future__ import annotations

import re
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from devtools import models
from devtools.client import PromptFailed, Workflow
from devtools.places import Places
from tests.host import file_opens
from tests.host.lifecycle import BOTH, CLASSES, FILES, Keeper, flux, short
from tests.host.workflows import node

MiB = 2**20
ALL = sorted(CLASSES.values())
linux = pytest.mark.skipif(not file_opens.AVAILABLE, reason="inotify and the size of a process are read as Linux tells")


@linux
@pytest.mark.parametrize("leaving", ["clip", "model"])
def test_flagged_leaves_and_pinned_are_used_again(keeper: Keeper, leaving: str) -> None:
    """A(keep=false), B and C(keep=true), both flags: A's memory is back, the next prompt gets the same B and C."""
    said = {part: part != leaving for part in CLASSES}
    workflow = flux(41, **said)
    picture = keeper.draw(workflow)
    before, tensors, anonymous = keeper.objects(), keeper.tensor_bytes(), keeper.memory()["anonymous"]
    assert sorted(before) == ALL

    keeper.free(**BOTH)
    staying = {name: ids for name, ids in before.items() if name != CLASSES[leaving]}
    assert keeper.objects() == staying
    assert all(row["alive"] for row in keeper.models())
    weight = (keeper.server.spec.models / FILES[leaving]).stat().st_size
    assert tensors - keeper.tensor_bytes() > 0.95 * weight
    assert anonymous - keeper.memory()["anonymous"] > 0.9 * weight

    with file_opens.watch(keeper.server.spec.models) as opens:
        assert keeper.draw(workflow) == picture
        assert set(opens.take()) == {FILES[leaving]}
    after = keeper.objects()
    assert {name: after[name] for name in staying} == staying
    assert after[CLASSES[leaving]] != before[CLASSES[leaving]]


@linux
def test_nothing_is_ejected_when_all_are_pinned(keeper: Keeper) -> None:
    """Ten presses: every model is the same object, no file is opened, what the executor remembered is gone."""
    workflow = short(42, model="keep", vae="keep")
    picture = keeper.draw(workflow)
    before = keeper.objects()
    with file_opens.watch(keeper.server.spec.models) as opens:
        for _ in range(10):
            keeper.free(**BOTH)
            assert keeper.objects() == before
        again = keeper.run(workflow)
        assert "sample" not in again.cached_nodes
        assert opens.take() == {}
    assert keeper.objects() == before
    assert keeper.draw(workflow) == picture
    assert keeper.held() == ["Flux", "TAESD"]


@linux
@pytest.mark.parametrize("kept", [True, False], ids=["kept before", "never kept"])
def test_models_that_are_not_kept_give_their_ram_back(keeper: Keeper, kept: bool) -> None:
    """The next free is ComfyUI's own, and the C library does not sit on what it frees."""
    if kept:
        keeper.run(flux(47, model="keep", clip="keep", vae="keep"))
    keeper.run(flux(48, model="default", clip="default", vae="default"))
    anonymous, tensors = keeper.memory()["anonymous"], keeper.tensor_bytes()
    keeper.free(**BOTH)
    assert keeper.models() == []
    assert anonymous - keeper.memory()["anonymous"] > 0.9 * tensors > 250 * MiB


@linux
def test_unmanaged_models_stay_for_one_cycle(keeper: Keeper) -> None:
    """A flagged model leaves first; the two that nobody spoke of leave at the second free, with their memory."""
    empty = keeper.memory()["anonymous"]
    keeper.run(flux(43, model="eject"))
    keeper.free(**BOTH)
    assert keeper.names() == ["SD3ClipModel_", "TAESD"]
    assert keeper.held() == ["SD3ClipModel_", "TAESD"]
    keeper.free(**BOTH)
    assert keeper.models() == []
    assert keeper.held() == []
    assert keeper.tensor_bytes() < 20 * MiB
    assert keeper.memory()["anonymous"] - empty < 40 * MiB


@linux
def test_unmanaged_models_that_stayed_are_handed_back_once(keeper: Keeper) -> None:
    workflow = short(44, model="eject")
    picture = keeper.draw(workflow)
    before = keeper.objects()
    keeper.free(**BOTH)
    with file_opens.watch(keeper.server.spec.models) as opens:
        with keeper.said() as lines:
            assert keeper.draw(workflow) == picture
            keeper.wait_idle()
        assert set(opens.take()) == {FILES["model"]}
    assert sum("no longer held in memory (the next prompt is over): TAESD" in line for line in lines) == 1
    after = keeper.objects()
    assert {name: after[name] == before[name] for name in after} == {"Flux": False, "TAESD": True}
    assert keeper.held() == [], "the executor owns them again"


def test_pinned_stays_and_unmanaged_goes(keeper: Keeper) -> None:
    keeper.run(short(45, model="keep"))
    before = keeper.objects()
    with keeper.said() as lines:
        keeper.free(**BOTH)
    assert keeper.objects() == {"Flux": before["Flux"]}
    assert keeper.held() == ["Flux"]
    assert sum("TAESD unloaded (not set to keep); Flux stays (set to keep)" in line for line in lines) == 1


def test_a_kept_model_that_was_moved_to_ram_is_named_too(keeper: Keeper) -> None:
    """Another model needed its device. Then it is held, but not loaded."""
    keeper.run(short(59, model="keep"))
    keeper.client.post("/lifecycle/unload", {"model": "Flux"})
    assert keeper.names() == ["TAESD"] and keeper.held() == ["Flux"]
    for words in (
        "TAESD unloaded (not set to keep); Flux stays (set to keep, in RAM)",
        "Flux stays (set to keep, in RAM)",
    ):
        with keeper.said() as lines:
            keeper.free(unload_models=True)
        assert sum(re.search(rf"free \d+: {re.escape(words)}$", line) is not None for line in lines) == 1
    (newest, *_) = keeper.client.get("/multigpu/history")["frees"]
    assert newest["retained"] == [{"name": "Flux", "reason": "set to keep, in RAM"}] and newest["ejected"] == []
    assert keeper.held() == ["Flux"]


def test_without_a_choice_nothing_is_kept(keeper: Keeper) -> None:
    keeper.run(short(60, model="default"))
    with keeper.said() as lines:
        keeper.free(unload_models=True)
    assert sum("TAESD, Flux unloaded (nothing is set to keep)" in line for line in lines) == 1


def test_out_of_memory_takes_everything_and_the_next_prompt_works(keeper: Keeper) -> None:
    picture = keeper.draw(short(146))
    with pytest.raises(PromptFailed, match="OutOfMemoryError: on purpose"):
        keeper.run(short(46, model="keep", vae="eject", after="TestExhaust"))
    assert keeper.models() == []
    keeper.free(free_memory=True)
    assert keeper.draw(short(146, model="keep", vae="eject")) == picture
    assert keeper.names() == ["Flux", "TAESD"]
    keeper.free(**BOTH)
    assert keeper.names() == ["Flux"]


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "unload models": ("/free", {"unload_models": True}),
    "the frontend's unload models": ("/api/free", {"unload_models": True, "free_memory": False}),
    "free memory": ("/free", {"free_memory": True}),
    "both": ("/free", BOTH),
    "the frontend's both": ("/api/free", BOTH),
    "our own": ("/lifecycle/clean_up", {"reason": "test", "force": True}),
}


@pytest.mark.parametrize("asked", BODIES)
def test_every_way_to_free_takes_the_same_path(keeper: Keeper, asked: str) -> None:
    path, body = BODIES[asked]
    workflow = short(47, model="keep", vae="eject")
    keeper.run(workflow)
    with keeper.said() as lines:
        keeper.client.raw(path, body)
        keeper.wait_idle()
    assert keeper.names() == ["Flux"]
    steps = [tag for _, tag in keeper.tags()[-4:]]
    assert steps == ["pre-unload", "post-unload", "post-reset", "post-gc"]
    assert sum("TAESD unloaded (set to eject)" in line for line in lines) == 1
    remembered = keeper.run(workflow).cached_nodes
    assert ("sample" in remembered) == (body.get("free_memory", "force" in body) is False)


def test_nothing_asked_is_nothing_done(keeper: Keeper) -> None:
    keeper.run(short(48, model="keep", vae="eject"))
    before = keeper.objects()
    keeper.client.raw("/free", {"unload_models": False, "free_memory": False})
    keeper.wait_idle()
    assert keeper.objects() == before
    assert keeper.client.post("/lifecycle/clean_up", {"force": False}) is False, "RAM is not short"


def test_free_waits_for_the_prompt_that_runs(keeper: Keeper) -> None:
    keeper.client.raw("/lifecycle/gate", {"open": False})
    prompt = keeper.client.submit(short(49, model="eject", vae="keep", after="TestWait"))
    keeper.wait_for("/lifecycle/waiting")
    assert keeper.names() == ["Flux"]
    keeper.client.free(**BOTH)
    keeper.client.raw("/free", {"unload_models": True})
    assert keeper.names() == ["Flux"], "a prompt runs"
    keeper.client.raw("/lifecycle/gate", {"open": True})
    assert keeper.client.finish(prompt).images
    keeper.wait_idle()
    assert keeper.names() == ["TAESD"]


def test_keep_loaded_is_changed_by_running_the_node_again(keeper: Keeper) -> None:
    keeper.run(short(50, model="keep"))
    before = keeper.objects()
    keeper.run(short(50, model="default"))
    assert keeper.objects() == before | {"Flux": (keeper.objects()["Flux"][0], before["Flux"][1])}, "the same model"
    assert keeper.held() == []
    keeper.run(short(50, model="eject"))
    keeper.free(**BOTH)
    assert keeper.names() == ["TAESD"]
    keeper.free(**BOTH)
    keeper.run(short(50, model=True))
    keeper.free(**BOTH)
    assert keeper.names() == ["Flux"]
    keeper.run(short(50, model="default"))
    keeper.free(**BOTH)
    assert keeper.models() == []


def test_a_step_that_fails_at_the_end_of_a_prompt_skips_no_other(keeper: Keeper) -> None:
    keeper.run(short(58, model="keep"))
    keeper.client.raw("/lifecycle/trip", {})
    with keeper.said() as lines:
        keeper.run(short(58, model="default"))
        keeper.wait_idle()
    assert sum("tripped on purpose" in line for line in lines) == 1, "ComfyUI logs it"
    assert keeper.held() == []


def test_two_loaders_of_one_file_with_different_flags(keeper: Keeper) -> None:
    """Each made a model of its own, so one leaves and one stays."""
    workflow = short(51, model="keep")
    workflow["other"] = node("UNETLoader", unet_name="toy_flux.safetensors", weight_dtype="fp8_e4m3fn")
    workflow["place_other"] = node("MultiGPUPlaceModel", model=["other", 0], keep_loaded="eject")
    other = {
        name: given if name != "model" else ["place_other", 0] for name, given in workflow["sample"]["inputs"].items()
    }
    workflow["other_sample"] = node("KSampler", **other)
    workflow["other_decode"] = node("VAEDecode", samples=["other_sample", 0], vae=["vae", 0])
    workflow["other_save"] = node("SaveImage", images=["other_decode", 0], filename_prefix="other")
    keeper.run(workflow)
    (kept,) = [row["model_id"] for row in keeper.models() if row["flag"] is False]
    assert keeper.names() == ["Flux", "Flux", "TAESD"]
    with keeper.said() as lines:
        keeper.free(**BOTH)
    assert keeper.names() == ["Flux", "TAESD"]
    assert keeper.objects()["Flux"][1] == kept
    its = "Flux from toy_flux.safetensors"
    words = f"{its} unloaded (set to eject); {its} stays (set to keep); TAESD stays ("
    assert sum(words in line for line in lines) == 1


@pytest.mark.parametrize("said", [("keep", "eject"), ("eject", "keep")])
def test_two_loaders_that_are_alike_share_a_model_and_keep_wins(keeper: Keeper, said: tuple[str, str]) -> None:
    workflow = short(56, model=said[0])
    workflow["other"] = {**workflow["model"]}
    workflow["place_other"] = node("MultiGPUPlaceModel", model=["other", 0], keep_loaded=said[1])
    other = {**workflow["sample"]["inputs"], "model": ["place_other", 0], "seed": 57}
    workflow["other_sample"] = node("KSampler", **other)
    workflow["decode"]["inputs"]["samples"] = ["blend", 0]
    workflow["blend"] = node("LatentBlend", samples1=["sample", 0], samples2=["other_sample", 0], blend_factor=0.5)
    keeper.run(workflow)
    assert keeper.names() == ["Flux", "TAESD"]
    keeper.free(**BOTH)
    assert keeper.names() == ["Flux"]


@pytest.mark.parametrize("vae", ["keep", "default"])
def test_the_attribute_set_by_another_pack_is_heeded(keeper: Keeper, vae: str) -> None:
    keeper.run(short(52, vae=vae))
    keeper.client.raw("/lifecycle/flag", {"model": "Flux", "flag": False})
    keeper.client.raw("/lifecycle/flag", {"model": "TAESD", "flag": True})
    keeper.free(**BOTH)
    assert keeper.names() == ["Flux"]
    assert keeper.held() == ["Flux"]


def test_emptying_caches_with_force_does_not_reset_the_executor(keeper: Keeper) -> None:
    workflow = short(53, model="keep")
    keeper.run(workflow)
    before = keeper.objects()
    assert keeper.client.post("/lifecycle/soft_empty", {"force": True}) == {}
    assert keeper.objects() == before
    assert "sample" in keeper.run(workflow).cached_nodes


def test_only_the_two_functions_are_replaced(keeper: Keeper) -> None:
    keeper.run(short(54, model="keep"))
    keeper.free(**BOTH)
    changed = {row["name"] for row in keeper.patched()}
    assert changed == {"comfy.model_management.unload_all_models", "comfy.model_management.soft_empty_cache"}


PARTS = {"text encoder": "cond_stage_model.", "VAE": "first_stage_model."}


@linux
@pytest.mark.parametrize("lacking", [["text encoder", "VAE"], ["text encoder"], ["VAE"]], ids=" and ".join)
def test_a_checkpoint_that_lacks_parts_stays_and_leaves(keeper: Keeper, lacking: list[str]) -> None:
    folder = keeper.server.spec.models / "checkpoints"
    folder.mkdir(exist_ok=True)
    whole = load_file(models.folder(Places.here()) / "checkpoints" / "toy_sd15.safetensors")
    name, missing = f"no_{'_'.join(lacking)}.safetensors", tuple(PARTS[part] for part in lacking)
    save_file({key: tensor for key, tensor in whole.items() if not key.startswith(missing)}, folder / name)
    there = [slot for slot, part in enumerate(("model", *PARTS)) if part not in lacking]

    def used(said: str) -> Workflow:
        uses = {number: ["load", slot] for number, slot in zip(("one", "two"), there, strict=False)}
        device = {"compute_device": "cpu", "keep_loaded": said}
        loader = node("CheckpointLoaderSimpleDisTorch2MultiGPU", ckpt_name=name, **device)
        return {"load": loader, "use": node("TestUse", seed=55, **uses)}

    keeper.run(used("keep"))
    before = keeper.objects()
    assert len(before) == len(there)
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.free(**BOTH)
        assert keeper.objects() == before
        keeper.run(used("keep"))
        assert keeper.objects() == before and opens.take() == {}
    keeper.run(used("eject"))
    keeper.free(**BOTH)
    assert keeper.models() == [] and keeper.held() == []
