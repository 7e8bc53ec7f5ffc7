"""What `multigpu doctor` says of the machine. (The comparison with a ComfyUI is tested on the real one.)"""

from __future__ import annotations

import pytest

from multigpu.cli import main
from multigpu.cli.doctor import devices
from multigpu.devices import inventory
from multigpu.devices.backends import Backend, Device
from multigpu.devices.inventory import Inventory
from multigpu.errors import BackendUnavailable
from multigpu.plan import DeviceId

FAST, SLOW = (Device(DeviceId("cuda", i), name, 24 * 2**30) for i, name in enumerate(("Fast", "Slow")))
LINKS = {"cuda:1 cuda:0": 19.6e9, "cpu cuda:0": 53.6e9, "cuda:0 cuda:1": 6.31e9}


def test_the_speeds_of_every_accelerator_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "probe", lambda backend: [FAST, SLOW] if backend.type == "cuda" else [])
    machine = Inventory(
        lambda home, compute: LINKS.get(f"{home} {compute}"),
        lambda compute: 657e12 if compute == FAST.id else 0.48e12,
    )
    lines = devices(machine).splitlines()
    assert lines[1].startswith("Devices       cuda:0 (Fast, 24.00 GiB), cuda:1 (Slow, 24.00 GiB), cpu (")
    assert lines[-2:] == [
        "  cuda:0      compute 657 TFLOP/s, from cuda:1 19.6 GB/s, from cpu 53.6 GB/s",
        "  cuda:1      compute 0.48 TFLOP/s, from cuda:0 6.31 GB/s, from cpu not measured",
    ]


def test_a_machine_without_accelerators_has_no_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: Backend) -> list[Device]:
        if backend.type == "cuda":
            raise BackendUnavailable("cuda is installed but does not work: no driver")
        return []

    monkeypatch.setattr(inventory, "probe", broken)
    lines = devices(Inventory()).splitlines()
    assert lines[1].startswith("Devices       cpu (")
    assert lines[2:] == ["  cuda is installed but does not work: no driver"]


def test_a_folder_that_cannot_be_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--comfyui", "x" * 355]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "is not a ComfyUI folder" in err
