from typing import Any

import torch

from .model_patcher import ModelPatcher

class ControlNet:
    control_model_wrapped: ModelPatcher
    load_device: torch.device
    def get_control(self) -> Any: ...
