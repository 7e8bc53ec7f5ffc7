"""The engine inside ComfyUI: a model patcher that keeps its model where a plan puts it."""
