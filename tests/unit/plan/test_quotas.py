"""Quotas: bytes per device for each kind of request, computed by hand.

The model of the tables has 100 bytes, of which 4 cannot leave; its largest block has 10. cuda:0 computes and has 80
bytes of memory, cuda:1 has 40, the cpu has 1000.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multigpu.errors import AllocationError, DoesNotFit, UnknownDevice
from multigpu.plan import (
    CPU,
    Auto,
    DeviceBudget,
    DeviceId,
    Expert,
    Mode,
    Part,
    VirtualVram,
    default_reserve,
    format_request,
    parse_request,
)
from multigpu.plan.quotas import (
    ModelSize,
    Quotas,
    auto_leaving,
    auto_quotas,
    check_room,
    expert_quotas,
    room,
    virtual_quotas,
)
from multigpu.units import GIB

from .shapes import GPU0, GPU1, GPU2, budget

SIZE = ModelSize(total=100, immovable=4, largest=10, ring=5)
BUDGETS = {d: budget(d, n) for d, n in ((GPU0, 80), (GPU1, 40), (CPU, 1000))}


def quotas(text: str, size: ModelSize = SIZE) -> dict[str, int]:
    """What the text gives to each device, in order."""
    request = parse_request(text)
    if isinstance(request, VirtualVram):
        result = virtual_quotas(request, size, BUDGETS, GPU0)
    else:
        assert isinstance(request, Expert)
        result = expert_quotas(request, size, BUDGETS, GPU0)
    return {str(device): count for device, count in result.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # bytes: filled in the order written, the star takes the rest
        ("cuda:0,30b;cpu,*", {"cuda:0": 30, "cpu": 70}),
        ("cuda:0,30b", {"cuda:0": 30, "cpu": 70}),
        ("cuda:0,30b;cuda:1,20b", {"cuda:0": 30, "cuda:1": 20, "cpu": 50}),
        ("cuda:0,70b;cuda:1,70b;cpu,*", {"cuda:0": 70, "cuda:1": 30, "cpu": 0}),
        ("cuda:1,70b;cuda:0,70b;cpu,*", {"cuda:0": 30, "cuda:1": 70, "cpu": 0}),
        ("cpu,30b;cuda:0,*", {"cuda:0": 70, "cpu": 30}),
        ("cuda:0,*;cpu,30b", {"cuda:0": 70, "cpu": 30}),
        ("cuda:0,30b;cpu,10b", {"cuda:0": 30, "cpu": 70}),  # cpu is the remainder: its number is only a part of it
        ("cuda:0,500b;cpu,*", {"cuda:0": 100, "cpu": 0}),
        # so-much-or-the-remainder: after all plain amounts, wherever it stands
        ("cuda:1,20b*;cuda:0,60b;cpu,*", {"cuda:0": 60, "cuda:1": 20, "cpu": 20}),
        ("cuda:1,20b*;cuda:0,90b;cpu,*", {"cuda:0": 90, "cuda:1": 10, "cpu": 0}),
        ("cpu,*;cuda:1,20b*;cuda:0,60b", {"cuda:0": 60, "cpu": 20, "cuda:1": 20}),
        # ratio: parts of the model
        ("cuda:0,25%;cpu,75%", {"cuda:0": 25, "cpu": 75}),
        ("cuda:0,1%;cpu,3%", {"cuda:0": 25, "cpu": 75}),
        ("cuda:0,200%;cuda:1,100%;cpu,100%", {"cuda:0": 50, "cuda:1": 25, "cpu": 25}),
        ("cuda:0,1%;cuda:1,1%;cpu,1%", {"cuda:0": 33, "cuda:1": 33, "cpu": 34}),
        ("cuda:0,50%;cpu,*", {"cuda:0": 50, "cpu": 50}),
        ("cuda:0,50%", {"cuda:0": 50, "cpu": 50}),
        ("cuda:0,60%;cuda:1,60%;cpu,*", {"cuda:0": 60, "cuda:1": 40, "cpu": 0}),
        ("cuda:0,50%;cuda:1,10%*;cpu,*", {"cuda:0": 50, "cuda:1": 10, "cpu": 40}),
        # fraction of the device's own memory: 0.5 of 80, 0.25 of 40
        ("cuda:0,0.5;cpu,0.5", {"cuda:0": 40, "cpu": 60}),
        ("cuda:0,0.5;cuda:1,0.25", {"cuda:0": 40, "cuda:1": 10, "cpu": 50}),
        ("0.5", {"cuda:0": 40, "cpu": 60}),
        ("1", {"cuda:0": 80, "cpu": 20}),
        # what cannot leave stays, and the last device named gives way first
        ("cpu,*", {"cuda:0": 4, "cpu": 96}),
        ("cuda:1,50%;cpu,50%", {"cuda:0": 4, "cuda:1": 50, "cpu": 46}),
        ("cuda:0,0%;cpu,1%;cuda:1,99%", {"cuda:0": 4, "cpu": 1, "cuda:1": 95}),
        ("cuda:1,98b;cpu,*", {"cuda:0": 4, "cuda:1": 96, "cpu": 0}),
        # virtual VRAM: so many bytes leave
        ("#;30b;cpu", {"cuda:0": 70, "cpu": 30}),
        ("#;0;cpu", {"cuda:0": 100}),
        ("#;500b;cpu", {"cuda:0": 4, "cpu": 96}),
        ("#;50b;cuda:1,cpu", {"cuda:0": 50, "cuda:1": 30, "cpu": 20}),  # 40 free, less the rounding of a block
        ("#;50b;cpu,cuda:1", {"cuda:0": 50, "cpu": 50, "cuda:1": 0}),
        ("#;20b;cuda:1,cpu", {"cuda:0": 80, "cuda:1": 20, "cpu": 0}),
    ],
)
def test_by_hand(text: str, expected: dict[str, int]) -> None:
    result = quotas(text)
    assert list(result.items()) == list(expected.items())
    assert sum(result.values()) == SIZE.total


def test_shares_of_one_device_add_up() -> None:
    """No text says that; a request whose devices were replaced may."""
    tenth = 100_000_000
    ratios = Expert(Mode.RATIO, (Part(None, 2 * tenth), Part(CPU, 3 * tenth), Part(CPU, 5 * tenth)))
    assert expert_quotas(ratios, SIZE, BUDGETS, GPU0) == {GPU0: 20, CPU: 80}
    counts = Expert(Mode.BYTES, (Part(GPU0, 20), Part(CPU, 30), Part(GPU0, 10), Part(CPU, None, remainder=True)))
    assert expert_quotas(counts, SIZE, BUDGETS, GPU0) == {GPU0: 30, CPU: 70}


def test_an_unknown_device_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UnknownDevice, match=r"cuda:9 is not present; this machine has cpu, cuda:0, cuda:1"):
        quotas("cuda:9,4gb;cpu,*")
    for donors in ("cuda:9", "cuda:9,cpu"):
        with pytest.raises(UnknownDevice):
            quotas(f"#;4gb;{donors}")


def test_a_remainder_without_a_cpu_is_refused() -> None:
    request = parse_request("cuda:0,30b")
    assert isinstance(request, Expert)
    with pytest.raises(UnknownDevice, match="cpu is not present"):
        expert_quotas(request, SIZE, {GPU0: BUDGETS[GPU0]}, GPU0)


def test_the_compute_device_is_not_its_own_donor() -> None:
    with pytest.raises(AllocationError, match="cannot be its own donor"):
        quotas("#;30b;cuda:0")


def test_the_ring_is_never_larger_than_what_streams() -> None:
    size = ModelSize(total=100, immovable=0, largest=10, ring=50)
    assert [size.ring_for(leaving) for leaving in (0, 20, 50, 100)] == [0, 20, 50, 50]
    assert SIZE.ring_for(100) == 10


@pytest.mark.parametrize(
    ("free", "reserve", "leaving"),
    [
        (200, 50, 0),
        (150, 50, 0),
        (149, 50, 11),  # one byte too many, and the ring of 10
        (100, 50, 60),
        (64, 50, 96),  # all that can: 4 bytes and the ring of 10 are left
    ],
)
def test_auto_lets_as_little_leave_as_possible(free: int, reserve: int, leaving: int) -> None:
    assert auto_leaving(Auto(reserve), SIZE, budget(GPU0, free)) == leaving


def test_auto_says_how_much_could_stay_free() -> None:
    with pytest.raises(DoesNotFit, match=r"50 B of the 63 B free there are to stay free for inference; write auto,49b"):
        auto_leaving(Auto(50), SIZE, budget(GPU0, 63))
    with pytest.raises(DoesNotFit, match=r"14 B are needed on cuda:0 .* but 13 B are free there"):
        auto_leaving(Auto(5), SIZE, budget(GPU0, 13))


def test_the_default_reserve_is_two_gib_or_a_quarter() -> None:
    assert default_reserve(budget(GPU0, 0, total=24 * GIB)) == 2 * GIB
    assert default_reserve(budget(GPU0, 0, total=4 * GIB)) == GIB
    assert auto_leaving(Auto(), SIZE, DeviceBudget(GPU0, 400, 200)) == 0  # a quarter of 400 stays free
    assert auto_leaving(Auto(), SIZE, DeviceBudget(GPU0, 401, 199)) == 11


def donors(*offers: tuple[DeviceId, int, float]) -> list[DeviceBudget]:
    """(device, room, speed): the room of a device is its free memory less one block."""
    return [budget(device, free + SIZE.largest, speed) for device, free, speed in offers]


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([(CPU, 100, 25e9)], {GPU0: 40, CPU: 60}),
        ([(CPU, 100, 20e9), (GPU1, 100, 10e9)], {GPU0: 40, CPU: 40, GPU1: 20}),
        ([(CPU, 10, 20e9), (GPU1, 100, 10e9)], {GPU0: 40, CPU: 10, GPU1: 50}),
        ([(CPU, 10, 20e9), (GPU1, 30, 10e9), (GPU2, 100, 10e9)], {GPU0: 40, CPU: 10, GPU1: 25, GPU2: 25}),
        ([(CPU, 10, 20e9), (GPU1, 50, 10e9)], {GPU0: 40, CPU: 10, GPU1: 50}),
        ([(CPU, 10, 20e9), (GPU1, 49, 10e9)], None),
    ],
)
def test_auto_shares_by_link_speed_within_the_room(
    offers: list[tuple[DeviceId, int, float]], expected: Quotas | None
) -> None:
    assert auto_quotas(60, donors(*offers), SIZE, GPU0) == expected


def refusal(text: str, held: Quotas, size: ModelSize = SIZE) -> str:
    with pytest.raises(DoesNotFit) as caught:
        check_room(held, size, BUDGETS, GPU0, parse_request(text))
    return str(caught.value)


def test_a_refusal_says_what_was_asked_what_is_free_and_what_fits() -> None:
    assert refusal("cuda:1,50b;cpu,*", {GPU0: 50, GPU1: 50}) == (
        "50 B of the model are to rest on cuda:1, but 40 B are free there; "
        "write cuda:1,30b or less, and give the rest to another device"
    )
    assert refusal("#;50b;cuda:1", {GPU0: 50, GPU1: 50}) == (
        "50 B of the model are to rest on cuda:1, but 40 B are free there; "
        "30 B fit there for certain: lower the virtual VRAM or add a donor"
    )
    assert refusal("cuda:0,90b;cpu,*", {GPU0: 90, CPU: 10}) == (
        "90 B of the model are to rest on cuda:0 and 10 B for staging, but 80 B are free there; "
        "write cuda:0,60b or less, and give the rest to another device"
    )
    assert "set the virtual VRAM to 40 B or more" in refusal("#;0;cpu", {GPU0: 100})
    fixed = ModelSize(total=100, immovable=90, largest=10, ring=5)
    assert "100 B are needed there even if everything that can leave does" in refusal("#;0;cpu", {GPU0: 100}, fixed)


def test_what_is_suggested_fits() -> None:
    check_room({GPU0: 60, CPU: 40}, SIZE, BUDGETS, GPU0, parse_request("cuda:0,60b"))
    check_room({GPU0: 70, GPU1: 30}, SIZE, BUDGETS, GPU0, parse_request("#;30b;cuda:1"))


AMOUNTS = st.integers(0, 200)
PLAIN = st.one_of(AMOUNTS.map(lambda n: f"{n}b"), AMOUNTS.map(lambda n: f"{n}b*"))


@given(
    st.lists(
        st.tuples(st.sampled_from(["cuda:0", "cuda:1", "cpu"]), PLAIN), min_size=1, max_size=3, unique_by=lambda p: p[0]
    ),
    st.integers(0, 300),
    st.integers(0, 100),
    st.sampled_from(["b", "%", ""]),
)
def test_quotas_always_sum_to_the_model(parts: list[tuple[str, str]], total: int, fixed: int, unit: str) -> None:
    def amount(text: str) -> str:
        number = int(text.rstrip("b*")) + 1
        return f"{number / 1000 if unit == '' else number}{unit}{'*' if text.endswith('*') else ''}"

    size = ModelSize(total + fixed, fixed, total, 7)
    text = ";".join(f"{device},{amount(value)}" for device, value in parts)
    result = quotas(text, size)
    assert sum(result.values()) == size.total
    assert all(count >= 0 for count in result.values())
    assert result["cuda:0"] >= fixed
    assert quotas(format_request(parse_request(text)), size) == result


def test_room_is_free_memory_less_one_block() -> None:
    assert room(budget(CPU, 25), SIZE) == 15
    assert room(budget(CPU, 5), SIZE) == 0
