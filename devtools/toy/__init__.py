"""Tiny models with random weights that ComfyUI's stock loaders accept. Needs torch; runs inside the environment."""
