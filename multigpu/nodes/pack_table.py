"""The archived pack's nodes for other packs, which saved workflows name: one row per node of another pack.

A row is all that a further one needs; see docs/adding-an-integration.md. Ids, and names and order of the inputs, are
those of the archived pack.
"""

from __future__ import annotations

from dataclasses import dataclass

from .loader_table import COMPUTE, DEVICE, Loader

_GGUF, _MODEL, _CLIP = "ComfyUI-GGUF", ("MODEL",), ("CLIP",)

PACK_LOADERS = (
    Loader("UnetLoaderGGUF", "Unet Loader (GGUF)", pack=_GGUF, returns=_MODEL),
    Loader("UnetLoaderGGUFAdvanced", "Unet Loader (GGUF/Advanced)", pack=_GGUF, returns=_MODEL),
    Loader("CLIPLoaderGGUF", "CLIPLoader (GGUF)", DEVICE, eject=False, pack=_GGUF, returns=_CLIP),
    Loader("DualCLIPLoaderGGUF", "DualCLIPLoader (GGUF)", DEVICE, eject=False, pack=_GGUF, returns=_CLIP),
    Loader("TripleCLIPLoaderGGUF", "TripleCLIPLoader (GGUF)", DEVICE, eject=False, pack=_GGUF, returns=_CLIP),
    Loader("QuadrupleCLIPLoaderGGUF", "QuadrupleCLIPLoader (GGUF)", DEVICE, eject=False, pack=_GGUF, returns=_CLIP),
)
"""Loaders whose weights can be spread. Each has a third node, `<target>DisTorchMultiGPU`, for older workflows."""


@dataclass(frozen=True, slots=True)
class PackNode:
    """A node of another pack that runs on a chosen device in ours, `<target>MultiGPU`.

    `returns` is what the pack's node returns, at least. Our input `device` comes after its input `after`, or last, as a
    widget or as a socket for the output of another node; it takes the place of `replaces`, the node's own choice
    between the CPU and an accelerator. `gives` is our last output, which hands the device on to such sockets. `offload`
    is our widget for the device that holds what does not compute. `then` is a node of the pack that uses what was
    loaded, and computes on the host's own device all the same.
    """

    target: str
    pack: str
    returns: tuple[str, ...]
    device: str = DEVICE
    after: str = ""
    socket: bool = False
    optional: bool = True
    replaces: str = ""
    gives: str = ""
    offload: str = ""
    then: str = ""

    @property
    def limits(self) -> str:
        """What the pack decides itself, for users."""
        if self.then:
            return f"{self.then}, which uses what is loaded, computes on ComfyUI's own device."
        return _WAN_LIMITS if self.pack == _WAN else ""


_WAN, _LOAD = "ComfyUI-WanVideoWrapper", "load_device"
_WAN_LIMITS = (
    "This pack moves its weights itself, so they cannot be spread over devices here; its block swap has a device. "
    "Other nodes of the pack compute on ComfyUI's own device: use those with (MultiGPU) in their names together."
)


def _wan(target: str, returns: str, device: str, after: str, **other: str | bool) -> PackNode:
    return PackNode(target, _WAN, (returns,), device, after, **other)  # type: ignore[arg-type]


_MMAUDIO, _PULID, _FLORENCE = "ComfyUI-MMAudio", "PuLID_ComfyUI", "ComfyUI-Florence2"
_OFFLOAD, _RUN = "offload_device", "Florence2Run"

PACK_NODES = (
    _wan("WanVideoModelLoader", "WANVIDEOMODEL", COMPUTE, "load_device", optional=False, gives=COMPUTE),
    _wan("WanVideoVAELoader", "WANVAE", _LOAD, "model_name", gives=_LOAD),
    _wan("WanVideoTinyVAELoader", "WANVAE", _LOAD, "model_name", gives=_LOAD),
    _wan("LoadWanVideoT5TextEncoder", "WANTEXTENCODER", DEVICE, "precision", replaces=_LOAD, gives=_LOAD),
    _wan("LoadWanVideoClipTextEncoder", "CLIP_VISION", DEVICE, "precision", replaces=_LOAD, gives=_LOAD),
    _wan("WanVideoControlnetLoader", "WANVIDEOCONTROLNET", DEVICE, "load_device", optional=False),
    _wan("WanVideoUni3C_ControlnetLoader", "WANVIDEOCONTROLNET", DEVICE, "load_device", optional=False),
    _wan("FantasyTalkingModelLoader", "FANTASYTALKINGMODEL", DEVICE, "base_precision", optional=False),
    _wan("Wav2VecModelLoader", "WAV2VECMODEL", DEVICE, "load_device", optional=False),
    _wan("DownloadAndLoadWav2VecModel", "WAV2VECMODEL", DEVICE, "load_device", optional=False),
    _wan("WanVideoTextEncode", "WANVIDEOTEXTEMBEDS", _LOAD, "t5", socket=True, replaces=DEVICE),
    _wan("WanVideoTextEncodeSingle", "WANVIDEOTEXTEMBEDS", _LOAD, "t5", socket=True, replaces=DEVICE),
    _wan("WanVideoTextEncodeCached", "WANVIDEOTEXTEMBEDS", _LOAD, "use_disk_cache", optional=False, replaces=DEVICE),
    _wan("WanVideoClipVisionEncode", "WANVIDIMAGE_CLIPEMBEDS", _LOAD, "clip_vision", socket=True, optional=False),
    _wan("WanVideoImageToVideoEncode", "WANVIDIMAGE_EMBEDS", _LOAD, "vae", socket=True),
    _wan("WanVideoVACEEncode", "WANVIDIMAGE_EMBEDS", _LOAD, "vae", socket=True, optional=False),
    _wan("WanVideoEncode", "LATENT", _LOAD, "vae", socket=True, optional=False),
    _wan("WanVideoDecode", "IMAGE", _LOAD, "vae", socket=True, optional=False),
    _wan("WanVideoSampler", "LATENT", COMPUTE, "model", socket=True, optional=False),
    PackNode("LTXVLoader", "ComfyUI-LTXVideo", ("MODEL", "VAE")),
    PackNode("CheckpointLoaderNF4", "ComfyUI_bitsandbytes_NF4", ("MODEL", "CLIP", "VAE")),
    PackNode("LoadFluxControlNet", "x-flux-comfyui", ("FluxControlNet",), then="XlabsSampler"),
    PackNode("Florence2ModelLoader", _FLORENCE, ("FL2MODEL",), offload=_OFFLOAD, then=_RUN),
    PackNode("DownloadAndLoadFlorence2Model", _FLORENCE, ("FL2MODEL",), offload=_OFFLOAD, then=_RUN),
    PackNode("MMAudioModelLoader", _MMAUDIO, ("MMAUDIO_MODEL",), then="MMAudioSampler"),
    PackNode("MMAudioFeatureUtilsLoader", _MMAUDIO, ("MMAUDIO_FEATUREUTILS",), then="MMAudioSampler"),
    PackNode("MMAudioSampler", _MMAUDIO, ("AUDIO",)),
    PackNode("PulidModelLoader", _PULID, ("PULID",), then="ApplyPulid"),
    PackNode("PulidInsightFaceLoader", _PULID, ("FACEANALYSIS",), then="ApplyPulid"),
    PackNode("PulidEvaClipLoader", _PULID, ("EVA_CLIP",), then="ApplyPulid"),
)

BLOCK_SWAP = PackNode("WanVideoBlockSwap", _WAN, ("BLOCKSWAPARGS",), "swap_device")
"""Runs nowhere: it returns a dictionary, to which our node adds the device that blocks are swapped to."""
