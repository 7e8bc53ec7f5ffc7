"""Devices, blocks, budgets and plans as data."""

from __future__ import annotations

import json

import pytest

from multigpu.errors import AllocationError, InputError, UnknownDevice
from multigpu.plan import CPU, DISK, Block, DeviceBudget, DeviceId, Forecast, Placement, Plan, Reason

from .shapes import GPU0, GPU1


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:0", DeviceId("cuda", 0)),
        ("cuda", DeviceId("cuda", 0)),
        (" CUDA:10 ", DeviceId("cuda", 10)),
        ("cpu", CPU),
        ("cpu:0", CPU),
        ("mps", DeviceId("mps", None)),
        ("MPS:0", DeviceId("mps", None)),
        ("disk", DISK),
        ("Disk:0", DISK),
        *((f"{kind}:1", DeviceId(kind, 1)) for kind in ("xpu", "npu", "mlu", "directml", "corex", "privateuseone")),
    ],
)
def test_devices_parse(text: str, device: DeviceId) -> None:
    assert DeviceId.parse(text) == device
    assert DeviceId.parse(str(device)) == device


@pytest.mark.parametrize(
    "text",
    ["", "cuda0", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "mps:1", "disk:1", "0", "cuda:0:0", "cuda:99999", "größe"],
)
def test_what_is_no_device_is_refused_by_name(text: str) -> None:
    with pytest.raises(AllocationError, match="is not a device") as caught:
        DeviceId.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["ray://node-b/cuda:0", " RAY://node-b/cpu", "ray://"])
def test_a_device_of_another_machine_is_told_where_it_can_be(text: str) -> None:
    with pytest.raises(UnknownDevice, match="only be the compute device of Place Model.*MULTIGPU_RAY.*cannot rest"):
        DeviceId.parse(text)


@pytest.mark.parametrize(("kind", "index"), [("cpu", 0), ("mps", 0), ("disk", 0), ("cuda", None)])
def test_only_cpu_mps_and_disk_have_no_index(kind: str, index: int | None) -> None:
    with pytest.raises(AllocationError, match="index"):
        DeviceId(kind, index)


def test_devices_sort_by_number_not_by_text() -> None:
    names = ["cuda:10", "cuda:2", "cpu", "xpu:0"]
    assert [str(device) for device in sorted(map(DeviceId.parse, names))] == ["cpu", "cuda:2", "cuda:10", "xpu:0"]
    assert CPU <= GPU0 < GPU1
    assert CPU.is_cpu and not GPU0.is_cpu and not DeviceId("mps", None).is_cpu and not DISK.is_cpu
    assert DISK.is_disk and not CPU.is_disk


@pytest.mark.parametrize("compute", [-1.0, float("nan"), float("inf")])
def test_a_block_needs_a_real_time(compute: float) -> None:
    with pytest.raises(InputError, match="seconds"):
        Block("a", 1, compute=compute)


def test_a_block_cannot_be_negative() -> None:
    with pytest.raises(InputError, match="-1 bytes"):
        Block("a", -1)


def test_a_budget_has_to_make_sense() -> None:
    with pytest.raises(InputError, match="between 0 and total"):
        DeviceBudget(CPU, 10, 11)
    with pytest.raises(InputError, match="positive speed"):
        DeviceBudget(CPU, 10, 10, 0.0)


def test_an_unknown_link_has_the_documented_speed() -> None:
    assert DeviceBudget(CPU, 1, 1).link_speed == 25e9
    assert DeviceBudget(GPU1, 1, 1).link_speed == 12e9
    assert DeviceBudget(GPU1, 1, 1, 5e9).link_speed == 5e9
    assert DeviceBudget(DISK, 1, 1).link_speed == 2e9


def example(forecast: Forecast | None = None) -> Plan:
    """a and d stay; b and c rest elsewhere, d runs where it rests."""
    return Plan(
        GPU0,
        (
            Placement("a", 10, GPU0, GPU0, Reason.RESIDENT),
            Placement("b", 20, CPU, GPU0, Reason.STREAMED),
            Placement("c", 30, GPU1, GPU0, Reason.STREAMED),
            Placement("d", 40, GPU1, GPU1, Reason.RESIDENT),
        ),
        ring_bytes=30,
        forecast=forecast,
    )


def test_a_plan_answers_by_block_and_by_device() -> None:
    plan = example()
    assert plan["b"].home == CPU
    assert plan["c"].bytes == 30
    assert "a" in plan and "z" not in plan
    assert plan.bytes_on(GPU1) == 70
    assert plan.bytes_on(DeviceId("xpu", 0)) == 0
    assert list(plan.bytes_by_home().items()) == [(GPU0, 10), (CPU, 20), (GPU1, 70)]
    assert plan.total_bytes == 100
    assert [placement.block for placement in plan.streamed] == ["b", "c"]
    with pytest.raises(KeyError):
        plan["z"]


def test_the_bytes_by_home_are_a_copy() -> None:
    plan = example()
    plan.bytes_by_home().clear()
    assert plan.bytes_on(GPU0) == 10


def test_plans_are_equal_by_content_and_the_forecast_does_not_count() -> None:
    forecast = Forecast(2.0, 1.0, ((CPU, 0.5),))
    assert example() == example(forecast)
    assert hash(example()) == hash(example(forecast))
    assert example() != Plan(GPU0, example().placements, ring_bytes=31)
    assert len({example(), example(forecast)}) == 1
    assert forecast.slowdown == 2.0
    assert Forecast(0.0, 0.0, ()).slowdown == 1.0


def test_a_plan_as_plain_data() -> None:
    data = json.loads(json.dumps(example(Forecast(2.0, 1.0, ((CPU, 0.5), (GPU1, 0.25)))).to_json()))
    assert data["version"] == 1 and data["compute"] == "cuda:0"
    assert data["bytes_by_home"] == {"cuda:0": 10, "cpu": 20, "cuda:1": 70}
    assert data["forecast"] == {"step": 2.0, "compute": 1.0, "links": {"cpu": 0.5, "cuda:1": 0.25}, "measured": False}
    assert example().to_json()["forecast"] is None


def test_a_block_is_planned_once() -> None:
    twice = Placement("a", 10, GPU0, GPU0, Reason.RESIDENT)
    with pytest.raises(InputError, match="'a' is in the plan twice"):
        Plan(GPU0, (twice, twice))
