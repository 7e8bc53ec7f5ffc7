from collections.abc import Sequence
from typing import Any

import torch

from .model_patcher import ModelPatcher

class CLIP:
    patcher: ModelPatcher
    cond_stage_model: torch.nn.Module
    def __init__(self, *, no_init: bool) -> None: ...

class VAE:
    patcher: ModelPatcher
    first_stage_model: torch.nn.Module
    device: torch.device
    vae_dtype: torch.dtype
    working_dtypes: Sequence[torch.dtype]
    encode: Any
    encode_tiled: Any
    decode: Any
    decode_tiled: Any
    spacial_compression_decode: Any
    spacial_compression_encode: Any
    temporal_compression_decode: Any
    get_sd: Any

def load_checkpoint_guess_config(
    ckpt_path: str,
    output_vae: bool = ...,
    output_clip: bool = ...,
    *,
    embedding_directory: Sequence[str] | None = ...,
    output_model: bool = ...,
) -> tuple[Any, ...]: ...
