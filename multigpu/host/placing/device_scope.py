"""Running a loader of the host, or any node of another pack, on a chosen device.

For an accelerator it is enough to make it torch's current device: the host's own choice of a device starts from that.
For the CPU, and for backends without a current device, the host's `get_torch_device` is replaced, and so is
`unet_offload_device` where another device than the host's is to hold what does not compute: in the thread that asked,
and for the length of the `with` only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from comfy import model_management

from ...devices.torch_devices import current_device
from ..replacements import Replacement


class DeviceScope:
    """`with scope.on(device):` what is loaded inside is loaded for that device. May be nested; acts on one thread."""

    def __init__(self) -> None:
        reason = "a loader runs on the CPU, or on a backend where torch has no current device"
        self._compute = _Answer("get_torch_device", reason)
        self._offload = _Answer("unet_offload_device", "a node of another pack has a device for what does not compute")

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        with current_device(device):
            if model_management.get_torch_device() == device and self.chosen is None:
                yield
                return
            with self._compute.is_now(device):
                yield

    @contextmanager
    def offloading_to(self, device: torch.device) -> Iterator[None]:
        """The host names this device to whoever asks where a diffusion model rests while it does not compute."""
        with self._offload.is_now(device):
            yield

    @property
    def chosen(self) -> torch.device | None:
        """The device that `get_torch_device` returns in this thread; None where the host's own function decides."""
        return self._compute.chosen


class _Answer:
    """The answer of one of the host's functions without parameters, as far as another is wanted."""

    def __init__(self, name: str, reason: str) -> None:
        self._lock = threading.Lock()
        self._chosen = threading.local()
        self._users = 0
        self._replacement = Replacement(model_management, name, (), reason, self._answer)

    @property
    def chosen(self) -> torch.device | None:
        stack: list[torch.device] = getattr(self._chosen, "stack", [])
        return stack[-1] if stack else None

    @contextmanager
    def is_now(self, device: torch.device) -> Iterator[None]:
        if not hasattr(self._chosen, "stack"):
            self._chosen.stack = []
        with self._lock:
            if self._users == 0:
                self._replacement.install()
            self._users += 1
        self._chosen.stack.append(device)
        try:
            yield
        finally:
            self._chosen.stack.pop()
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._replacement.remove()

    def _answer(self) -> Any:
        return self.chosen or self._replacement.original()
