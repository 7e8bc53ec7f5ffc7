from typing import Any

class CastWeightBiasOp:
    comfy_cast_weights: bool
    weight_function: list[Any]
    bias_function: list[Any]

class disable_weight_init:
    class Linear:
        weight_comfy_model_dtype: Any
