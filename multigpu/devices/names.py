"""The names by which people and workflows call devices. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import DeviceId

DEFAULT_DEVICE = "default"
"""The device that ComfyUI would choose."""

GPU = "gpu"
"""The host's own word: `gpu:1` is the second accelerator, whatever its kind."""
ALIASES = {"corex": "cuda", "ixuca": "cuda", "hip": "cuda", "rocm": "cuda", "privateuseone": "directml"}
"""Other names that saved workflows and people use for a backend."""


def is_default(text: str) -> bool:
    """Whether the choice of the device is left to the host."""
    return text.strip().lower() in ("", DEFAULT_DEVICE)


def device_here(named: DeviceId, here: Sequence[DeviceId]) -> DeviceId | None:
    """The device of this machine that `cuda:1`, `rocm:1`, `directml:0` or `gpu:1` means; None if there is none."""
    for device in (named, DeviceId(ALIASES.get(named.type, named.type), named.index)):
        if device in here:
            return device
    accelerators = [device for device in here if not device.is_cpu]
    index = named.index or 0
    return accelerators[index] if named.type == GPU and index < len(accelerators) else None
