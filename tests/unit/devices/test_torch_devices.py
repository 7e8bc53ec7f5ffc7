"""Devices as torch, the host and we name them. torch makes device objects of every type, also where there is none."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from multigpu.devices import backends
from multigpu.devices.backends import Backend, free_bytes, probe
from multigpu.devices.caches import all_reserved, clear_caches, log_given_back
from multigpu.devices.torch_devices import current_device, device_id, device_of, torch_device
from multigpu.plan import CPU, DeviceId
from multigpu.stream.lanes import SynchronousLane, device_module, open_lane

MPS, DIRECTML = DeviceId("mps", None), DeviceId("directml", 0)
GIB = 1024**3


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cpu", CPU),
        ("mps", MPS),
        ("mps:0", MPS),
        ("privateuseone", DIRECTML),
        ("privateuseone:0", DIRECTML),
        ("cuda:1", DeviceId("cuda", 1)),
    ],
)
def test_torch_devices_have_one_name(name: str, device: DeviceId) -> None:
    assert device_id(torch.device(name)) == device
    assert device_id(torch_device(device)) == device


def test_the_device_of_a_mac_is_the_hosts() -> None:
    """The host compares with `torch.device("mps")`, to which `torch.device("mps:0")` is not equal."""
    assert torch_device(DeviceId.parse("mps:0")) == torch.device("mps") != torch.device("mps:0")
    assert device_of(SimpleNamespace(device=torch.device("mps:0"))) == torch.device("mps")  # type: ignore[arg-type]
    assert device_of(torch.empty(0)) == torch.device("cpu")
    assert device_of(torch.empty(0, device="meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["cpu", "mps", "privateuseone:0"])
def test_backends_without_streams_or_a_current_device_work_synchronously(name: str) -> None:
    device = torch.device(name)
    with current_device(device):
        assert device_module(device) is None
    assert isinstance(open_lane(torch.device("cpu"), device), SynchronousLane)
    assert isinstance(open_lane(device, torch.device("cpu")), SynchronousLane)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_backends_with_streams_use_them(kind: str) -> None:
    assert device_module(torch.device(kind, 0)) is getattr(torch, kind)


@pytest.mark.parametrize("told", [True, False], ids=["told", "torch before 2.5"])
def test_a_mac_is_found_with_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    """The host counts the RAM of a Mac as the memory of its GPU, and so do we where torch does not tell."""
    emptied: list[str] = []
    module = SimpleNamespace(
        device_count=lambda: 1,
        recommended_max_memory=lambda: 12 * GIB,
        driver_allocated_memory=lambda: GIB if emptied else 3 * GIB,
        current_allocated_memory=lambda: GIB,
        empty_cache=lambda: emptied.append("mps"),
    )
    if not told:
        del module.recommended_max_memory
    monkeypatch.setattr(torch, "mps", module)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(backends, "ram", lambda: (16 * GIB, 5 * GIB))
    (device,) = probe(Backend("mps"))
    assert (device.id, device.total) == (MPS, 12 * GIB if told else 16 * GIB)
    assert free_bytes(MPS) == (9 * GIB if told else 5 * GIB)
    before = all_reserved([MPS])
    clear_caches(before)
    caplog.set_level(logging.INFO, logger="multigpu")
    assert log_given_back("free 1", before) == {MPS: 2 * GIB} and emptied == ["mps"]
    assert caplog.messages == [
        "[MultiGPU] free 1: memory of mps: 3.00 GiB reserved before, 1.00 GiB after, 2.00 GiB given back"
    ]


def test_a_cache_that_does_not_tell_its_size_is_emptied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emptied: list[str] = []
    module = SimpleNamespace(
        device=lambda index: nullcontext(), synchronize=lambda: None, empty_cache=lambda: emptied.append("xpu")
    )
    monkeypatch.setattr(torch, "xpu", module)
    xpu = DeviceId("xpu", 0)
    before = all_reserved([xpu])
    clear_caches(before)
    caplog.set_level(logging.INFO, logger="multigpu")
    assert log_given_back("free 1", before) == {} and emptied == ["xpu"]
    (line,) = caplog.messages
    assert line == "[MultiGPU] free 1: cache of xpu:0: emptied; its driver does not tell how much it holds"


def test_directml_is_found_by_its_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    package = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, device_name=lambda index: f"Card {index}"
    )
    monkeypatch.setattr(backends, "find_spec", lambda name: name == "torch_directml")
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: package)
    found = probe(Backend("directml", "torch_directml"))
    assert [(device.id, device.name) for device in found] == [
        (DIRECTML, "Card 0"),
        (DeviceId("directml", 1), "Card 1"),
    ]
    assert found[0].total is None and free_bytes(DIRECTML) is None
    before = all_reserved([DIRECTML])
    clear_caches(before)
    caplog.set_level(logging.INFO, logger="multigpu")
    assert log_given_back("free 1", before) == {}
    assert caplog.messages == ["[MultiGPU] free 1: cache of directml:0: cannot be emptied"]


@pytest.mark.parametrize("told", [True, False], ids=["refused", "torch before 2.6"])
def test_an_intel_gpu_that_does_not_tell_its_free_memory(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """torch raises for many integrated ones. Any other backend that raises is broken, and is not taken for empty."""

    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("The device (Intel(R) Graphics) doesn't support querying the available free memory.")

    module = SimpleNamespace(
        mem_get_info=refuse,
        get_device_properties=lambda index: SimpleNamespace(total_memory=12 * GIB),
        memory_reserved=lambda index: index * GIB,
    )
    if not told:
        del module.mem_get_info
    for kind in ("xpu", "cuda"):
        monkeypatch.setattr(torch, kind, module)
    assert free_bytes(DeviceId("xpu", 1)) == 11 * GIB
    with pytest.raises(RuntimeError, match="free memory") if told else nullcontext():
        assert free_bytes(DeviceId("cuda", 1)) is None


PLUG_IN = """
import torch
from types import SimpleNamespace
from multigpu.devices.backends import BACKENDS, free_bytes, probe
from multigpu.devices.torch_devices import current_device, device_id, torch_device

class Properties(SimpleNamespace):
    total_memory = 16 << 30

now = [0]
module = SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"MLU {index}",
    get_device_properties=lambda index: Properties(), mem_get_info=lambda index: (9 << 30, 16 << 30),
    current_device=lambda: now[0], set_device=lambda device: now.__setitem__(0, torch.device(device).index),
)
torch.utils.rename_privateuse1_backend("mlu")
torch._register_device_module("mlu", module)
(backend,) = (backend for backend in BACKENDS if backend.type == "mlu")
for device in probe(backend):
    where = torch_device(device.id)
    assert where == torch.device("mlu", device.id.index) and device_id(where) == device.id
    with current_device(where):
        assert device_id(torch.device("mlu")) == device.id
    print(device.id, device.name, device.total >> 30, free_bytes(device.id) >> 30)
"""


def test_cambricons_cards_are_found_as_a_plug_in_registers_them() -> None:
    """torch's own devices of that name, which exist once in a process; the vendor's package is stood in for."""
    command, root = [sys.executable, "-c", PLUG_IN], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["mlu:0 MLU 0 16 9", "mlu:1 MLU 1 16 9"], done.stderr


def test_torch_before_2_6_has_no_accelerator_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "accelerator", raising=False)
    assert backends.all_backends() == backends.BACKENDS
