from typing import Any

import torch

ModelType: Any

class BaseModel(torch.nn.Module):
    device: torch.device
    current_patcher: Any
    current_weight_patches_uuid: Any
    lowvram_patch_counter: int
    manual_cast_dtype: torch.dtype | None
    model_loaded_weight_memory: int
    model_config: Any
    model_lowvram: bool
    model_offload_buffer_memory: int
    def load_model_weights(self, sd: Any, unet_prefix: str = "", assign: bool = False) -> Any: ...
    def extra_conds(self) -> dict[str, Any]: ...
    def get_dtype(self) -> torch.dtype: ...
