"""What must be of the same version on two machines that work together."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ... import __version__

if TYPE_CHECKING:
    from ...runtime import Runtime


def versions(runtime: Runtime) -> dict[str, str]:
    import torch

    found = {"ComfyUI": runtime.capabilities.version, "MultiGPU": __version__, "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        found["Ray"] = version("ray")  # it is not imported here
    return found
