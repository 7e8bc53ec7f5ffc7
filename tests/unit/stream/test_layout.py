"""Tensors as flat bytes and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multigpu.stream.arena import Segment, allocate
from multigpu.stream.layout import ALIGNMENT, align, copy_to, lay_out, leaves_of, stored_bytes


class Packed(torch.Tensor):
    """As GGUF tensors are: raw bytes with the real shape and type as attributes."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.real_shape


def packed() -> Packed:
    tensor = torch.arange(64, dtype=torch.uint8).as_subclass(Packed)
    tensor.real_shape = torch.Size((8, 16))
    tensor.kind = "Q4_K"
    return tensor


def through_bytes(tensor: torch.Tensor, start: int = 512) -> torch.Tensor:
    """Copy a tensor into flat memory and make its like from there."""
    leaves, rebuild = leaves_of(tensor)
    placed, size = lay_out(leaves)
    segment = Segment(allocate(start + align(size), torch.device("cpu")))
    views = [leaf.view(segment.typed(leaf.dtype), start) for leaf in placed]
    for view, leaf in zip(views, leaves, strict=True):
        view.copy_(leaf)
    return rebuild(views)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.float64),
        torch.randn(4, 6).to(torch.float8_e5m2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.tensor(2.5),
        torch.ones(0, 3),
        torch.tensor([True, False]),
    ],
    ids=["matrix", "double", "fp8", "channels last", "transposed", "expanded", "scalar", "empty", "bool"],
)
def test_plain_tensors(tensor: torch.Tensor) -> None:
    again = through_bytes(tensor)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert again.tolist() == tensor.tolist()
    dense = tensor.numel() == tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if dense:
        assert again.stride() == tensor.stride()


def test_a_quantised_wrapper_keeps_class_and_scales() -> None:
    kitchen = pytest.importorskip("comfy_kitchen.tensor")
    plain = torch.randn(32, 64)
    quantised = kitchen.QuantizedTensor.from_float(plain, "TensorCoreFP8Layout", scale="recalculate")
    again = through_bytes(quantised)
    assert type(again) is type(quantised)
    assert torch.equal(again.dequantize(), quantised.dequantize())
    assert stored_bytes(quantised) == 32 * 64 + 4


def test_a_subclass_with_attributes_keeps_them() -> None:
    again = through_bytes(packed())
    assert type(again) is Packed and again.shape == (8, 16) and again.kind == "Q4_K"
    assert bytes(again.as_subclass(torch.Tensor).tolist()) == bytes(range(64))
    assert stored_bytes(packed()) == 64


def test_a_copy_may_be_written_in_both_modes() -> None:
    with torch.inference_mode():
        copy = copy_to(torch.ones(3), torch.device("cpu"))
    copy.add_(1)
    with torch.inference_mode():
        copy.add_(1)
    assert copy.tolist() == [3, 3, 3]


@given(st.lists(st.integers(0, 5000), max_size=8))
def test_every_tensor_starts_aligned_and_none_overlap(sizes: list[int]) -> None:
    placed, end = lay_out([torch.empty(size, dtype=torch.uint8) for size in sizes])
    at = 0
    for leaf in placed:
        assert leaf.offset % ALIGNMENT == 0 and leaf.offset >= at
        at = leaf.offset + leaf.nbytes
    assert end >= at and end % ALIGNMENT == 0
