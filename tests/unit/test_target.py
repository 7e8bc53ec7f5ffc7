"""What a node asks for, on a machine that may lack what it names."""

from __future__ import annotations

import logging

import pytest

from multigpu.devices import inventory
from multigpu.devices.backends import Device
from multigpu.devices.inventory import Inventory
from multigpu.errors import AllocationError, UnknownDevice
from multigpu.lifecycle.policy import Standing
from multigpu.plan import CPU, Auto, DeviceId, VirtualVram, parse_request
from multigpu.target import Resolver, Target

ZERO, ONE = DeviceId("cuda", 0), DeviceId("cuda", 1)


@pytest.fixture(autouse=True)
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Device(device, "A", 1 << 30) for device in (ZERO, ONE)]
    monkeypatch.setattr(inventory, "probe", lambda backend: found if backend.type == "cuda" else [])


def resolver(*, fall_back: bool = False) -> Resolver:
    return Resolver(Inventory(), fall_back)


def test_names_are_resolved_wherever_they_stand() -> None:
    target = resolver().target("gpu:1", parse_request("gpu:0,25%;cpu,*"), Standing.KEEP)
    assert target == Target(ONE, parse_request("cuda:0,25%;cpu,*"), Standing.KEEP)


@pytest.mark.parametrize("text", ["default", "", " Default "])
def test_a_compute_device_that_only_the_request_names(text: str) -> None:
    assert resolver().target(text, parse_request("#rocm:1;1;cpu")).compute == ONE
    assert resolver().target(text, Auto()).compute is None


def test_the_disk_holds_weights_and_does_not_compute() -> None:
    request = parse_request("cuda:0,25%;disk,*")
    assert resolver().target("default", request).request == request
    with pytest.raises(UnknownDevice, match="disk is not on this machine"):
        resolver().target("disk", Auto())
    with pytest.raises(AllocationError, match="it can only hold weights"):
        resolver().target("default", parse_request("#disk;1;cpu"))


def test_one_device_under_two_names_is_refused() -> None:
    with pytest.raises(AllocationError, match="rocm:1 and gpu:1 are the same device, cuda:1; write only one"):
        resolver().target("default", parse_request("rocm:1,8gb;gpu:1,4gb;cpu,*"))
    missing = parse_request("cuda:7,8gb;cuda:8,4gb;cpu,*")
    assert resolver(fall_back=True).target("default", missing).request.devices() == [CPU]


def test_what_is_not_here_is_refused_with_what_is() -> None:
    for compute, request in (("cuda:7", Auto()), ("default", parse_request("cuda:7,1gb;cpu,*"))):
        with pytest.raises(UnknownDevice, match="cuda:7 is not on this machine, which has cuda:0"):
            resolver().target(compute, request)


def test_a_device_of_another_machine_can_be_none_of_this_one(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnknownDevice, match="'ray://node-b/cuda:0' is a device of another machine.*MULTIGPU_RAY"):
        resolver().target("ray://node-b/cuda:0", Auto())
    request = VirtualVram(1, (DeviceId("cuda", 7),))
    assert resolver(fall_back=True).target("ray://node-b/cuda:0", request) == Target(None, VirtualVram(1, (CPU,)))
    assert "'ray://node-b/cuda:0' is a device of another machine" in caplog.text


def test_or_another_takes_its_place_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "multigpu"):
        target = resolver(fall_back=True).target("default", VirtualVram(1, (DeviceId("cuda", 7),)))
    assert target == Target(None, VirtualVram(1, (CPU,))) and len(caplog.records) == 1
    assert "not on this machine: cuda:7" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "multigpu"):
        assert resolver(fall_back=True).target("cuda:7", Auto()) == Target(None, Auto())
    assert "falling back to ComfyUI's default device" in caplog.text and len(caplog.records) == 1
