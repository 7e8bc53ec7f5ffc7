"""The hand-written part of each help page, by node or by family of nodes."""

from __future__ import annotations

PLACE = """
Connect it after any loader, of ComfyUI or of another pack, and use its output instead of the loader's. Several place
nodes after one loader may have different settings.

- **auto** looks at the free memory when the node runs and leaves some of it for inference. The weights that fit into
  the rest stay on the compute device; the others go to the fastest of the other devices.
- **virtual VRAM** moves a fixed number of gigabytes from the compute device to the donors. The first donor is filled
  first.
- **expert** takes an allocation such as `cuda:0,8gb;cuda:1,4gb;cpu,*`. `docs/allocation.md` in the pack's folder
  describes what you can write.

Weights that rest on other devices are copied to the compute device just before they are used. The picture is the same
as with all weights on one device. After loading, the bytes on each device are counted. ComfyUI's log has one line that
says what is where; if the bytes differ from the plan by more than one block, the run stops with an error.

If the compute device is not the one that the loader chose, the model is read from its file again (or its weights are
copied, if ComfyUI cannot repeat the loading), so that the loader's output keeps its own weights. If all weights stay on
the compute device, ComfyUI's own loading is used, DynamicVRAM included.
"""

CONTROL_NET = """
If a ControlNet computes on another device than the diffusion model, the latents are copied to its device and its
results back. T2I adapters and Control-LoRA always compute on the diffusion model's device; this node refuses them.
"""

PLAIN = """
Runs ComfyUI's own loader on the device you choose. Nothing else is different: same files, same result.

In new workflows, use ComfyUI's loader and one of the Place nodes.
"""

SPREAD = """
Runs ComfyUI's own loader and spreads the weights over devices. If there is a text in `expert_mode_allocations`,
`virtual_vram_gb` and `donor_device` are ignored.{of_several}

`eject_models` unloads other models from the compute device once, when this node loads its own. Models with
`keep_loaded` set to keep stay.

In new workflows, use ComfyUI's loader and one of the Place nodes.
"""

OF_SEVERAL = " Only the diffusion model is spread; text encoder and VAE stay on one device."

PARTS = """
Reads each part of the checkpoint with ComfyUI's own functions, for the device that you choose for it. The results are
those of ComfyUI's Load Checkpoint.

In new workflows, use ComfyUI's Load Checkpoint and a Place node after each of its outputs.
"""

SPREAD_PARTS = """
Reads each part of the checkpoint with ComfyUI's own functions, for the device that you choose for it, and spreads the
weights of diffusion model and text encoder over devices; the VAE stays on one device. If there is a text in
`unet_expert_mode_allocations`, `unet_virtual_vram_gb` and `unet_donor_device` are ignored; if there is one in
`clip_expert_mode_allocations`, `clip_virtual_vram_gb` and `clip_donor_device` are ignored.

`eject_models` unloads other models from the compute devices once, when this node loads its own. Models with
`keep_loaded` set to keep stay.

In new workflows, use ComfyUI's Load Checkpoint and a Place node after each of its outputs.
"""

FREE = """
Unloaded models stay unloaded until a node needs them again. `docs/lifecycle.md` in the pack's folder says which models
are unloaded.
"""

REPORT = """
The node works without any connection. To get the report at a certain point of the workflow, connect `value`: the report
is made after the connected node has run. The text appears on the node, and is its output `report`.

- **RAM** and each device: what all programs use. *Cached by the allocator* is memory that ComfyUI's process has taken
  from the device and does not use.
- **Loaded models**: for each model the choice of `default`, `keep` or `eject`, where it computes, and the bytes of its
  weights that were counted on each device. Bytes on `disk` are in the pages of the model file, which the
  operating system maps into memory. With DynamicVRAM all weights of an unplaced model are; what is on the device is a
  copy of some of them.
- **Held for later prompts**: the number of models that stay in memory even when ComfyUI's cache no longer has them.

The node runs in every prompt, even if nothing has changed, and so do all nodes after it. To avoid that, leave its
outputs unconnected.
"""

SELECTOR = """
Use it for nodes of other packs that have an input for a device's name.
"""

LOW_PRECISION = """
Does the same as ComfyUI's loader: a model whose weights are spread gets a LoRA at full precision, whatever loads it.
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
"""The nodes that have a text of their own."""


def help_text(node_id: str, outputs: int) -> str:
    """The hand-written text for a node with `outputs` outputs. A loader with several outputs loads a checkpoint."""
    if node_id in NAMED:
        return NAMED[node_id].strip()
    if node_id.startswith("MultiGPUPlace"):
        return PLACE.strip()
    if "DisTorch2" in node_id:
        return SPREAD.format(of_several=OF_SEVERAL if outputs > 1 else "").strip()
    return PLAIN.strip()
