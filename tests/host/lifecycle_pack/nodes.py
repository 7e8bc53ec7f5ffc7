"""Nodes that run out of memory, wait until they are told to go on, or load models as other packs do."""

from __future__ import annotations

import gc
import threading
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import psutil
import torch
from comfy import memory_management
from comfy.model_management import load_models_gpu
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph_utils import GraphBuilder

GATE = threading.Event()
WAITING = threading.Event()
LOADED_BEFORE: list[str] = []
"""The models in memory when a loader of this pack began to load."""


class PassesAnything:
    """A node with one input and one output of any type."""

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True


class Exhaust(PassesAnything):
    """Raises what torch raises when a device is full, after its input is there."""

    def run(self, value: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")


class Wait(PassesAnything):
    """Passes its input on once the test opens the gate."""

    def run(self, value: Any) -> tuple[Any]:
        WAITING.set()
        if not GATE.wait(60):
            raise TimeoutError("nobody opened the gate")
        return (value,)


class Release(PassesAnything):
    """Has the executor drop the outputs of earlier prompts, as ComfyUI does when RAM is short."""

    def run(self, value: Any) -> tuple[Any]:
        memory_management.extra_ram_release(2 * psutil.virtual_memory().total)
        return (value,)


class Conditioning:
    """What a text encoder would have made of an empty text, in the shapes that Flux takes."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def run(self) -> tuple[Any]:
        return ([[torch.zeros(1, 77, 4096), {"pooled_output": torch.zeros(1, 2048)}]],)


class Use:
    """Loads the models of up to three components, as a sampler would: quicker than drawing a picture."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "tests"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"seed": ("INT", {})}, "optional": dict.fromkeys(("one", "two", "three"), ("*",))}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    def run(self, seed: int, **components: Any) -> dict[str, Any]:
        load_models_gpu([getattr(component, "patcher", component) for component in components.values()])
        return {"ui": {"used": [seed]}}


class LoadVAE:
    """A loader that ComfyUI cannot repeat, as those of many packs: it does not say how it loaded."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "load"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae_name": ("STRING", {})}}

    def load(self, vae_name: str) -> tuple[Any]:
        gc.collect()
        LOADED_BEFORE[:] = [type(its.model).__name__ for its in gc.get_objects() if isinstance(its, ModelPatcher)]
        path = folder_paths.get_full_path_or_raise("vae", vae_name)
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
        vae.patcher.cached_patcher_init = None
        return (vae,)


class LoadTwoVAEs(LoadVAE):
    """Makes two models at once."""

    RETURN_TYPES = ("VAE", "VAE")

    def load(self, vae_name: str) -> tuple[Any]:
        return (*super().load(vae_name), *super().load(vae_name))


class AllInOne:
    """A node that is replaced by a loader and a place node; the file's name stands in none of its inputs."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"number": ("INT", {}), "keep_loaded": ("STRING", {})}}

    def run(self, number: int, keep_loaded: str) -> dict[str, Any]:
        graph = GraphBuilder()
        name = ("toy_taef1.safetensors", "toy_wan_vae.safetensors")[number]
        vae = graph.node("TestLoadVAE", vae_name=name)
        place = graph.node("MultiGPUPlaceVAE", vae=vae.out(0), keep_loaded=keep_loaded)
        return {"result": (place.out(0),), "expand": graph.finalize()}


class Word:
    """Says keep, eject or default for another node."""

    RETURN_TYPES = ("COMBO",)
    FUNCTION = "run"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("STRING", {})}}

    def run(self, value: str) -> tuple[str]:
        return (value,)


NODE_CLASS_MAPPINGS = {
    "TestExhaust": Exhaust, "TestWait": Wait, "TestRelease": Release, "TestConditioning": Conditioning, "TestUse": Use,
    "TestLoadVAE": LoadVAE, "TestLoadTwoVAEs": LoadTwoVAEs, "TestAllInOne": AllInOne, "TestWord": Word,
}  # fmt: skip
