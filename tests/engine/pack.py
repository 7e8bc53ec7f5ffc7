"""Our nodes, called as ComfyUI calls them, in the process that the studio works in."""

from __future__ import annotations

from typing import Any

import torch


class Pack:
    """Our nodes, called as ComfyUI calls them."""

    def __init__(self) -> None:
        import nodes  # noqa: F401  the host's loaders

        from multigpu.runtime import current

        self.runtime = current()
        self.nodes = {node.GET_SCHEMA().node_id: node for node in self.runtime.nodes()}

    def run(self, node_id: str, **inputs: Any) -> tuple[Any, ...]:
        return tuple(self.nodes[node_id].execute(**inputs).result)

    def one(self, node_id: str, **inputs: Any) -> Any:
        (component,) = self.run(node_id, **inputs)
        return component


def patcher_of(component: Any) -> Any:
    from multigpu.host.components import part_of

    return part_of(component).patcher


def resting(component: Any) -> dict[str, int]:
    """Load a component as the host would, and count its bytes by device."""
    import comfy.model_management as memory

    from multigpu.stream.census import bytes_by_device

    memory.load_models_gpu([patcher_of(component)])
    return {str(device): count for device, count in bytes_by_device(patcher_of(component).model).items()}


def text(clip: Any) -> torch.Tensor:
    return clip.encode_from_tokens_scheduled(clip.tokenize("a house by the sea"))[0][0].cpu()


def decoded(vae: Any, channels: int = 16) -> torch.Tensor:
    latent = torch.randn(1, channels, 8, 8, generator=torch.Generator().manual_seed(5))
    return vae.decode(latent).cpu()
