"""All devices of the machine and the links between them: probed and measured once, when first asked for."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from ..errors import AllocationError, BackendUnavailable, UnknownDevice
from ..plan import CPU, DeviceId
from ..units import format_bytes
from .backends import Backend, Device, all_backends, free_bytes, probe
from .names import device_here


@dataclass(frozen=True, slots=True)
class Found:
    """What probing found: accelerators in order, the CPU last, and a sentence for each backend that is broken."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...]


Measure = Callable[..., float | None]
"""Takes one or two devices; None where it cannot be measured. Never raises."""


def unmeasured(*devices: DeviceId) -> float | None:
    """Knows no figure."""
    return None


class Inventory:
    """The devices of this machine. Safe to use from any thread; a broken backend is reported and otherwise absent.

    `measure_link` takes a home and a compute device and gives bytes per second, `measure_flops` takes a compute device.
    """

    def __init__(
        self,
        backends: Callable[[], Sequence[Backend]] = all_backends,
        look: Callable[[Backend], list[Device]] = probe,
        measure_link: Measure = unmeasured,
        measure_flops: Measure = unmeasured,
    ) -> None:
        self._backends = backends
        self._look = look
        self._measure_link = measure_link
        self._measure_flops = measure_flops
        self._found: Found | None = None
        self._figures: dict[tuple[DeviceId, ...], float | None] = {}
        self._lock = threading.Lock()
        self._measuring = threading.Lock()

    def found(self) -> Found:
        with self._lock:
            if self._found is None:
                self._found = self._probe()
            return self._found

    def _probe(self) -> Found:
        devices: list[Device] = []
        problems: list[str] = []
        for backend in self._backends():
            try:
                devices += self._look(backend)
            except BackendUnavailable as problem:
                problems.append(str(problem))
        cpu = Device(CPU, str(CPU), platform.processor() or platform.machine() or "CPU", psutil.virtual_memory().total)
        return Found((*devices, cpu), tuple(problems))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Accelerators in order, then the CPU."""
        return self.found().devices

    @property
    def accelerators(self) -> tuple[Device, ...]:
        return self.devices[:-1]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each backend that is installed but broken."""
        return self.found().problems

    def labels(self) -> list[str]:
        """The names by which workflows choose a device: accelerators in order, then `cpu`."""
        return [device.label for device in self.devices]

    def free(self, device: DeviceId) -> int | None:
        """Free bytes now, as driver or operating system tell; None where they do not."""
        return int(psutil.virtual_memory().available) if device.is_cpu else free_bytes(device)

    def bandwidth(self, home: DeviceId, compute: DeviceId) -> float | None:
        """Bytes per second from `home` to `compute`; None where that cannot be measured, or is no link."""
        return None if home == compute else self._figure(self._measure_link, home, compute)

    def flops(self, compute: DeviceId) -> float | None:
        """Floating-point operations per second that `compute` achieves; None where that cannot be measured."""
        return self._figure(self._measure_flops, compute)

    def _figure(self, measure: Measure, *devices: DeviceId) -> float | None:
        """Measured once, also when that gives None; one measurement at a time, so that none disturbs another.

        Rounded to two significant digits, so that small differences between two runs do not change the plan.
        """
        if devices[-1].is_cpu:
            return None
        with self._measuring:
            if devices not in self._figures:
                figure = measure(*devices)
                self._figures[devices] = None if figure is None else float(f"{figure:.2g}")
            return self._figures[devices]

    def device(self, wanted: DeviceId) -> Device:
        """Raises `UnknownDevice` with the list of those that are here."""
        for device in self.devices:
            if device.id == wanted:
                return device
        raise self._unknown(str(wanted))

    def resolve(self, text: str) -> DeviceId:
        """The device that a workflow means by `cuda:1`, `gpu:1`, `mps`, `directml:0`, `cpu`.

        Raises `UnknownDevice` with the list of those that are here, `AllocationError` for what is no device at all.
        """
        found = device_here(DeviceId.parse(text), [device.id for device in self.devices])
        if found is None:
            raise self._unknown(text)
        return found

    def is_here(self, text: str) -> bool:
        """Whether `resolve` would return."""
        try:
            self.resolve(text)
        except AllocationError:
            return False
        return True

    def describe(self) -> str:
        """`cuda:0 (NVIDIA H200, 139.72 GiB), cpu (503.55 GiB)`."""
        parts = []
        for device in self.devices:
            about = [] if device.id.is_cpu else [device.name]
            about += [] if device.total is None else [format_bytes(device.total)]
            parts.append(f"{device.label} ({', '.join(about)})" if about else device.label)
        return ", ".join(parts)

    def _unknown(self, text: str) -> UnknownDevice:
        return UnknownDevice(
            f"{text} is not on this machine, which has {self.describe()}; choose one of them in the node"
        )
