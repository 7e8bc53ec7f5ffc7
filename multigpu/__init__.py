"""MultiGPU for ComfyUI. Importing this package does nothing; see docs/architecture.md for the map."""

__version__ = "0.1.0"
