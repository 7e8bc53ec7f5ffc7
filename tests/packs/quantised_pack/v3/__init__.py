"""A loader of the new kind (V3) for the same models, as a pack of its own: ComfyUI takes V1 or V3 nodes from one pack.

It does what such nodes may do: it has a choice of device itself, reads what ComfyUI tells a node that runs, and returns
a tuple.
"""

from __future__ import annotations

from typing import Any

import folder_paths
import nodes
from comfy_api.latest import ComfyExtension, io


class UnetLoaderAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        dtypes = ["default", "target", "float32", "float16", "bfloat16"]
        return io.Schema(
            node_id="UnetLoaderGGUFAdvanced",
            category="tests",
            inputs=[
                io.Combo.Input("unet_name", options=folder_paths.get_filename_list("diffusion_models")),
                io.Combo.Input("dequant_dtype", options=dtypes, default="default"),
                io.Combo.Input("patch_dtype", options=dtypes, default="default"),
                io.Boolean.Input("patch_on_device", default=False),
                io.Combo.Input("device", options=["default", "cpu"]),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, unet_name: str, device: str, **more: Any) -> Any:
        assert device in ("default", "cpu") and cls.hidden.prompt is None
        return nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]().load_unet(unet_name)


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [UnetLoaderAdvanced]


async def comfy_entrypoint() -> ComfyExtension:
    return Extension()
