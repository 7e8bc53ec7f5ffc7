"""Which weights the host has left in the pages of their file: those that its DynamicVRAM loader has mapped."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...stream.layout import is_plain
from ...stream.pages import Page, file_stamp

_SLICE = "_comfy_tensor_file_slice"
"""An attribute of such a storage: the open file, a lock, where in the file its bytes begin, how many they are."""


def page_of(tensor: torch.Tensor) -> Page | None:
    """The page of a weight that is in its file; None for all others, and where the file cannot be looked at."""
    if not is_plain(tensor) or tensor.is_meta or not tensor.is_contiguous() or not hasattr(os, "preadv"):
        return None
    found: Any = getattr(tensor.untyped_storage(), _SLICE, None)
    if found is None or found.size != tensor.nbytes or not isinstance(found.file_ref, int):
        return None
    stamp = file_stamp(found.file_ref)
    return None if stamp is None else Page(tensor.detach(), found.file_ref, found.offset, stamp)
