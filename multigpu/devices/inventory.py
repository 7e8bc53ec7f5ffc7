"""All devices of the machine and the links between them: probed and measured once, when first asked for.

What was measured may be kept for later processes (`figures.py`).
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

from ..errors import BackendUnavailable, UnknownDevice
from ..plan import CPU, DeviceId
from ..units import format_bytes
from .backends import Device, all_backends, free_bytes, probe
from .figures import Kept, NothingKept, figure_name
from .names import device_here

Measure = Callable[..., float | None]
"""Takes one or two devices; None where it cannot be measured. Never raises."""


def unmeasured(*devices: DeviceId) -> float | None:
    """Knows no figure."""
    return None


class Inventory:
    """The devices of this machine. Safe to use from any thread; a broken backend is reported and otherwise absent.

    `measure_link` takes a home and a compute device and gives bytes per second, `measure_flops` takes a compute device.
    Figures that are `kept` are not measured.
    """

    def __init__(
        self, measure_link: Measure = unmeasured, measure_flops: Measure = unmeasured, kept: Kept | None = None
    ) -> None:
        self._kept: Kept = NothingKept() if kept is None else kept
        self._measure_link = measure_link
        self._measure_flops = measure_flops
        self._found: tuple[tuple[Device, ...], tuple[str, ...]] | None = None
        self._figures: dict[tuple[DeviceId, ...], float | None] = {}
        self._looked_up: set[tuple[DeviceId, ...]] = set()
        """Figures of which it was found out whether an earlier process has measured them."""
        self._lock = threading.Lock()
        self._measuring = threading.Lock()

    def _probe(self) -> tuple[tuple[Device, ...], tuple[str, ...]]:
        """The devices and the problems: looked for once."""
        with self._lock:
            if self._found is None:
                devices: list[Device] = []
                problems: list[str] = []
                for backend in all_backends():
                    try:
                        devices += probe(backend)
                    except BackendUnavailable as problem:
                        problems.append(str(problem))
                name = platform.processor() or platform.machine() or "CPU"
                cpu = Device(CPU, name, psutil.virtual_memory().total)
                self._found = (*devices, cpu), tuple(problems)
            return self._found

    @property
    def devices(self) -> tuple[Device, ...]:
        """Accelerators in order, then the CPU."""
        return self._probe()[0]

    @property
    def accelerators(self) -> tuple[Device, ...]:
        return self.devices[:-1]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each backend that is installed but broken."""
        return self._probe()[1]

    def labels(self) -> list[str]:
        """The names by which workflows choose a device: accelerators in order, then `cpu`."""
        return [str(device.id) for device in self.devices]

    def free(self, device: DeviceId) -> int | None:
        """Free bytes now, as driver or operating system tell; None where they do not."""
        return int(psutil.virtual_memory().available) if device.is_cpu else free_bytes(device)

    def bandwidth(self, home: DeviceId, compute: DeviceId) -> float | None:
        """Bytes per second from `home` to `compute`; None where that cannot be measured, or is no link."""
        return None if home == compute else self._figure(self._measure_link, home, compute)

    def flops(self, compute: DeviceId) -> float | None:
        """Floating-point operations per second that `compute` achieves; None where that cannot be measured."""
        return self._figure(self._measure_flops, compute)

    def known(self, *devices: DeviceId) -> float | None:
        """The figure of a device or link if it was measured, now or by an earlier process; None if it was not.

        Starts no measurement, and does not wait for one that is under way.
        """
        if devices not in self._figures and devices not in self._looked_up and self._measuring.acquire(blocking=False):
            try:
                self._looked_up.add(devices)
                with suppress(BackendUnavailable):
                    kept = self._kept.get(figure_name(devices))
                    self._figures |= {devices: kept} if kept is not None else {}
            finally:
                self._measuring.release()
        return self._figures.get(devices)

    def links(self) -> dict[tuple[DeviceId, DeviceId], float]:
        """Home and compute device -> bytes per second, for the links that are `known`."""
        devices = [device.id for device in self.devices]
        pairs = [(home, compute) for compute in devices[:-1] for home in devices if home != compute]
        return {pair: speed for pair in pairs if (speed := self.known(*pair)) is not None}

    def _figure(self, measure: Measure, *devices: DeviceId) -> float | None:
        """Measured once, also when that gives None; one measurement at a time, so that none disturbs another."""
        if devices[-1].is_cpu:
            return None
        with self._measuring:
            if devices not in self._figures:
                self._figures[devices] = self._kept_or_measured(measure, devices)
            return self._figures[devices]

    def _kept_or_measured(self, measure: Measure, devices: tuple[DeviceId, ...]) -> float | None:
        """Rounded to three significant digits: the rest is noise."""
        try:
            name, kept = figure_name(devices), self._kept
        except BackendUnavailable:
            name, kept = "", NothingKept()
        figure = kept.get(name)
        if figure is None:
            measured = measure(*devices)
            if measured is None:
                return None
            figure = float(f"{measured:.3g}")
            kept.put(name, figure)
        return figure

    def resolve(self, text: str) -> DeviceId:
        """The device that a workflow means by `cuda:1`, `gpu:1`, `mps`, `directml:0`, `cpu`.

        Raises `UnknownDevice` with the list of those that are here, `AllocationError` for what is no device at all.
        """
        found = self.find(DeviceId.parse(text))
        if found is None:
            raise UnknownDevice(
                f"{text} is not on this machine, which has {self.describe()}; choose one of them in the node"
            )
        return found

    def find(self, named: DeviceId) -> DeviceId | None:
        """As `resolve`, for a name that is read already; None for a device that is not here."""
        return device_here(named, [device.id for device in self.devices])

    def describe(self) -> str:
        """`cuda:0 (NVIDIA H200, 139.72 GiB), cpu (503.55 GiB)`."""
        parts = []
        for device in self.devices:
            about = [] if device.id.is_cpu else [device.name]
            about += [] if device.total is None else [format_bytes(device.total)]
            parts.append(f"{device.id} ({', '.join(about)})" if about else str(device.id))
        return ", ".join(parts)
