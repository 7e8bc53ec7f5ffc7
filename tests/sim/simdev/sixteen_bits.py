"""16-bit convolutions and matrix products on the CPU, also for the simulated devices, whose kernels are the CPU's.

CPUs without 16-bit arithmetic take much longer for them than in 32 bits: some two hundred times for a convolution, five
times for a matrix product. So they are computed in 32 bits and rounded.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")
_PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
_PRODUCTS = [name + form for name in ("mm", "addmm", "bmm", "baddbmm") for form in ("", ".out")]
_SHORT = (torch.float16, torch.bfloat16)


def _convolution(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    if given.dtype not in _SHORT:
        result: torch.Tensor = torch.ops.aten.convolution.default.redispatch(_PLAIN, given, weight, bias, *rest)
        return result
    wide = torch.convolution(given.float(), weight.float(), None if bias is None else bias.float(), *rest)
    return wide.to(given.dtype)


def _product(name: str) -> Any:
    """The matrix product of this name, in 32 bits where it was asked for in 16."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")  # type: ignore[attr-defined]

    def multiply(keys: Any, *given: torch.Tensor, **more: Any) -> Any:
        short = given[-1].dtype
        if short not in _SHORT:
            return kernel.call_boxed(keys, *given, **more)
        out = more.get("out")
        if out is not None:
            more["out"] = torch.empty_like(out, dtype=torch.float32)
        wide = kernel.call_boxed(keys, *(each.float() for each in given), **more)
        return wide.to(short) if out is None else out.copy_(wide)

    return multiply


def compute_in_32_bits() -> None:
    """For the rest of the process. Matrix products only where torch can return the kernel that is replaced."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::convolution", "CPU"):
        return
    _library.impl("convolution", _convolution, "CPU")
    if not hasattr(torch.library, "get_kernel"):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*may also be overridden")
        for name in _PRODUCTS:
            _library.impl(name, _product(name), "CPU", with_keyset=True, allow_override=True)
