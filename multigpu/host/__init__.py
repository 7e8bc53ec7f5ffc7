"""The seam: the only part that imports ComfyUI. `surface.py` lists every symbol of it that is touched, and why."""
