"""Put simulated devices in torch's place for one of `KINDS`. Process-wide and one-way."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import platform
import sys
import types
from typing import Any

import torch

from .builder import load
from .devmod import DeviceApi
from .sixteen_bits import compute_in_32_bits
from .world import World

GiB = 1024**3
KINDS = ("cuda", "xpu", "npu", "mps", "privateuseone")
PRETENDED_CUDA = "12.8"
CPU_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""The CPU kernels behind the simulation do without matrix tiles (AMX), which some sandboxes announce and then trap."""
HOST_FLAGS = ("--use-pytorch-cross-attention", "--disable-cuda-malloc")
"""For ComfyUI: the attention that is the same on the CPU; and torch's own allocator, which is what is simulated."""

_installed: list[World] = []  # at most one: torch can be changed once per process


def install(kind: str, count: int = 3, capacity: int | list[int] = GiB) -> World:
    """Simulate `count` devices of `kind` in this process; `capacity` in bytes, one for all or one each.

    Must run before anything asks torch about devices (so before ComfyUI is imported). Real CUDA devices are hidden from
    this process. Raises NoCompiler where there is no compiler, RuntimeError where devices are in use already.
    """
    if kind not in KINDS:
        raise ValueError(f"cannot simulate {kind!r}: use one of {', '.join(KINDS)}")
    capacities = [capacity] * count if isinstance(capacity, int) else list(capacity)
    if kind == "mps" and count != 1:
        raise ValueError(f"{count} mps devices: a Mac has one; write mps:1")
    if len(capacities) != count:
        raise ValueError(f"{len(capacities)} capacities for {count} devices: give one number, or one for each device")
    if _installed:
        raise RuntimeError(f"this process already simulates {_installed[0].kind}: start another process")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # real devices stay out of it
    if torch.cuda.is_available():
        raise RuntimeError("this process has used real CUDA devices already: start another process")
    for name, value in CPU_LIMIT.items():
        os.environ.setdefault(name, value)
    installers = {
        "cuda": _install_cuda, "xpu": _install_xpu, "npu": _install_npu, "mps": _install_mps,
        "privateuseone": _install_directml,
    }  # fmt: skip
    native = installers[kind]()
    native.set_device_count(count)
    compute_in_32_bits()
    _installed.append(World(native, kind, capacities))
    return _installed[0]


def current() -> World:
    """The world that `install` made in this process."""
    if not _installed:
        raise RuntimeError("no devices are simulated in this process: call simdev.install first")
    return _installed[0]


def install_from_text(text: str) -> World:
    """`cuda`, `cuda:3`, `cuda:3:6g` or `cuda:2:6g,512m`: kind, number of devices, memory of each (m or g)."""
    kind, *rest = text.split(":")
    try:
        count = int(rest[0]) if rest else 3
        sizes = [_size(part) for part in rest[1].split(",")] if len(rest) > 1 else [GiB]
    except ValueError as error:
        raise ValueError(f"cannot read {text!r}: {error}; write for example cuda:3:6g or npu:2:6g,512m") from None
    return install(kind, count, sizes[0] if len(sizes) == 1 else sizes)


def _size(text: str) -> int:
    units = {"m": 1024**2, "g": GiB}
    if text[-1:].lower() not in units:
        raise ValueError(f"size {text!r} must end in m or g")
    return int(float(text[:-1]) * units[text[-1].lower()])


def _install_npu() -> Any:
    native = load("npu")
    native.install_hooks()
    torch.version.cuda = None  # as on a machine with NPUs: ComfyUI takes a CUDA build of torch for NVIDIA's
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    module.__dict__.update(DeviceApi(native, "npu").namespace())
    torch._register_device_module("npu", module)
    sys.modules["torch.npu"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    companion = types.ModuleType("torch_npu")  # programs look for the package beside the device
    companion.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    companion.__dict__["__version__"] = torch.__version__
    sys.modules["torch_npu"] = companion
    return native


def _install_cuda() -> Any:
    native = _load_after_dynamo("cuda")
    torch.version.cuda = torch.version.cuda or PRETENDED_CUDA  # a CUDA build's own: other packages compare it
    namespace = DeviceApi(native, "cuda").namespace()
    namespace["cudart"] = lambda: _CudaRuntime(native)
    torch._C._cuda_hasPrimaryContext = native.has_context
    _replace_functions("cuda", namespace)
    _add_storage(native, "cuda")
    return native


def _install_xpu() -> Any:
    """torch.xpu gets no function that it does not have; its own capability is a dictionary of the properties."""
    native = _load_after_dynamo("xpu")
    torch.version.cuda = None
    whole = DeviceApi(native, "xpu").namespace()
    names = whole.keys() & vars(torch.xpu).keys() - {"get_device_capability"}
    _replace_functions("xpu", {name: whole[name] for name in names})
    _add_storage(native, "xpu")
    return native


def _load_after_dynamo(kind: str) -> Any:
    for name in ("torch._dynamo", "torch._inductor.utils"):  # they ask torch._C for devices while they are imported
        importlib.import_module(name)
    native = load(kind)
    native.install_hooks()
    return native


def _replace_functions(kind: str, namespace: dict[str, Any]) -> None:
    """In the module torch.<kind>, and in its parts, which have some of them too."""
    for name, value in namespace.items():
        setattr(getattr(torch, kind), name, value)
    for part in ("memory", "random", "streams"):
        target = importlib.import_module(f"torch.{kind}.{part}")
        for name in namespace.keys() & vars(target).keys():
            setattr(target, name, namespace[name])


def _install_mps() -> Any:
    """Without streams, events and a current device, which torch.mps does not have either."""
    native = load("mps")
    native.install_hooks()
    torch.version.cuda = None
    torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True
    platform.mac_ver = lambda *_: ("15.0", ("", "", ""), "arm64")  # ComfyUI chooses by it where there is MPS
    whole = DeviceApi(native, "mps").namespace()
    namespace = {name: whole[name] for name in ("manual_seed", "get_rng_state", "set_rng_state", "empty_cache")}
    namespace |= {
        "device_count": native.device_count,
        "synchronize": lambda: native.synchronize(0),
        "current_allocated_memory": lambda: native.memory(0)["allocated"],
        "driver_allocated_memory": lambda: native.memory(0)["reserved"],
        "recommended_max_memory": lambda: native.memory(0)["capacity"],
    }
    for name, value in namespace.items():
        setattr(torch.mps, name, value)
    _add_storage(native, "mps")
    return native


def _install_directml() -> Any:
    """As DirectML: torch has no module for `privateuseone`, and the package tells only how many devices there are."""
    native = load("privateuseone")
    native.install_hooks()
    torch.version.cuda = None
    package = types.ModuleType("torch_directml")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_directml", None)
    package.__dict__.update(
        is_available=lambda: True,
        device_count=native.device_count,
        device_name=lambda index: f"Simulated adapter {max(index, 0)}",
        device=lambda index=0: torch.device("privateuseone", index),
    )
    sys.modules["torch_directml"] = package
    sys.modules["torch.privateuseone"] = types.ModuleType(
        "torch.privateuseone"
    )  # torch imports it for its own purposes
    return native


class _CudaRuntime:
    """The functions of the CUDA runtime that torch.cuda.cudart() is used for here; they return its error numbers."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        error = int(self._native.register_host(pointer, size))
        if error:
            self._native.leave_error(error)
        return error

    def cudaHostUnregister(self, pointer: int) -> int:
        return int(self._native.unregister_host(pointer))


def _add_storage(native: Any, kind: str) -> None:
    """Creating and resizing storages is compiled out of builds for other devices, and needs a driver in CUDA builds."""
    storage: Any = torch.UntypedStorage
    plain_new, plain_resize = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        sized = len(args) == 1 and isinstance(args[0], int)
        if sized and device is not None and torch.device(device).type == kind:
            return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return plain_new(cls, *args, **kwargs)

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != kind:
            return plain_resize(self, size)
        native.storage_resize(self, size)
        return self

    storage.__new__ = new
    storage.resize_ = resize_
