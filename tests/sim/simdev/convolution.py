"""Convolutions in 16 bits on the CPU, for the CPU itself and for the simulated devices, whose kernels are the CPU's.

CPUs without 16-bit arithmetic take some two hundred times as long for one as in 32 bits. So they are computed in 32
bits and rounded.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")
_PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


def _convolution(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    if given.dtype not in (torch.float16, torch.bfloat16):
        result: torch.Tensor = torch.ops.aten.convolution.default.redispatch(_PLAIN, given, weight, bias, *rest)
        return result
    wide = torch.convolution(given.float(), weight.float(), None if bias is None else bias.float(), *rest)
    return wide.to(given.dtype)


def compute_convolutions_in_32_bits() -> None:
    """For the rest of the process."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::convolution", "CPU"):
        _library.impl("convolution", _convolution, "CPU")
