"""Nodes for tests: quantised weights in the way GGUF packs load them, and conditions evaluated one by one."""

from __future__ import annotations

from typing import Any

import comfy.ops
import comfy.patcher_extension
import comfy.sd
import comfy.utils
import folder_paths
import torch

from .quantised import QuantisedTensor


class QuantisedOperations(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            weight = state_dict.get(prefix + "weight")
            if not isinstance(weight, QuantisedTensor):
                super()._load_from_state_dict(state_dict, prefix, *args)
                return
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.bias = torch.nn.Parameter(state_dict[prefix + "bias"], requires_grad=False)

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.weight, QuantisedTensor):
                return super().forward_comfy_cast_weights(input)
            weight = self.weight.to(input.device).values(input.dtype)
            return torch.nn.functional.linear(input, weight, self.bias.to(input))


class LoadQuantised:
    """Loads a diffusion model with the large weights of its single blocks in Q8_0."""

    CATEGORY = "simdev"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": (folder_paths.get_filename_list("diffusion_models"),)}}

    def load(self, unet_name: str) -> tuple[Any]:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        state = comfy.utils.load_torch_file(path)
        for key in [key for key in state if key.startswith("single_blocks.") and key.endswith("linear1.weight")]:
            state[key] = QuantisedTensor.quantise(state[key])
        options = {"custom_operations": QuantisedOperations}
        return (comfy.sd.load_diffusion_model_state_dict(state, model_options=options),)


class OneAtATime:
    """Evaluates positive and negative conditions one by one, as core's CFG split does, instead of as one batch.

    A batch of two is not bit-identical to two batches of one.
    """

    CATEGORY = "simdev"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "wrap"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def wrap(self, model: Any) -> tuple[Any]:
        def each(executor: Any, base: Any, conds: list[Any], *args: Any) -> list[Any]:
            return [executor(base, [cond], *args)[0] for cond in conds]

        model = model.clone()
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, "simdev", each)
        return (model,)


NODE_CLASS_MAPPINGS = {"SimdevLoadQuantised": LoadQuantised, "SimdevOneAtATime": OneAtATime}
