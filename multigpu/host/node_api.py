"""What node classes are made of, re-exported so that only this folder imports the host."""

from __future__ import annotations

from comfy_api.latest import io, ui

__all__ = ["io", "ui"]
