"""The loader nodes move ComfyUI's own bar on the node while files are read."""

from __future__ import annotations

from typing import Any

import pytest

from devtools.client import Workflow
from tests.host.driver import Driver
from tests.host.events import bar, run_and_listen
from tests.host.workflows import node

THREAD = "MultiGPU reading"
LOADERS: dict[str, dict[str, Any]] = {
    "UNETLoaderMultiGPU": {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"},
    "CLIPLoaderDisTorch2MultiGPU": {"clip_name": "toy_clip_l.safetensors", "type": "sd3"},
    "CheckpointLoaderAdvancedMultiGPU": {
        "ckpt_name": "toy_sd15.safetensors", "unet_device": "cpu", "clip_device": "cpu", "vae_device": "cpu",
    },
}  # fmt: skip


def shown(loader: str, **inputs: Any) -> Workflow:
    return {"load": node(loader, **inputs), "show": node("PreviewAny", source=["load", 0])}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_moves_the_bar_of_its_node_to_the_end(comfy: Driver, loader: str) -> None:
    comfy.free(unload_models=True, free_memory=True)
    events = run_and_listen(comfy.client, shown(loader, **LOADERS[loader]))
    assert events[-1].kind == "execution_success", events[-1]
    values = [value for value, most in bar(events, "load") if most == 100]
    assert values[0] == 0 and values[-1] == 100 and values == sorted(values)
    assert [value for value in values if value == 100] == [100], "one bar, however many parts are read"
    assert THREAD not in comfy.memory()["threads"]


def test_a_loader_that_raises_leaves_no_thread_and_no_full_bar(comfy: Driver) -> None:
    events = run_and_listen(comfy.client, shown("UNETLoaderMultiGPU", **LOADERS["UNETLoaderMultiGPU"], device="cuda:6"))
    assert events[-1].kind == "execution_error" and "cuda:6" in events[-1].data["exception_message"]
    assert {value for value, _ in bar(events, "load")} == {0}
    assert THREAD not in comfy.memory()["threads"]


def test_a_node_that_reads_nothing_has_no_bar(comfy: Driver) -> None:
    events = run_and_listen(comfy.client, shown("DeviceSelectorMultiGPU", device="cpu"))
    assert events[-1].kind == "execution_success" and bar(events, "load") == []
