"""Weights in GGUF's Q8_0 form, as tensors: bytes that look like the weight they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch

BLOCK, BLOCK_BYTES = 32, 34  # 32 values: one fp16 scale, 32 signed bytes


class QuantisedTensor(torch.Tensor):
    """uint8 data with the shape of the values in `shape`. Moving and copying keep what it is."""

    value_shape: torch.Size

    @classmethod
    def quantise(cls, values: torch.Tensor) -> QuantisedTensor:
        data = gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        tensor = torch.from_numpy(data).as_subclass(cls)
        tensor.value_shape = values.shape
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and isinstance(args[0], cls) and hasattr(args[0], "value_shape"):
            result.value_shape = args[0].value_shape
        return result

    @property
    def shape(self) -> torch.Size:
        return self.value_shape if hasattr(self, "value_shape") else self.size()

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight itself, computed on the device where the bytes are."""
        blocks = self.as_subclass(torch.Tensor).reshape(-1, BLOCK_BYTES)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        return (scale * blocks[:, 2:].view(torch.int8).float()).reshape(self.value_shape).to(dtype)
