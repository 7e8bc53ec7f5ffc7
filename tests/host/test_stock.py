"""The stock workflows on every host version: the ground that everything else is compared with."""

from __future__ import annotations

import pytest

from devtools.client import PromptFailed, RequestFailed
from devtools.hosts import Host
from tests.host import file_opens, workflows
from tests.host.conftest import StartHost
from tests.host.driver import Driver, Picture

FLUX_CLASSES = ["Flux", "SD3ClipModel_", "TAESD"]


def test_the_tree_is_the_version_that_its_row_names(comfy: Driver, host: Host) -> None:
    assert comfy.client.get("/system_stats")["system"]["comfyui_version"] == host.version


@pytest.mark.parametrize("name", ["flux", "sd15", "wan"])
def test_a_stock_workflow_draws_the_same_picture_twice(comfy: Driver, name: str) -> None:
    build = getattr(workflows, name)
    first = comfy.draw(build(seed=7))
    comfy.free(unload_models=True, free_memory=True)
    again = comfy.run(build(seed=7))
    assert "sample" not in again.cached_nodes, "it was drawn anew, not remembered"
    assert tuple(Picture.decode(file) for file in again.images) == first
    assert first[0] != comfy.draw(build(seed=8))[0]


def test_lora_and_controlnet_change_the_picture(comfy: Driver) -> None:
    assert comfy.draw(workflows.flux(lora=1.0)) != comfy.draw(workflows.flux())
    assert comfy.draw(workflows.sd15(control=1.0)) != comfy.draw(workflows.sd15())


def test_loaded_models_and_their_bytes_are_reported(comfy: Driver) -> None:
    comfy.free(unload_models=True, free_memory=True)
    comfy.run(workflows.flux(seed=9))
    rows = comfy.models()
    assert sorted(row["model_class"] for row in rows) == FLUX_CLASSES
    for row in rows:
        assert row["alive"] and not row["dynamic"] and row["flag"] is None
        assert row["load_device"] == row["entry_device"] == "cpu"
        assert row["storages"].keys() == {"cpu"}
        assert row["storages"]["cpu"] >= row["model_size"] > 0


def test_free_waits_until_the_models_are_gone(comfy: Driver) -> None:
    comfy.run(workflows.flux(seed=10))
    loaded = comfy.memory(everything=True)["tensors"]["cpu"]
    comfy.free(unload_models=True, free_memory=True)
    comfy.collect()
    assert loaded - comfy.memory(everything=True)["tensors"].get("cpu", 0) > 250 * 2**20


@pytest.mark.skipif(not file_opens.AVAILABLE, reason="inotify is a part of Linux")
def test_opened_model_files_are_counted(keeper: Driver) -> None:
    """On the server that has a folder of models for itself: the kernel counts whoever opens a file in it."""
    with file_opens.watch(keeper.server.spec.models) as opens:
        keeper.run(workflows.flux(seed=11))
        cold = opens.take()
        keeper.run(workflows.flux(seed=12))
        assert opens.take() == {}, "the second prompt has its models from the executor's cache"
    assert set(cold) == {
        "diffusion_models/toy_flux.safetensors", "text_encoders/toy_clip_l.safetensors", "vae/toy_taef1.safetensors",
    }  # fmt: skip


def test_a_workflow_that_is_not_valid_is_refused(comfy: Driver) -> None:
    workflow = workflows.flux()
    workflow["model"]["inputs"]["unet_name"] = "missing.safetensors"
    with pytest.raises(RequestFailed, match=r"missing\.safetensors") as refused:
        comfy.run(workflow)
    assert refused.value.status == 400


def test_a_prompt_that_fails_says_where(comfy: Driver) -> None:
    workflow = {
        "latent": workflows.node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "vae": workflows.node("VAELoader", vae_name="toy_taef1.safetensors"),  # wants 16 channels, gets 4
        "decode": workflows.node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": workflows.node("SaveImage", images=["decode", 0], filename_prefix="never"),
    }
    with pytest.raises(PromptFailed, match="VAEDecode.*channels"):
        comfy.run(workflow)


@pytest.mark.newest
def test_a_restarted_host_draws_the_same(start_host: StartHost, comfy: Driver) -> None:
    own = start_host(flags=("--cpu", "--cache-none"))
    before = own.draw(workflows.flux(seed=13))
    pid = own.memory()["pid"]
    own.server.restart()
    assert own.memory()["pid"] != pid
    assert own.draw(workflows.flux(seed=13)) == before == comfy.draw(workflows.flux(seed=13))
