"""The backends torch may have, and how each lists its devices. Nothing is cached here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import BackendUnavailable
from ..plan import DeviceId
from .ram import ram
from .torch_devices import DIRECTML, device_id


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of accelerator.

    `type` is what its devices are called. `package` is what has to be importable for torch to have it, when it is not a
    part of torch.
    """

    type: str
    package: str | None = None


BACKENDS = (
    Backend("cuda"),
    Backend("xpu"),
    Backend("npu", "torch_npu"),
    Backend("mlu", "torch_mlu"),
    Backend("mps"),
    Backend(DIRECTML, "torch_directml"),
)
"""AMD's and Iluvatar's (CoreX) cards are `cuda` to torch."""


def all_backends() -> tuple[Backend, ...]:
    """The table, and whatever else `torch.accelerator` knows in this process."""
    try:
        current = torch.accelerator.current_accelerator()
    except (AttributeError, RuntimeError):  # before torch 2.6; or a build for one accelerator finds another one
        current = None
    if current is None or any(backend.type == device_id(current).type for backend in BACKENDS):
        return BACKENDS
    return (*BACKENDS, Backend(current.type))


@dataclass(frozen=True, slots=True)
class Device:
    """A device as found: its name, and its memory in bytes (None where the backend does not tell)."""

    id: DeviceId
    name: str
    total: int | None


def probe(backend: Backend) -> list[Device]:
    """The devices of a backend; none if it is not there. Raises `BackendUnavailable` if it is there and broken."""
    try:
        module = _module(backend)
        if module is None:
            return []
        return [_device(backend, module, index) for index in range(int(module.device_count()))]
    except Exception as error:  # a vendor's module may raise anything
        raise BackendUnavailable(f"{backend.type} is installed but does not work: {error or type(error)}") from error


def in_use(device: DeviceId) -> bool:
    """Whether this process has a context on a device: it comes with the first use, and takes hundreds of megabytes.

    Torch tells it of `cuda` devices only; every other one counts as in use.
    """
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None) if device.type == "cuda" else None
    return ask is None or bool(ask(device.index))


def free_bytes(device: DeviceId) -> int | None:
    """Free memory of an accelerator as its driver tells it, None where it does not.

    That is a use of the device: who only looks asks `in_use` before.
    """
    module: Any = getattr(torch, device.type, None)
    if device.type == "mps" and module is not None:
        return _memory_of_a_mac(module)[1]
    ask = getattr(module, "mem_get_info", None)
    try:
        if ask is not None:
            return int(ask(device.index)[0])
    except RuntimeError:
        if device.type != "xpu":
            raise
    if device.type != "xpu":
        return None
    # Intel's integrated GPUs refuse to tell, and torch before 2.6 does not ask them: count what this process does not
    # hold, as the host does for Intel
    return int(module.get_device_properties(device.index).total_memory) - int(module.memory_reserved(device.index))


def identity(device: DeviceId) -> str:
    """An accelerator's model and memory, its serial number and slot where torch tells, its driver, and torch itself.

    Raises `BackendUnavailable` if that cannot be found out.
    """
    module: Any = getattr(torch, device.type, None)
    driver = getattr(torch._C, "_cuda_getDriverVersion", None) if device.type == "cuda" else None
    try:
        about = [getattr(module, name, None) for name in ("get_device_name", "get_device_properties")]
        told = [str(ask(device.index)) for ask in about if ask is not None]
        return " ".join([*told, str(driver()) if driver is not None else "", str(torch.__version__)])
    except Exception as error:  # a vendor's module may raise anything
        raise BackendUnavailable(f"{device} does not tell what it is: {error or type(error)}") from error


def _module(backend: Backend) -> Any:
    if backend.type == DIRECTML:
        return importlib.import_module("torch_directml") if find_spec("torch_directml") else None
    module = getattr(torch, backend.type, None)
    if module is None and backend.package and find_spec(backend.package):
        importlib.import_module(backend.package)
        module = getattr(torch, backend.type, None)
    return module if module is not None and _available(module) else None


def _available(module: Any) -> bool:
    ask = getattr(module, "is_available", None)
    if ask is None:  # torch.mps has none; its backend entry does
        ask = torch.backends.mps.is_available
    return bool(ask())


def _device(backend: Backend, module: Any, index: int) -> Device:
    device = DeviceId.parse(f"{backend.type}:{index}")
    return Device(device, _name(backend, module, index), _total(backend, module, index))


def _name(backend: Backend, module: Any, index: int) -> str:
    for attribute in ("get_device_name", "device_name"):
        ask = getattr(module, attribute, None)
        if ask is not None:
            return str(ask(index)).strip("\x00 ")
    return "Apple GPU" if backend.type == "mps" else backend.type


def _total(backend: Backend, module: Any, index: int) -> int | None:
    if backend.type == "mps":
        return _memory_of_a_mac(module)[0]
    properties = getattr(module, "get_device_properties", None)
    total = getattr(properties(index), "total_memory", None) if properties is not None else None
    if total is None:
        ask = getattr(module, "mem_get_info", None)
        total = ask(index)[1] if ask is not None else None
    return None if total is None else int(total)


def _memory_of_a_mac(module: Any) -> tuple[int, int]:
    """All and free bytes of `torch.mps`. Before torch 2.5 it does not tell: those of the RAM, as the host counts."""
    ask = getattr(module, "recommended_max_memory", None)
    if ask is None:
        return ram()
    total = int(ask())
    return total, total - int(module.driver_allocated_memory())
