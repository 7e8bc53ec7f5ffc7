"""What widgets say, translated: every word that means something, and a sentence for every one that does not."""

from __future__ import annotations

import pytest

from multigpu.choice import devices_of, fitted, read_keep, read_request, renamed, without
from multigpu.errors import AllocationSyntaxError, InputError
from multigpu.plan import CPU, Auto, DeviceId, Expert, Part, VirtualVram, format_request, parse_request

ZERO, ONE = DeviceId("cuda", 0), DeviceId("cuda", 1)
GIB = 1024**3


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("default", "default"),
        ("keep", "keep"),
        ("eject", "eject"),
        (True, "keep"),
        (False, "eject"),
        ("true", "keep"),
        ("False", "eject"),
        (" Keep ", "keep"),
    ],
)
def test_keep_loaded(said: object, meant: str) -> None:
    assert read_keep(said) == meant


@pytest.mark.parametrize("said", ["perhaps", "", None, 1, 0.0, []])
def test_what_keep_loaded_does_not_know(said: object) -> None:
    with pytest.raises(InputError, match="keep_loaded is .*; it can be default, keep or eject"):
        read_keep(said)


def test_each_mode_reads_its_own_widgets_only() -> None:
    assert read_request("auto", -1.0, "nonsense", "nonsense") == Auto()
    assert read_request("virtual VRAM", 1.5, "cuda:1,cpu", "nonsense") == VirtualVram(3 * GIB // 2, (ONE, CPU))
    assert read_request("expert", -1.0, "nonsense", "cuda:0,25%;cpu,75%") == parse_request("cuda:0,25%;cpu,75%")


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="mode is 'fast'; it can be auto, virtual VRAM, expert"):
        read_request("fast", 4.0, "cpu", "")
    with pytest.raises(AllocationSyntaxError, match="the allocation is empty"):
        read_request("expert", 4.0, "cpu", "")


def test_the_compute_device_is_no_donor() -> None:
    both = VirtualVram(GIB, (ONE, CPU))
    assert fitted(both, ONE) == VirtualVram(GIB, (CPU,))
    assert fitted(both, ZERO) == both
    assert fitted(VirtualVram(GIB, (CPU,)), CPU) == VirtualVram(0, (CPU,))
    assert fitted(VirtualVram(GIB, (ONE,)), ONE) == VirtualVram(GIB, (ONE,)), "the planner refuses it with a sentence"
    assert fitted(Auto(), ONE) == Auto()


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
        assert format_request(renamed(parse_request(text), name)) == meant


def test_devices_of_a_request() -> None:
    assert devices_of(Auto()) == []
    assert devices_of(VirtualVram(GIB, (ONE, CPU), ZERO)) == [ZERO, ONE, CPU]
    assert devices_of(parse_request("cuda:1,25%;cpu,*")) == [ONE, CPU]


def test_a_donor_that_is_missing_is_ram_instead() -> None:
    assert without(Auto(), [ONE], None) == Auto()
    assert without(VirtualVram(GIB, (ONE, CPU), ZERO), [ONE], None) == VirtualVram(GIB, (CPU,), ZERO)
    assert without(VirtualVram(GIB, (CPU,), ONE), [ONE], None) == VirtualVram(GIB, (CPU,))
    for text in ("cuda:0,25%;cuda:1,25%;cpu,50%", "cuda:0,2gb;cuda:1,3gb;cpu,*"):
        given = parse_request(text)
        changed = without(given, [ONE], ZERO)
        assert isinstance(given, Expert) and isinstance(changed, Expert)
        assert [part.device for part in changed.parts] == [ZERO, CPU, CPU]
        assert [part.amount for part in changed.parts] == [part.amount for part in given.parts]


def test_the_share_of_a_compute_device_that_is_missing_is_that_of_its_stand_in() -> None:
    changed = without(parse_request("cuda:1,60%;cpu,*"), [ONE], ONE)
    assert isinstance(changed, Expert)
    assert changed.parts == (Part(None, 600_000_000), Part(CPU, None, True))


def test_fractions_of_a_memory_that_is_missing_say_nothing() -> None:
    assert without(parse_request("cuda:0,0.8;cuda:1,0.5"), [ONE], ZERO) == parse_request("cuda:0,0.8")
    assert without(parse_request("cuda:1,0.5;cpu,0.5"), [ONE, CPU], ZERO) == Auto()
