"""Our nodes, called as ComfyUI calls them, in the process that the studio works in."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.studio import load_whole


class Pack:
    """Our nodes, called as ComfyUI calls them."""

    def __init__(self) -> None:
        import nodes
        from comfy_extras.nodes_hidream import QuadrupleCLIPLoader
        from comfy_extras.nodes_sd3 import TripleCLIPLoader

        from multigpu.runtime import current

        for extra in (TripleCLIPLoader, QuadrupleCLIPLoader):  # the server loads them with its other extras
            nodes.NODE_CLASS_MAPPINGS[extra.__name__] = extra

        self.runtime = current()
        self.nodes = {node.GET_SCHEMA().node_id: node for node in self.runtime.nodes()}

    def run(self, node_id: str, **inputs: Any) -> tuple[Any, ...]:
        return tuple(self.nodes[node_id].execute(**inputs).result)

    def one(self, node_id: str, **inputs: Any) -> Any:
        (component,) = self.run(node_id, **inputs)
        return component


def patcher_of(component: Any) -> Any:
    from multigpu.host.components import component_of

    return component_of(component).patcher


def resting(component: Any) -> dict[str, int]:
    """Load a component as the host would, and count its bytes by device."""
    from multigpu.stream.census import bytes_by_device

    load_whole(patcher_of(component))
    return {str(device): count for device, count in bytes_by_device(patcher_of(component).model).items()}


def text(clip: Any) -> torch.Tensor:
    return clip.encode_from_tokens_scheduled(clip.tokenize("a house by the sea"))[0][0].cpu()


def decoded(vae: Any, channels: int = 16) -> torch.Tensor:
    latent = torch.randn(1, channels, 8, 8, generator=torch.Generator().manual_seed(5))
    return vae.decode(latent).cpu()


def small_vision() -> Any:
    """A CLIP vision model of a few kilobytes; the files that the host recognises have hundreds of megabytes."""
    from comfy.clip_vision import ClipVisionModel

    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3, "image_size": 32,
        "patch_size": 8, "num_channels": 3, "projection_dim": 32, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "model_type": "clip_vision_model",
    }  # fmt: skip
    vision = ClipVisionModel(small)
    random = torch.Generator().manual_seed(1)
    vision.load_sd(
        {k: torch.randn(v.shape, generator=random) / 8 for k, v in vision.get_sd().items() if "ids" not in k}
    )
    return vision
