"""Our nodes for the loaders of other packs: with the pack loaded before or after ours, without it, and changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from devtools.client import Workflow
from devtools.places import Places
from tests.host import schemas, workflows
from tests.host.conftest import StartHost
from tests.host.driver import PACK
from tests.host.workflows import node

pytestmark = pytest.mark.newest
ROOT = Path(__file__).parents[1]
ARCHIVED = json.loads((ROOT / "golden" / "archived_2_6_gguf.json").read_text())["gguf"]
OTHER, VIDEO = ROOT / "packs" / "quantised_pack", ROOT / "packs" / "video_pack"
V3 = "UnetLoaderGGUFAdvanced"
LOADERS = ("UnetLoaderGGUF", "CLIPLoaderGGUF", V3)
OURS = {f"{loader}{kind}MultiGPU" for loader in LOADERS for kind in ("", "DisTorch2", "DisTorch")}


@pytest.mark.parametrize("name", ["aaa_gguf", "zzz_gguf"], ids=["loaded before ours", "loaded after ours"])
def test_a_pack_s_loaders_have_our_nodes_and_draw_the_same(start_host: StartHost, name: str) -> None:
    others = {name: OTHER, f"{name}_v3": OTHER / "v3", f"{name}_video": VIDEO}
    comfy = start_host(packs={PACK: Places.here().root, **others})
    here = {node_id: info for node_id, info in schemas.ours(comfy).items() if "GGUF" in node_id}
    assert here.keys() == OURS
    for node_id in OURS:
        found, archived = schemas.schema(here[node_id]), ARCHIVED[node_id]
        assert found["outputs"] == archived["outputs"]
        for ours, theirs in zip(found["inputs"], archived["inputs"], strict=False):
            limit = {"max": 128.0} if "max" in theirs else {}  # the oldest nodes had 24
            assert ours == theirs | limit, node_id
        added = [given["name"] for given in found["inputs"][len(archived["inputs"]) :]]
        assert added == (["keep_loaded"] if "DisTorch" in node_id else []), node_id
        assert here[node_id]["display_name"].endswith(")") and here[node_id]["deprecated"]
    stock = workflows.flux(seed=8)
    unet, clip = stock["model"]["inputs"]["unet_name"], stock["clip"]["inputs"]
    stock["model"] = node("UnetLoaderGGUF", unet_name=unet)
    stock["clip"] = node("CLIPLoaderGGUF", **clip)
    want = comfy.draw(stock)
    assert want != comfy.draw(workflows.flux(seed=8)), "the pack's weights are quantised"
    for kind in ("", "DisTorch2", "DisTorch"):
        loaders = {
            "model": node(f"UnetLoaderGGUF{kind}MultiGPU", unet_name=unet),
            "clip": node(f"CLIPLoaderGGUF{kind}MultiGPU", **clip),
        }
        assert comfy.draw(stock | loaders) == want, kind
        more = {"dequant_dtype": "default", "patch_dtype": "default", "patch_on_device": False}
        of_v3 = node(f"{V3}{kind}MultiGPU", unet_name=unet, **more)
        assert comfy.draw(stock | loaders | {"model": of_v3}) == want, (V3, kind)
    picture = comfy.draw(video(model="WanVideoModelLoaderMultiGPU", sample="WanVideoSamplerMultiGPU"))
    assert picture == comfy.draw(video(model="WanVideoModelLoader", sample="WanVideoSampler"))
    assert comfy.our_tracebacks() == []


def video(**nodes: str) -> Workflow:
    """The pack's own nodes, or ours, which have one more input each."""
    inputs = {"model": "two", "base_precision": "bf16", "quantization": "disabled", "load_device": "main_device"}
    workflow = {
        "model": node(nodes["model"], **inputs),
        "sample": node(nodes["sample"], model=["model", 0], steps=2, seed=7),
        "vae": node("WanVideoVAELoader", model_name="vae"),
        "decode": node("WanVideoDecode", vae=["vae", 0], samples=["sample", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="video"),
    }
    if nodes["model"].endswith("MultiGPU"):
        workflow["model"]["inputs"]["compute_device"] = "cpu"
        workflow["sample"]["inputs"]["compute_device"] = ["model", 1]
    return workflow


def test_a_changed_pack_turns_off_its_nodes_with_one_line(start_host: StartHost) -> None:
    packs = {PACK: Places.here().root, "other": OTHER, "video": VIDEO}
    comfy = start_host(packs=packs, environment={"MULTIGPU_TEST_PACK": "changed"})
    here = {node_id for node_id in schemas.ours(comfy) if "GGUF" in node_id}
    assert here == {node_id for node_id in OURS if node_id.startswith("CLIP")}
    line, video_line = (line for line in comfy.log().splitlines() if "has changed" in line)
    assert "ComfyUI-GGUF has changed: UnetLoaderGGUF returns MODEL, CLIP instead of MODEL; there are no" in line
    assert "WanVideoModelLoader returns WANVIDEOMODEL, STRING instead of WANVIDEOMODEL; there are no" in video_line
    assert {"WanVideoSamplerMultiGPU"} == {
        name for name in schemas.ours(comfy) if name in ("WanVideoSamplerMultiGPU", "WanVideoModelLoaderMultiGPU")
    }
    assert comfy.draw(workflows.placed(workflows.flux(seed=8), "model"))
