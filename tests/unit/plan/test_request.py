"""Requests: what the widgets of a node mean, and the same request on another machine."""

from __future__ import annotations

import pytest

from multigpu.errors import AllocationError, AllocationSyntaxError, InputError
from multigpu.plan import (
    CPU,
    Auto,
    DeviceId,
    Expert,
    Part,
    VirtualVram,
    format_request,
    parse_request,
    request_from_mode,
)

ZERO, ONE = DeviceId("cuda", 0), DeviceId("cuda", 1)
GIB = 1024**3


def test_each_mode_reads_its_own_widgets_only() -> None:
    assert request_from_mode("auto", -1.0, "nonsense", "nonsense") == Auto()
    assert request_from_mode("virtual VRAM", 1.5, "cuda:1,cpu", "nonsense") == VirtualVram(3 * GIB // 2, (ONE, CPU))
    assert request_from_mode("expert", -1.0, "nonsense", "cuda:0,25%;cpu,75%") == parse_request("cuda:0,25%;cpu,75%")


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="mode is 'fast'; it can be auto, virtual VRAM, expert"):
        request_from_mode("fast", 4.0, "cpu", "")
    with pytest.raises(AllocationSyntaxError, match="the allocation is empty"):
        request_from_mode("expert", 4.0, "cpu", "")


def test_the_compute_device_is_no_donor() -> None:
    both = VirtualVram(GIB, (ONE, CPU))
    assert both.fitted(ONE) == VirtualVram(GIB, (CPU,))
    assert both.fitted(ZERO) == both
    assert VirtualVram(GIB, (CPU,)).fitted(CPU) == VirtualVram(0, (CPU,))
    assert VirtualVram(GIB, (ONE,)).fitted(ONE) == VirtualVram(GIB, (ONE,)), "the planner refuses it with a sentence"
    assert Auto().fitted(ONE) == Auto()


def test_devices_are_renamed_wherever_they_stand() -> None:
    def name(device: DeviceId) -> DeviceId:
        return DeviceId("cuda", device.index) if device.type == "gpu" else device

    for text, meant in [
        ("gpu:0,25%;gpu:1,*", "cuda:0,25%;cuda:1,*"),
        ("#gpu:0;4;gpu:1,cpu", "#cuda:0;4;cuda:1,cpu"),
        ("gpu:1,1gb;cpu,*#gpu:0", "cuda:1,1gb;cpu,*#cuda:0"),
        ("0.5", "0.5"),
        ("auto,3gb", "auto,3gb"),
    ]:
        assert format_request(parse_request(text).renamed(name)) == meant


@pytest.mark.parametrize(
    "text", ["cuda:0,8gb;gpu:0,4gb;cpu,*", "gpu:0,20%;cuda:0,20%;cpu,60%", "#cuda:1;4;gpu:0,cuda:0"]
)
def test_one_device_under_two_names_is_refused(text: str) -> None:
    def name(device: DeviceId) -> DeviceId:
        return DeviceId("cuda", device.index) if device.type == "gpu" else device

    with pytest.raises(AllocationError, match=r"(cuda|gpu):0 and (cuda|gpu):0 are the same device, cuda:0; write only"):
        parse_request(text).renamed(name)


def test_devices_that_stand_in_for_missing_ones_may_be_the_same() -> None:
    given = parse_request("cuda:0,2gb;cuda:1,3gb;cpu,*").without([ONE], ZERO)
    assert given.renamed(lambda device: device) == given


def test_devices_of_a_request() -> None:
    assert Auto().devices() == []
    assert VirtualVram(GIB, (ONE, CPU), ZERO).devices() == [ZERO, ONE, CPU]
    assert parse_request("cuda:1,25%;cpu,*").devices() == [ONE, CPU]


def test_a_donor_that_is_missing_is_ram_instead() -> None:
    assert Auto().without([ONE], None) == Auto()
    assert VirtualVram(GIB, (ONE, CPU), ZERO).without([ONE], None) == VirtualVram(GIB, (CPU,), ZERO)
    assert VirtualVram(GIB, (CPU,), ONE).without([ONE], None) == VirtualVram(GIB, (CPU,))
    for text in ("cuda:0,25%;cuda:1,25%;cpu,50%", "cuda:0,2gb;cuda:1,3gb;cpu,*"):
        given = parse_request(text)
        changed = given.without([ONE], ZERO)
        assert isinstance(given, Expert) and isinstance(changed, Expert)
        assert [part.device for part in changed.parts] == [ZERO, CPU, CPU]
        assert [part.amount for part in changed.parts] == [part.amount for part in given.parts]


def test_the_share_of_a_compute_device_that_is_missing_is_that_of_its_stand_in() -> None:
    changed = parse_request("cuda:1,60%;cpu,*").without([ONE], ONE)
    assert isinstance(changed, Expert)
    assert changed.parts == (Part(None, 600_000_000), Part(CPU, None, True))


def test_fractions_of_a_memory_that_is_missing_say_nothing() -> None:
    assert parse_request("cuda:0,0.8;cuda:1,0.5").without([ONE], ZERO) == parse_request("cuda:0,0.8")
    assert parse_request("cuda:1,0.5;cpu,0.5").without([ONE, CPU], ZERO) == Auto()


def test_whether_weights_may_leave_the_compute_device() -> None:
    spreads = {"auto": True, "cuda:0,50%;cpu,*": True, "#cuda:0;4;cpu": True, "#cuda:0;0;cpu": False}
    assert {text: parse_request(text).spreads for text in spreads} == spreads
    expert = parse_request("cuda:1,50%;cpu,*")
    assert expert.fitted(ONE) == expert, "an allocation may name the compute device"
