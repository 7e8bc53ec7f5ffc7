"""The loader nodes that saved workflows of the archived pack (2.6.x) name: id, the host's node behind it, widgets.

The ids, and the names, order and defaults of the widgets, are those of the archived pack; `tests/golden` freezes them.
What is new comes after what was there.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, COMPUTE = "device", "compute_device"


@dataclass(frozen=True, slots=True)
class Loader:
    """One loader of the host, wrapped twice: `<target>MultiGPU` and `<target>DisTorch2MultiGPU`.

    `spread` is what the archived pack called the widget of the compute device in the second, `eject` the default of
    its `eject_models`. `title` is for people.
    """

    target: str
    title: str
    spread: str = COMPUTE
    eject: bool = True


LOADERS = (
    Loader("UNETLoader", "Load Diffusion Model"),
    Loader("CLIPLoader", "Load CLIP", DEVICE, eject=False),
    Loader("DualCLIPLoader", "Load CLIP (Dual)", DEVICE, eject=False),
    Loader("TripleCLIPLoader", "Load CLIP (Triple)", DEVICE, eject=False),
    Loader("QuadrupleCLIPLoader", "Load CLIP (Quadruple)", DEVICE, eject=False),
    Loader("VAELoader", "Load VAE"),
    Loader("ControlNetLoader", "Load ControlNet Model"),
    Loader("DiffControlNetLoader", "Load ControlNet Model (diff)"),
    Loader("CLIPVisionLoader", "Load CLIP Vision", DEVICE, eject=False),
    Loader("CheckpointLoaderSimple", "Load Checkpoint"),
    Loader("DiffusersLoader", "Load Diffusers Model"),
)

CHECKPOINT = "CheckpointLoaderSimple"
"""Its choices and outputs are those of the two Advanced nodes, which have a device per part."""

CHECKPOINT_ADVANCED = "CheckpointLoaderAdvancedMultiGPU"
CHECKPOINT_ADVANCED_SPREAD = "CheckpointLoaderAdvancedDisTorch2MultiGPU"
LOW_PRECISION_UNET = "UNetLoaderLP"
DEVICE_SELECTOR = "DeviceSelectorMultiGPU"
DEVICE_SOCKET = "MULTIGPUDEVICE"
