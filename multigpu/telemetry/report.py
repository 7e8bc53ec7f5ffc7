"""A snapshot as text for people, several lines long: what the Memory Report node shows."""

from __future__ import annotations

import time

from ..plan import explain
from ..units import format_bytes
from .snapshot import DeviceMemory, ModelMemory, Snapshot


def report(snapshot: Snapshot) -> str:
    """One line for RAM, one for each device, one for each loaded model, and how many models are held."""
    models = [_model(model) for model in snapshot.loaded]
    return "\n".join(
        [
            f"Memory at {time.strftime('%H:%M:%S', time.localtime(snapshot.time))}",
            f"RAM: {_use(snapshot.ram)}; this process {format_bytes(snapshot.process_bytes)}",
            *(_device(device) for device in snapshot.devices[:-1]),
            f"Loaded models: {len(models) or 'none'}",
            *models,
            f"Held for later prompts: {snapshot.held or 'none'}",
        ]
    )


def _use(device: DeviceMemory) -> str:
    if device.used is None or device.free is None:
        return "its driver does not report memory"
    return f"{format_bytes(device.used)} of {format_bytes(device.total)} used, {format_bytes(device.free)} free"


def _device(device: DeviceMemory) -> str:
    if not device.in_use:
        return f"{device.device}: {format_bytes(device.total)}, not in use by ComfyUI"
    cached = f"; {format_bytes(device.cached)} cached by the allocator" if device.used is not None else ""
    return f"{device.device}: {_use(device)}{cached}"


def _model(model: ModelMemory) -> str:
    """What rests on the compute device comes first."""
    order = sorted(model.resting.items(), key=lambda item: (item[0] != model.device, item[0]))
    places = ", ".join(f"{format_bytes(count)} on {device}" for device, count in order) or "no weights"
    how = ", DynamicVRAM" if model.dynamic else ""
    copied = f"; {format_bytes(model.retained)} of it are on {model.device}, too" if model.retained else ""
    ahead = f"; {explain.computed_ahead(model.hoisted)}" if model.hoisted else ""
    step = f"; {explain.step(model.forecast)}" if model.forecast is not None else ""
    return f"- {model.name} ({model.standing}{how}) computes on {model.device}: {places}{copied}{ahead}{step}"
