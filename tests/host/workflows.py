"""Stock workflows for the tiny models, in ComfyUI's API form. Placed models must draw the same."""

from __future__ import annotations

from typing import Any

from devtools.client import Workflow


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def flux(seed: int = 1, *, steps: int = 2, size: int = 64, lora: float | None = None) -> Workflow:
    """Flux from three stock loaders. Its loaders are the nodes `model`, `clip`, `vae` and, with a strength, `lora`."""
    workflow = {
        "model": node("UNETLoader", unet_name="toy_flux.safetensors", weight_dtype="default"),
        "clip": node("CLIPLoader", clip_name="toy_clip_l.safetensors", type="sd3"),
        "vae": node("VAELoader", vae_name="toy_taef1.safetensors"),
        "latent": node("EmptySD3LatentImage", width=size, height=size, batch_size=1),
    }
    model = "model"
    if lora is not None:
        model = "lora"
        name = "toy_flux_lora.safetensors"
        workflow["lora"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name=name, strength_model=lora)
    return workflow | _sample([model, 0], ["clip", 0], ["vae", 0], seed=seed, steps=steps, cfg=1.0)


def sd15(seed: int = 1, *, steps: int = 2, size: int = 64, control: float | None = None) -> Workflow:
    """SD1.5 from one checkpoint, with a ControlNet if `control` gives its strength."""
    workflow = {
        "checkpoint": node("CheckpointLoaderSimple", ckpt_name="toy_sd15.safetensors"),
        "latent": node("EmptyLatentImage", width=size, height=size, batch_size=1),
    }
    workflow |= _sample(["checkpoint", 0], ["checkpoint", 1], ["checkpoint", 2], seed=seed, steps=steps, cfg=4.0)
    if control is not None:
        workflow["controlnet"] = node("ControlNetLoader", control_net_name="toy_sd15_controlnet.safetensors")
        workflow["hint"] = node("EmptyImage", width=size, height=size, batch_size=1, color=0x4080C0)
        workflow["control"] = node(
            "ControlNetApplyAdvanced", positive=["positive", 0], negative=["negative", 0],
            control_net=["controlnet", 0], image=["hint", 0], strength=control, start_percent=0.0, end_percent=1.0,
        )  # fmt: skip
        workflow["sample"]["inputs"] |= {"positive": ["control", 0], "negative": ["control", 1]}
    return workflow


def wan(seed: int = 1, *, steps: int = 2, size: int = 64, frames: int = 5) -> Workflow:
    """Wan 2.1, text to video. The text encoder is CLIP-L in the shape Wan expects (4096)."""
    return {
        "model": node("UNETLoader", unet_name="toy_wan.safetensors", weight_dtype="default"),
        "clip": node("CLIPLoader", clip_name="toy_clip_l.safetensors", type="sd3"),
        "vae": node("VAELoader", vae_name="toy_wan_vae.safetensors"),
        "latent": node("EmptyHunyuanLatentVideo", width=size, height=size, length=frames, batch_size=1),
    } | _sample(["model", 0], ["clip", 0], ["vae", 0], seed=seed, steps=steps, cfg=1.0)


PLACE = {"model": "MultiGPUPlaceModel", "clip": "MultiGPUPlaceCLIP", "vae": "MultiGPUPlaceVAE"}


def placed(workflow: Workflow, part: str, *, behind: list[Any] | None = None, **widgets: Any) -> Workflow:
    """The workflow with a place node behind an output, that of its node `part` unless another is named.

    Everything that used that output uses the place node.
    """
    name, source = f"place_{part}", behind or [part, 0]
    changed = {
        key: {**each, "inputs": {k: [name, 0] if value == source else value for k, value in each["inputs"].items()}}
        for key, each in workflow.items()
    }
    return changed | {name: node(PLACE[part], **{part: source}, **widgets)}


def _sample(model: list[Any], clip: list[Any], vae: list[Any], *, seed: int, steps: int, cfg: float) -> Workflow:
    """From loaders to a saved picture. At a `cfg` of 1 the negative text makes no difference, and none is encoded."""
    texts = {"positive": node("CLIPTextEncode", clip=clip, text="a house by the sea")}
    if cfg != 1.0:
        texts["negative"] = node("CLIPTextEncode", clip=clip, text="")
    negative = list(texts)[-1]
    return texts | {
        "sample": node(
            "KSampler", model=model, positive=["positive", 0], negative=[negative, 0], latent_image=["latent", 0],
            seed=seed, steps=steps, cfg=cfg, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=vae),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="multigpu"),
    }  # fmt: skip
