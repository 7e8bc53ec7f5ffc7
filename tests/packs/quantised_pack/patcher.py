"""What a pack with its own quantised weights does at the seams, as packs for GGUF files do.

Weights are tensors of a class of its own, whose logical shape differs from the stored bytes. The patcher's `clone` sets
the class of the clone at last, its `patch_weight_to_device` has no `return_weight`, and patches of a quantised weight
are not baked: the tensor carries them and they are applied when it is used, on the device of the input. Modules of this
pack copy their weights to the input's device at every use, synchronously.
"""

from __future__ import annotations

from typing import Any

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch


class Quantised(torch.Tensor):
    """Eight-bit numbers in rows, the row's scale in its first four bytes. `shape` is that of the numbers."""

    logical: torch.Size
    patches: list[Any]

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        rows = weight.float().reshape(weight.shape[0], -1)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        numbers = (rows / scale).round().to(torch.int8)
        made = torch.cat([scale.view(torch.int8), numbers], 1).view(torch.uint8).as_subclass(cls)
        made.logical, made.patches = weight.shape, []
        return made

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return getattr(self, "logical", None) or self.size()

    def to(self, *arguments: Any, **named: Any) -> Any:
        new = super().to(*arguments, **named)
        new.logical = getattr(self, "logical", None)
        new.patches = getattr(self, "patches", []).copy()
        return new

    def detach(self) -> Quantised:
        return self

    def clone(self, **named: Any) -> Quantised:
        return self

    def numbers(self) -> torch.Tensor:
        stored = self.as_subclass(torch.Tensor).view(torch.int8)
        scale = stored[:, :4].contiguous().view(torch.float32)
        return (stored[:, 4:] * scale).reshape(self.shape)


class Operations(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        def __init__(self, into: int, out: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = into, out
            self.weight = self.bias = None

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            self.weight = torch.nn.Parameter(state_dict[f"{prefix}weight"], requires_grad=False)
            if f"{prefix}bias" in state_dict:
                self.bias = torch.nn.Parameter(state_dict[f"{prefix}bias"], requires_grad=False)

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            weight = self.weight.to(input.device)
            if isinstance(weight, Quantised):
                patches, weight = weight.patches, weight.numbers()
                for group, key in patches:
                    weight = comfy.lora.calculate_weight(on(group, input.device), weight, key)
            bias = None if self.bias is None else self.bias.to(input.device, input.dtype)
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)


def on(item: Any, device: torch.device) -> Any:
    """Patches with their tensors on `device`."""
    if isinstance(item, torch.Tensor):
        return item.to(device)
    return type(item)(on(each, device) for each in item) if isinstance(item, (list, tuple)) else item


class QuantisedPatcher(comfy.model_patcher.ModelPatcher):
    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> None:  # type: ignore[override]
        if key not in self.patches:
            return
        weight = comfy.utils.get_attr(self.model, key)
        if isinstance(weight, Quantised):
            new = weight.to(device_to)
            new.patches = [(on(self.patches[key], self.offload_device), key)]
        else:
            if key not in self.backup:
                self.backup[key] = comfy.model_patcher.collections.namedtuple("Backup", ["weight", "inplace_update"])(
                    weight.to(self.offload_device), False
                )
            new = comfy.model_management.cast_to_device(weight, device_to, torch.float32, copy=True)
            new = comfy.lora.calculate_weight(self.patches[key], new, key).to(weight.dtype)
        comfy.utils.set_attr_param(self.model, key, new)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        for weight in self.model.parameters() if unpatch_weights else ():
            if getattr(weight, "patches", []):
                weight.patches = []
        return super().unpatch_model(device_to, unpatch_weights)

    def load(self, *arguments: Any, force_patch_weights: bool = False, **named: Any) -> None:
        super().load(*arguments, force_patch_weights=True, **named)

    def clone(self, *arguments: Any, **named: Any) -> QuantisedPatcher:
        own, self.__class__ = self.__class__, QuantisedPatcher
        made = super().clone(*arguments, **named)
        made.__class__, self.__class__ = QuantisedPatcher, own
        return made


def load(path: str) -> QuantisedPatcher:
    """The diffusion model of a safetensors file, with the weights of its linear layers quantised."""
    tensors = comfy.utils.load_torch_file(path)
    quantised = {k: Quantised.of(v) if k.endswith("weight") and v.dim() == 2 else v for k, v in tensors.items()}
    model = comfy.sd.load_diffusion_model_state_dict(quantised, model_options={"custom_operations": Operations()})
    return QuantisedPatcher.clone(model)
