"""The loader nodes of the archived pack (2.6.x), which saved workflows name: id, host node that each calls, widgets.

The ids, and the names, order and defaults of the widgets, are those of the archived pack; a test compares them with
`tests/golden`. New widgets come after the old ones.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, COMPUTE = "device", "compute_device"


@dataclass(frozen=True, slots=True)
class Loader:
    """One loader of the host or of another pack, wrapped twice: `<target>MultiGPU` and `<target>DisTorch2MultiGPU`.

    `spread` is the archived pack's name for the compute device widget of the second node, `eject` the default of that
    node's `eject_models`. `title` is shown to users. `pack` and `returns` are the pack that the loader belongs to and
    what it returns, for loaders that the host does not have itself.
    """

    target: str
    title: str
    spread: str = COMPUTE
    eject: bool = True
    pack: str = ""
    returns: tuple[str, ...] = ()


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

OTHER_VRAM = "use_other_vram"
"""The switch of the oldest nodes for GGUF files: the weights rest on other accelerators first, and not only in RAM."""

CHECKPOINT = "CheckpointLoaderSimple"
"""The two Advanced nodes, which have a device per part, have the file list and the outputs of this one."""

CHECKPOINT_ADVANCED = "CheckpointLoaderAdvancedMultiGPU"
CHECKPOINT_ADVANCED_SPREAD = "CheckpointLoaderAdvancedDisTorch2MultiGPU"
LOW_PRECISION_UNET = "UNetLoaderLP"
DEVICE_SELECTOR = "DeviceSelectorMultiGPU"
DEVICE_SOCKET = "MULTIGPUDEVICE"
