from typing import Any

import torch

from .model_patcher import ModelPatcher

class ClipVisionModel:
    model: torch.nn.Module
    patcher: ModelPatcher
    load_device: torch.device
    def encode_image(self) -> Any: ...
