"""Model files as the host's DynamicVRAM loader reads them: weights are pages of the file, mapped read-only.

The loader itself needs a real GPU. This one does the same for the simulated ones, without DynamicVRAM.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from multigpu.stream.originals import _DTYPES


@contextmanager
def weights_in_pages() -> Iterator[None]:
    """All safetensors files are read so, and the weights of diffusion models stay where they are."""
    import comfy.memory_management
    import comfy.model_patcher
    import comfy.utils

    from multigpu.host.engine.static_clone import cast_pages
    from multigpu.host.replacements import static_patchers

    plain, patch = comfy.utils.load_torch_file, comfy.model_patcher.ModelPatcher.patch_model

    def load(path: str, *arguments: Any, return_metadata: bool = False, **named: Any) -> Any:
        if not path.endswith((".safetensors", ".sft")):
            return plain(path, *arguments, return_metadata=return_metadata, **named)
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > Path(path).stat().st_size:
                return plain(path, *arguments, return_metadata=return_metadata, **named)
            header = json.loads(file.read(length))
            descriptor = os.dup(file.fileno())
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            weakref.finalize(pages, os.close, descriptor)
        metadata, tensors = header.pop("__metadata__", {}), {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            with torch.inference_mode(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part = memoryview(pages)[8 + length + begin : 8 + length + end]
                tensor = torch.frombuffer(part, dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
            where = comfy.memory_management.TensorFileSlice(descriptor, None, 8 + length + begin, end - begin)
            tensor.untyped_storage()._comfy_tensor_file_slice = where  # type: ignore[attr-defined]
            tensors[name] = tensor.reshape(entry["shape"])
        return (tensors, metadata) if return_metadata else tensors

    def patch_model(self: Any, device_to: Any = None, lowvram_model_memory: Any = 0, load_weights: Any = True,
                    force_patch_weights: Any = False) -> Any:  # fmt: skip
        """With the host's parameters, which our list of its symbols has. DynamicVRAM casts weights at each use."""
        if getattr(self, "placed", None) is None:
            cast_pages(self.model)
        return patch(self, device_to, lowvram_model_memory, load_weights, force_patch_weights)

    comfy.utils.load_torch_file = load
    comfy.model_patcher.ModelPatcher.patch_model = patch_model
    try:
        with static_patchers(in_pages=True):
            yield
    finally:
        comfy.utils.load_torch_file = plain
        comfy.model_patcher.ModelPatcher.patch_model = patch
