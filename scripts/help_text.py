"""The hand-written part of each help page, by node or by family of nodes."""

from __future__ import annotations

PLACE = """
Connect it behind any loader, of ComfyUI or of another pack, and use its output instead of the loader's. Several nodes
may place the outputs of one loader differently.

- **auto** looks at the free memory when the node runs. What fits beside the room that inference needs stays on the
  compute device; the rest goes to the fastest of the other devices.
- **virtual VRAM** sends a fixed amount away, first to the first donor, then to the next.
- **expert** takes an allocation such as `cuda:0,8gb;cuda:1,4gb;cpu,*`. `docs/allocation.md` in the pack's folder has
  the whole grammar.

Weights that rest elsewhere are copied to the compute device just before they are used, so the picture is the same.
ComfyUI's log has one line that says what went where; the bytes are counted after loading, and the run stops if they are
not where they should be.

A compute device other than the loader's means that the model is read again (or copied, when its loader does not say
how), because one copy of the weights cannot be in two places. While nothing leaves the compute device, ComfyUI's own
loading stays in charge, DynamicVRAM included.
"""

CONTROL_NET = """
A ControlNet that computes on another device than the diffusion model takes the latents over to its device and hands its
answer back. T2I adapters and Control-LoRA follow the model by themselves and are refused or passed on as they are.
"""

PLAIN = """
Runs ComfyUI's own loader on the device you choose. Nothing else is different: same files, same result.

New workflows: use ComfyUI's loader and one of the Place nodes.
"""

SPREAD = """
Runs ComfyUI's own loader and spreads the weights over devices. A text in `expert_mode_allocations` counts instead of
`virtual_vram_gb` and `donor_device`.{of_several}

`eject_models` unloads other models from the compute device once, when this node loads. Models with `keep_loaded` set to
keep stay.

New workflows: use ComfyUI's loader and one of the Place nodes.
"""

OF_SEVERAL = " The diffusion model is spread; text encoder and VAE stay whole."

PARTS = """
Reads each part of the checkpoint with ComfyUI's own functions, for the device that you choose for it. The results are
those of ComfyUI's Load Checkpoint.

New workflows: use ComfyUI's Load Checkpoint and a Place node behind each of its outputs.
"""

SPREAD_PARTS = """
Reads each part of the checkpoint with ComfyUI's own functions, for the device that you choose for it, and spreads the
weights of diffusion model and text encoder over devices; the VAE stays whole. For the diffusion model, a text in
`unet_expert_mode_allocations` counts instead of `unet_virtual_vram_gb` and `unet_donor_device`; for the text encoder,
one in `clip_expert_mode_allocations` instead of `clip_virtual_vram_gb` and `clip_donor_device`.

`eject_models` unloads other models from the compute devices once, when this node loads. Models with `keep_loaded` set
to keep stay.

New workflows: use ComfyUI's Load Checkpoint and a Place node behind each of its outputs.
"""

FREE = """
What is freed at this point of the workflow stays freed until something needs it again. `docs/lifecycle.md` in the
pack's folder tells who stays and who leaves.
"""

REPORT = """
Leave it alone on the canvas, or connect `value` to say when: the report is made once the value is there. The text
appears on the node, and comes out as `report`.

- **RAM** and each device: what all programs use. *Cached by the allocator* is memory that ComfyUI's process has taken
  from the device and does not use.
- **Loaded models**: what was said about each (`default`, `keep`, `eject`), where it computes, and the bytes of its
  weights that were counted on each device. With DynamicVRAM the bytes on `cpu` are those of the file, which the system
  reads and drops by itself; what is on the device is a copy of some of them.
- **Held for later prompts**: models that stay although ComfyUI has forgotten the node that loaded them.

It runs every time, and so does what comes behind its output `value`. To look without that, connect its input alone.
"""

SELECTOR = """
For nodes of other packs that take a device by name.
"""

LOW_PRECISION = """
Kept for old workflows. A LoRA is applied once, at full precision, whichever loader is used.
"""


NAMED = {
    "MultiGPUFreeMemory": FREE,
    "MultiGPUMemoryReport": REPORT,
    "DeviceSelectorMultiGPU": SELECTOR,
    "UNetLoaderLP": LOW_PRECISION,
    "MultiGPUPlaceControlNet": PLACE + CONTROL_NET,
    "CheckpointLoaderAdvancedMultiGPU": PARTS,
    "CheckpointLoaderAdvancedDisTorch2MultiGPU": SPREAD_PARTS,
}
"""The nodes that share their text with no other."""


def help_text(node_id: str, outputs: int) -> str:
    """The part that no schema can tell, for a node with so many outputs. A loader with several gives a checkpoint's."""
    if node_id in NAMED:
        return NAMED[node_id].strip()
    if node_id.startswith("MultiGPUPlace"):
        return PLACE.strip()
    if "DisTorch2" in node_id:
        return SPREAD.format(of_several=OF_SEVERAL if outputs > 1 else "").strip()
    return PLAIN.strip()
