"""Measures the speed of links and devices, in the way that streaming uses them. None where it cannot be measured.

A measurement takes some 50 ms and tens of MiB, which are freed afterwards, together with everything else in the
device's allocator cache. It waits for the devices it measures, so do not measure during a run. The current device and
stream are not changed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch

from ..devices.caches import clear_caches
from ..devices.torch_devices import torch_device
from ..plan import DeviceId
from .arena import Arena, allocate
from .lanes import TRIAL_BYTES, SynchronousLane, device_module, open_lane, seconds_per_copy
from .trials import burst, steady

log = logging.getLogger("multigpu")

WIDTH = 3072
"""The width of the matrix product that is timed: that of a Flux layer."""
TOKENS = (16, 256, 4096)
"""Rows of its input in each trial; the last is what a picture of 1024x1024 has."""
LONG_ENOUGH = 2e-3
"""Seconds. If a trial takes longer, no larger one is made."""


def link_bandwidth(home: DeviceId, compute: DeviceId) -> float | None:
    """Bytes per second from `home` to `compute`, through the lane that streaming would use; RAM is pinned for it."""
    what = f"the link from {home} to {compute}"
    figure = _attempt(what, [home, compute], lambda: _bandwidth(torch_device(home), torch_device(compute)))
    if figure is not None:
        log.info("[MultiGPU] measured %s: %.1f GB/s", what, figure / 1e9)
    return figure


def layer_flops(compute: DeviceId) -> float | None:
    """Floating-point operations per second in a layer of an image model, in bf16 (fp16 where that is emulated)."""
    what = f"the compute rate of {compute}"
    figure = _attempt(what, [compute], lambda: _flops(torch_device(compute)))
    if figure is not None:
        log.info("[MultiGPU] measured %s: %.3g TFLOP/s", what, figure / 1e12)
    return figure


def _attempt(what: str, devices: list[DeviceId], measure: Callable[[], float | None]) -> float | None:
    try:
        figure = measure()
        clear_caches(device for device in devices if not device.is_cpu)
    except Exception:  # a vendor's module may raise anything, and there may be no room
        log.debug("[MultiGPU] %s cannot be measured", what, exc_info=True)
        return None
    return figure


def _bandwidth(home: torch.device, compute: torch.device) -> float | None:
    if device_module(compute) is None or home == compute:
        return None
    with ExitStack() as last_first:
        arena = Arena(home, [TRIAL_BYTES])
        source = arena.room(TRIAL_BYTES).flat
        if home.type == "cpu":
            source.zero_()  # pages that were never written are not in RAM yet
        last_first.callback(arena.unpin)
        arena.pin(compute)
        lane = last_first.enter_context(closing(open_lane(home, compute)))
        if isinstance(lane, SynchronousLane):
            return None
        target = allocate(TRIAL_BYTES, compute)
        seconds = steady(lambda: seconds_per_copy(lane, source, target))
    return TRIAL_BYTES / seconds if seconds else None


def _flops(compute: torch.device) -> float | None:
    module = device_module(compute)
    if module is None:
        return None
    with module.device(compute.index):
        weight = torch.ones(WIDTH, WIDTH, dtype=half_type(module), device=compute)
        for tokens in TOKENS:
            products = _products(module, tokens, weight)
            first = min(products())
            if not first:
                return None
            if first > LONG_ENOUGH:
                break
        return 2.0 * tokens * WIDTH * WIDTH / steady(products)


def half_type(module: Any) -> torch.dtype:
    """The 16-bit type that the current device computes natively: what models run in there."""
    ask = getattr(module, "is_bf16_supported", None)
    if ask is None:
        return torch.float16
    natively = {"including_emulation": False} if "including_emulation" in inspect.signature(ask).parameters else {}
    return torch.bfloat16 if ask(**natively) else torch.float16


def _products(module: Any, tokens: int, weight: torch.Tensor) -> Callable[[], list[float]]:
    """Seconds of each of a few products in a row, with an input of so many rows."""
    given = torch.ones(tokens, WIDTH, dtype=weight.dtype, device=weight.device)
    result, stream = torch.empty_like(given), module.current_stream(weight.device)
    return lambda: burst(module, stream, lambda: torch.mm(given, weight, out=result))
