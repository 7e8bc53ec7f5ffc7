"""What ComfyUI's entry point has to return, alone, so that it works when other parts of the node API have changed."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension

__all__ = ["ComfyExtension"]
