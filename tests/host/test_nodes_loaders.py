"""The loader nodes of saved workflows on the real host: each draws what the stock loader draws."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.client import PromptFailed, RequestFailed, Workflow
from tests.host import workflows
from tests.host.driver import Driver
from tests.host.workflows import node

CHECKPOINT = {"ckpt_name": "toy_sd15.safetensors"}
CONTROL = {"control_net_name": "toy_sd15_controlnet.safetensors"}
SPREAD_PARTS = {
    "unet_compute_device": "cpu", "unet_virtual_vram_gb": 4.0, "unet_donor_device": "cpu",
    "clip_compute_device": "cpu", "clip_virtual_vram_gb": 2.0, "clip_donor_device": "cpu", "vae_device": "cpu",
}  # fmt: skip


def flux() -> Workflow:
    return workflows.flux(seed=41, steps=1)


def sd15() -> Workflow:
    return workflows.sd15(seed=42, steps=1)


def controlled() -> Workflow:
    return workflows.sd15(seed=43, steps=1, control=1.0)


LOADERS: list[tuple[Callable[[], Workflow], str, str, dict[str, Any]]] = [
    (flux, "model", "UNETLoaderMultiGPU", {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"}),
    (flux, "model", "UNETLoaderDisTorch2MultiGPU", {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"}),
    (flux, "model", "UNetLoaderLP", {"unet_name": "toy_flux.safetensors"}),
    (flux, "clip", "CLIPLoaderMultiGPU", {"clip_name": "toy_clip_l.safetensors", "type": "sd3"}),
    (flux, "clip", "CLIPLoaderDisTorch2MultiGPU", {"clip_name": "toy_clip_l.safetensors", "type": "sd3"}),
    (flux, "vae", "VAELoaderMultiGPU", {"vae_name": "toy_taef1.safetensors"}),
    (flux, "vae", "VAELoaderDisTorch2MultiGPU", {"vae_name": "toy_taef1.safetensors"}),
    (sd15, "checkpoint", "CheckpointLoaderSimpleMultiGPU", CHECKPOINT),
    (sd15, "checkpoint", "CheckpointLoaderSimpleDisTorch2MultiGPU", CHECKPOINT),
    (
        sd15,
        "checkpoint",
        "CheckpointLoaderAdvancedMultiGPU",
        {**CHECKPOINT, "unet_device": "cpu", "clip_device": "cpu", "vae_device": "cpu"},
    ),
    (sd15, "checkpoint", "CheckpointLoaderAdvancedDisTorch2MultiGPU", {**CHECKPOINT, **SPREAD_PARTS}),
    (controlled, "controlnet", "ControlNetLoaderMultiGPU", CONTROL),
    (controlled, "controlnet", "ControlNetLoaderDisTorch2MultiGPU", CONTROL),
    (controlled, "controlnet", "DiffControlNetLoaderMultiGPU", {**CONTROL, "model": ["checkpoint", 0]}),
    (controlled, "controlnet", "DiffControlNetLoaderDisTorch2MultiGPU", {**CONTROL, "model": ["checkpoint", 0]}),
]


@pytest.mark.parametrize(("build", "slot", "loader", "inputs"), LOADERS, ids=[row[2] for row in LOADERS])
def test_a_loader_draws_what_the_stock_one_draws(
    comfy: Driver, build: Callable[[], Workflow], slot: str, loader: str, inputs: dict[str, Any]
) -> None:
    """With every optional widget left out, as a workflow in API form may."""
    stock = comfy.draw(build())
    assert comfy.draw({**build(), slot: node(loader, **inputs)}) == stock


def test_a_device_of_another_machine_passes_validation_and_stops_the_run(comfy: Driver) -> None:
    model = node("UNETLoaderMultiGPU", unet_name="toy_flux.safetensors", weight_dtype="default", device="cuda:5")
    with pytest.raises(PromptFailed, match="cuda:5 is not on this machine, which has cpu") as failed:
        comfy.run({**flux(), "model": model})
    assert failed.value.details["exception_type"] == "multigpu.errors.UnknownDevice", "no path of the pack's folder"


ARCHIVED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "archived_2_6_core.json").read_text())[
    "core"
]
FILES = {"unet_name": "toy_flux.safetensors", "vae_name": "toy_taef1.safetensors", "weight_dtype": "fp8_e4m3fn",
         "type": "sd3", "dequant_dtype": "default", "model_path": "placeholder"} | CHECKPOINT | CONTROL  # fmt: skip
VISION = "placeholder.safetensors"


@pytest.fixture
def placeholders(comfy: Driver) -> Iterator[None]:
    """Names, for loaders whose models cannot be made small: a CLIP vision model and a diffusers folder."""
    folder = comfy.server.spec.base / "models"
    vision, diffusers = folder / "clip_vision" / VISION, folder / "diffusers" / "placeholder"
    vision.parent.mkdir(parents=True, exist_ok=True)
    diffusers.mkdir(parents=True)
    vision.touch()
    (diffusers / "model_index.json").touch()
    yield
    vision.unlink()
    shutil.rmtree(diffusers)


def archived_node(node_id: str) -> dict[str, Any]:
    """A node as a workflow from a machine with four GPUs has it, with every input given."""
    inputs: dict[str, Any] = {}
    for given in ARCHIVED[node_id]["inputs"]:
        name = given["name"]
        file = VISION if node_id.startswith("CLIPVision") else "toy_clip_l.safetensors"
        inputs[name] = ["model", 0] if given["type"] == "MODEL" else given.get("default", FILES.get(name, file))
        inputs[name] = "cuda:3" if name.endswith("device") else inputs[name]
    if node_id.startswith(("Triple", "Quadruple")):
        inputs["device"] = "cuda:3"  # the record of the archived pack lacks their optional inputs
    return node(node_id, **inputs)


def test_archived_workflows_in_api_form_validate_with_devices_of_another_machine(
    comfy: Driver, placeholders: None
) -> None:
    """All nodes in one prompt, which runs until the first of them looks up its device and fails."""
    prompt: Workflow = {"model": flux()["model"]}
    for node_id in ARCHIVED:
        prompt[node_id] = archived_node(node_id)
        prompt[f"show {node_id}"] = node("PreviewAny", source=[node_id, 0])
    answer = comfy.client.post("/prompt", {"prompt": prompt})
    assert answer["node_errors"] == {}
    with pytest.raises(PromptFailed, match="cuda:3 is not on this machine"):
        comfy.client.finish(answer["prompt_id"])


@pytest.mark.parametrize(
    "node_id", [node_id for node_id in ARCHIVED if node_id.startswith(("CLIPVision", "Diffusers"))]
)
def test_a_device_that_is_not_here_stops_the_run_before_a_file_is_opened(
    comfy: Driver, placeholders: None, node_id: str
) -> None:
    """The files are empty: opening one would be another error."""
    prompt = {"load": archived_node(node_id), "show": node("PreviewAny", source=["load", 0])}
    with pytest.raises(PromptFailed, match="cuda:3 is not on this machine"):
        comfy.run(prompt)


def test_a_file_that_is_not_here_is_still_refused_by_validation(comfy: Driver) -> None:
    model = node("UNETLoaderMultiGPU", unet_name="missing.safetensors", weight_dtype="default", device="cuda:5")
    with pytest.raises(RequestFailed, match=r"missing\.safetensors"):
        comfy.run({**flux(), "model": model})


@pytest.mark.parametrize(("said", "flag"), [(True, False), ("eject", True), ("default", None)])
def test_keep_loaded_is_heard_and_changing_it_reads_no_file(comfy: Driver, said: Any, flag: bool | None) -> None:
    inputs = {"unet_name": "toy_flux.safetensors", "weight_dtype": "default", "keep_loaded": said}
    comfy.run({**flux(), "model": node("UNETLoaderDisTorch2MultiGPU", **inputs)})
    assert [row["flag"] for row in comfy.models() if row["model_class"] == "Flux"] == [flag]


def test_the_device_selector_gives_a_name(comfy: Driver) -> None:
    shown = comfy.run(
        {"device": node("DeviceSelectorMultiGPU", device="cpu"), "show": node("PreviewAny", source=["device", 0])}
    )
    assert re.search(r"\bcpu\b", str(shown.history["outputs"]["show"]))
