"""Bytes: of the models' storages by device, of the process, and of the files it maps and reads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes of the storages behind these tensors, each storage once, whatever the views into it."""
    storages: dict[tuple[str, int], int] = {}
    for tensor in _plain(tensors):
        storage = tensor.untyped_storage()
        storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    totals: dict[str, int] = {}
    for (device, _), count in storages.items():
        totals[device] = totals.get(device, 0) + count
    return totals


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that have a storage: quantised ones are taken apart into their data and scales."""
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain(getattr(tensor, name) for name in names)
        elif tensor.device.type != "meta" and tensor.layout == torch.strided:
            yield tensor


def of_module(module: torch.nn.Module) -> dict[str, int]:
    return bytes_by_device([*module.parameters(), *module.buffers()])


def of_everything() -> dict[str, int]:
    """Bytes of every tensor that Python can reach."""
    return bytes_by_device([found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)])


def of_process() -> dict[str, Any]:
    """The process as the operating system sees it. What the system does not tell is missing from the answer."""
    facts: dict[str, Any] = {
        "rss": psutil.Process().memory_info().rss,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "gc_counts": list(gc.get_count()),
    }
    if sys.platform == "linux":
        rollup = _numbers(Path("/proc/self/smaps_rollup"))
        facts["anonymous"] = rollup["Anonymous"] * 1024
        facts["io"] = {
            key: value for key, value in _numbers(Path("/proc/self/io")).items() if key in ("rchar", "read_bytes")
        }
        facts["mapped_models"] = _mapped_models()
    return facts


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {key: int(value.split()[0]) for key, _, value in pairs if value.split() and value.split()[0].isdigit()}


def _mapped_models() -> dict[str, int]:
    """Resident bytes of each model file that is mapped into the process."""
    resident: dict[str, int] = {}
    current: str | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "-" in fields[0] and ":" not in fields[0]:
            path = fields[5] if len(fields) > 5 else ""
            current = path if path.endswith((".safetensors", ".pt", ".gguf")) else None
        elif current and fields[0] == "Rss:":
            resident[current] = resident.get(current, 0) + int(fields[1]) * 1024
    return resident
