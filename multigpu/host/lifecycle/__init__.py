"""Which models stay loaded, carried out on ComfyUI's own functions and cache."""
