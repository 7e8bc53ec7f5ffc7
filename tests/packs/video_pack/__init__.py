"""A pack that manages the devices of its models itself, as packs for video models do, with the ids of one of them.

Its modules ask ComfyUI for the devices when they are imported, and keep them in globals; some nodes ask again each
time; the sampler moves blocks between two devices by itself. What a node did where is in its output.
MULTIGPU_TEST_PACK=changed makes its loader return one thing more.
"""

import os

from .loading import BlockSwap, Decode, ModelLoader, TextEncode, TextEncoderLoader, VaeLoader
from .sampling import Sampler

NODE_CLASS_MAPPINGS = {
    "WanVideoModelLoader": ModelLoader,
    "WanVideoBlockSwap": BlockSwap,
    "WanVideoSampler": Sampler,
    "LoadWanVideoT5TextEncoder": TextEncoderLoader,
    "WanVideoTextEncode": TextEncode,
    "WanVideoVAELoader": VaeLoader,
    "WanVideoDecode": Decode,
}
if os.environ.get("MULTIGPU_TEST_PACK") == "changed":
    ModelLoader.RETURN_TYPES = ("WANVIDEOMODEL", "STRING")
    ModelLoader.RETURN_NAMES = ("model", "name")

NODE_DISPLAY_NAME_MAPPINGS = {"WanVideoSampler": "WanVideo Sampler"}
