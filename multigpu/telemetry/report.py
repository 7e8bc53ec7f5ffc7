"""A snapshot as text for people, several lines long: what the Memory Report node shows."""

from __future__ import annotations

import time

from ..units import format_bytes
from .snapshot import DeviceMemory, ModelMemory, Snapshot


def report(snapshot: Snapshot) -> str:
    """One line for RAM, one for each device, one for each loaded model, and how many models are held."""
    models = [_model(model) for model in snapshot.models]
    return "\n".join(
        [
            f"Memory at {time.strftime('%H:%M:%S', time.localtime(snapshot.time))}",
            f"RAM: {_use(snapshot.ram_total - snapshot.ram_used, snapshot.ram_total)}; "
            f"this process {format_bytes(snapshot.process_bytes)}",
            *(_device(device) for device in snapshot.devices),
            f"Loaded models: {len(models) or 'none'}",
            *models,
            f"Held for later prompts: {snapshot.anchors or 'none'}",
        ]
    )


def _use(free: int, total: int) -> str:
    return f"{format_bytes(total - free)} of {format_bytes(total)} used, {format_bytes(free)} free"


def _device(device: DeviceMemory) -> str:
    if not device.total:
        return f"{device.device}: its driver does not report memory"
    return f"{device.device}: {_use(device.free, device.total)}; {format_bytes(device.cached)} cached by the allocator"


def _model(model: ModelMemory) -> str:
    """What rests on the compute device comes first."""
    order = sorted(model.resting.items(), key=lambda item: (item[0] != model.device, item[0]))
    places = ", ".join(f"{format_bytes(count)} on {device}" for device, count in order) or "no weights"
    how = ", DynamicVRAM" if model.dynamic else ""
    return f"- {model.name} ({model.standing}{how}) computes on {model.device}: {places}"
