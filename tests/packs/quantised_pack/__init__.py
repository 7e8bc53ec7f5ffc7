"""A pack for tests with loaders under the names of ComfyUI-GGUF's: see `patcher` for how its models behave.

MULTIGPU_TEST_PACK=changed makes one of its loaders return something else than it does elsewhere.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import folder_paths
import nodes

from . import patcher


class UnetLoader:
    RETURN_TYPES: ClassVar = ("MODEL", "CLIP") if os.environ.get("MULTIGPU_TEST_PACK") == "changed" else ("MODEL",)
    FUNCTION = "load_unet"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": (folder_paths.get_filename_list("diffusion_models"),)}}

    def load_unet(self, unet_name: str) -> tuple[Any]:
        return (patcher.load(folder_paths.get_full_path_or_raise("diffusion_models", unet_name)),)


class CLIPLoader:
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load_clip"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = nodes.CLIPLoader.INPUT_TYPES()["required"]
        return {"required": {name: required[name] for name in ("clip_name", "type")}}

    def load_clip(self, clip_name: str, type: str) -> tuple[Any]:
        (clip,) = nodes.CLIPLoader().load_clip(clip_name, type)
        clip.patcher = patcher.QuantisedPatcher.clone(clip.patcher)
        return (clip,)


NODE_CLASS_MAPPINGS = {"UnetLoaderGGUF": UnetLoader, "CLIPLoaderGGUF": CLIPLoader}
