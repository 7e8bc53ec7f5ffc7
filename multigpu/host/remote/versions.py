"""What must be of the same version on two machines that work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import __version__

if TYPE_CHECKING:
    from ...runtime import Runtime


def versions(runtime: Runtime) -> dict[str, str]:
    import torch

    return {"ComfyUI": runtime.capabilities.version, "MultiGPU": __version__, "torch": str(torch.__version__)}
