"""The grammar of allocations: what each text means, and how each mistake is answered."""

from __future__ import annotations

import pytest

from multigpu.errors import AllocationError, AllocationSyntaxError
from multigpu.plan import (
    CPU,
    Auto,
    DeviceId,
    Expert,
    Mode,
    Part,
    VirtualVram,
    format_request,
    parse_devices,
    parse_request,
    read_gib,
    request_from_widgets,
)
from multigpu.units import GIB, KIB, MIB, TIB

from .shapes import GPU0, GPU1

REST = Part(CPU, None, True)


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        ("512b", 512),
        ("3k", 3 * KIB),
        ("3kb", 3 * KIB),
        ("3KiB", 3 * KIB),
        ("300m", 300 * MIB),
        ("300MB", 300 * MIB),
        ("300mib", 300 * MIB),
        ("2.5gb", 2684354560),
        ("3.0g", 3 * GIB),
        ("4 GiB", 4 * GIB),
        ("  .5gb ", GIB // 2),
        ("1tb", TIB),
        ("0gb", 0),
        ("2.3gb", 2469606195),  # 2469606195.2, rounded down
    ],
)
def test_bytes(amount: str, size: int) -> None:
    assert parse_request(f"cuda:0,{amount};cpu,*") == Expert(Mode.BYTES, (Part(GPU0, size), REST))


@pytest.mark.parametrize(
    ("text", "mode", "parts"),
    [
        ("cuda:0,25%;cpu,75%", Mode.RATIO, (Part(GPU0, 250_000_000), Part(CPU, 750_000_000))),
        ("cuda:0,1%;cpu,3%", Mode.RATIO, (Part(GPU0, 10_000_000), Part(CPU, 30_000_000))),
        ("cuda:0,50 %;cpu,*", Mode.RATIO, (Part(GPU0, 500_000_000), REST)),
        ("mps,50%;cpu,50%", Mode.RATIO, (Part(DeviceId("mps", None), 500_000_000), Part(CPU, 500_000_000))),
        ("cuda:0,0.8;cpu,0.5", Mode.FRACTION, (Part(GPU0, 800_000_000), Part(CPU, 500_000_000))),
        ("cuda:0,1", Mode.FRACTION, (Part(GPU0, 1_000_000_000),)),
        ("0.8", Mode.FRACTION, (Part(None, 800_000_000),)),
        (" .5 ", Mode.FRACTION, (Part(None, 500_000_000),)),
        ("cpu,*", Mode.BYTES, (REST,)),
        ("cuda:1,5gb*;cpu,*", Mode.BYTES, (Part(GPU1, 5 * GIB, True), REST)),
        ("cuda:1,5gb;", Mode.BYTES, (Part(GPU1, 5 * GIB),)),
        ("cuda:1,3gb;cuda:0,2gb", Mode.BYTES, (Part(GPU1, 3 * GIB), Part(GPU0, 2 * GIB))),
        ("npu:1,20%*;cpu,80%", Mode.RATIO, (Part(DeviceId("npu", 1), 200_000_000, True), Part(CPU, 800_000_000))),
    ],
)
def test_modes(text: str, mode: Mode, parts: tuple[Part, ...]) -> None:
    assert parse_request(text) == Expert(mode, parts)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "mlu", "directml", "corex", "gb", "kbmg"])
def test_a_device_name_is_never_read_as_a_unit(kind: str) -> None:
    assert parse_request(f"{kind}:1,50%;cpu,50%") == Expert(
        Mode.RATIO, (Part(DeviceId(kind, 1), 500_000_000), Part(CPU, 500_000_000))
    )


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("#cuda:0;4.0;cpu", VirtualVram(4 * GIB, (CPU,), GPU0)),
        ("#cuda:0;0.0;cpu", VirtualVram(0, (CPU,), GPU0)),
        ("#cuda:0;4.0;cuda:1,cpu", VirtualVram(4 * GIB, (GPU1, CPU), GPU0)),
        ("#;512mb;cpu", VirtualVram(512 * MIB, (CPU,))),
        ("#cuda:0;4.1000000000000005;cpu", VirtualVram(4402341478, (CPU,), GPU0)),
        ("cuda:0,2gb;cpu,*#cuda:0;0.0;cpu", Expert(Mode.BYTES, (Part(GPU0, 2 * GIB), REST), GPU0)),
        ("cuda:0,2gb;cpu,*#cuda:0;8.0;cpu", Expert(Mode.BYTES, (Part(GPU0, 2 * GIB), REST), GPU0)),
        ("cuda:0,2gb#cuda:0", Expert(Mode.BYTES, (Part(GPU0, 2 * GIB),), GPU0)),
        ("0.8#cuda:1", Expert(Mode.FRACTION, (Part(None, 800_000_000),), GPU1)),
        ("cpu,*#", Expert(Mode.BYTES, (REST,))),
    ],
)
def test_the_internal_form_of_the_archived_pack(text: str, request_: VirtualVram | Expert) -> None:
    assert parse_request(text) == request_


def test_auto() -> None:
    assert parse_request(" Auto ") == Auto()
    assert parse_request("auto, 3gb") == Auto(3 * GIB)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("CUDA:0 , 2.50 GB ; cuda:1,3.0g; cpu,* ;", "cuda:0,2.5gb;cuda:1,3gb;cpu,*"),
        ("cuda,025.50%;cpu,75%", "cuda:0,25.5%;cpu,75%"),
        ("cuda:0,.80;cpu,0.5", "cuda:0,0.8;cpu,0.5"),
        ("cuda:1,0.25*;cpu,*", "cuda:1,0.25*;cpu,*"),
        (".8", "0.8"),
        ("cuda:0,2147483648b;cpu,*", "cuda:0,2gb;cpu,*"),
        ("#cuda:0;4.0;cpu", "#cuda:0;4;cpu"),
        ("#;512mb;cuda:1,cpu", "#;512mb;cuda:1,cpu"),
        ("cuda:0,2gb;cpu,*#cuda:0;0.0;cpu", "cuda:0,2gb;cpu,*#cuda:0"),
        ("AUTO", "auto"),
        ("auto,3072mb", "auto,3gb"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert format_request(parse_request(text)) == canonical
    assert format_request(parse_request(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "column", "piece", "says"),
    [
        ("", 1, "", "empty"),
        ("   ", 4, "", "empty"),
        ("cuda:0", 1, "cuda:0", "is not 'device,amount'"),
        ("4gb", 1, "4gb", "is not 'device,amount'"),
        ("cuda:0,4gb;;cpu,*", 12, "", "nothing between two ';'"),
        ("cuda:0,4 giraffes;cpu,*", 8, "4 giraffes", "'giraffes' is not a unit"),
        ("cuda:0,4x", 8, "4x", "'x' is not a unit"),
        ("cuda:0,", 8, "", "is not an amount"),
        ("cuda:0,-4gb", 8, "-4gb", "is not an amount"),
        ("cuda:0,4,5gb", 8, "4,5gb", "is not an amount"),
        ("cuda:0,1e3mb", 8, "1e3mb", "is not an amount"),
        ("cuda:0,٤gb", 8, "٤gb", "is not an amount"),
        (f"cuda:0,{'9' * 5000}gb", 8, f"{'9' * 5000}gb", "is not an amount"),
        (f"cuda:0,4{'g' * 5000}", 8, f"4{'g' * 5000}", "is not a unit"),
        (f"{'x' * 5000}1,4gb", 1, f"{'x' * 5000}1", "is not a device"),
        ("cpu,*; gpu_1,4gb", 8, "gpu_1", "'gpu_1' is not a device"),
        ("cpu,*;,4gb", 7, "", "a device is missing"),
        ("cpu:1,4gb", 1, "cpu:1", "there is one cpu"),
        ("cpu,*;ray://b/cpu,4gb", 7, "ray://b/cpu", "weights cannot rest there"),
        ("#cuda:0;4;ray://b/cpu", 11, "ray://b/cpu", "weights cannot rest there"),
        ("cuda:0,2gb;cpu,5%", 12, "cpu,5%", "is a percentage, the amounts before it are in bytes"),
        ("cuda:0,50%;cpu,0.5", 12, "cpu,0.5", "is a fraction, the amounts before it are a percentage"),
        ("cuda:0,0.5;cpu,5gb", 12, "cpu,5gb", "is in bytes, the amounts before it are a fraction"),
        ("cuda,1gb;cuda:0,2gb", 10, "cuda:0,2gb", "cuda:0 is named twice"),
        ("cuda:0,*;cpu,*", 10, "cpu,*", "second '*'"),
        ("cuda:0,2;cpu,*", 8, "2", "write 2gb for a size"),
        ("2", 1, "2", "write 2gb for a size"),
        ("cuda:0,0%;cpu,0%", 1, "cuda:0,0%;cpu,0%", "sum to 0"),
        ("auto,", 6, "", "is not a size"),
        ("auto,5%", 6, "5%", "is not a size"),
        ("auto,5", 6, "5", "is not a size"),
        ("auto,5gb*", 6, "5gb*", "is not a size"),
        ("#", 1, "#", "neither an allocation"),
        ("#cuda:0", 1, "#cuda:0", "neither an allocation"),
        ("#cuda:0;4", 2, "cuda:0;4", "compute device, gigabytes and donors"),
        ("#cuda:0;4x;cpu", 9, "4x", "'4x' is not a size"),
        ("#cuda:0;4;", 2, "cuda:0;4;", "compute device, gigabytes and donors"),
        ("cpu,*#cuda:0#x", 13, "#", "second '#'"),
        ("#cuda:0;4;cpu,x1", 15, "x1", "'x1' is not a device"),
    ],
)
def test_mistakes_are_answered_with_column_piece_and_example(text: str, column: int, piece: str, says: str) -> None:
    with pytest.raises(AllocationSyntaxError) as caught:
        parse_request(text)
    error = caught.value
    assert (error.column, error.piece) == (column, piece)
    assert says in str(error)
    assert f"column {column}" in str(error)
    assert error.example in str(error)
    assert len(str(error)) < 400
    parse_request(error.example)


def test_donors_have_to_differ_and_exist() -> None:
    with pytest.raises(AllocationError, match="twice"):
        parse_request("#cuda:0;4;cpu,cpu")
    with pytest.raises(AllocationError, match="without a donor"):
        VirtualVram(1, ())
    with pytest.raises(AllocationError, match="-1 bytes"):
        VirtualVram(-1, (CPU,))


def test_the_three_widgets_of_saved_workflows() -> None:
    assert request_from_widgets(4.0, "cpu", "") == VirtualVram(4 * GIB, (CPU,))
    assert request_from_widgets(0.0, "cuda:1", " ") == VirtualVram(0, (GPU1,))
    assert request_from_widgets(4.1000000000000005, "cpu", "") == VirtualVram(4402341478, (CPU,))
    assert request_from_widgets(4.0, "cpu", "0.8") == Expert(Mode.FRACTION, (Part(None, 800_000_000),))
    assert request_from_widgets(1e-9, "cpu", "") == VirtualVram(1, (CPU,))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(AllocationError, match="is not a size"):
            request_from_widgets(wrong, "cpu", "")


def test_lists_of_devices_and_sizes_in_gib() -> None:
    assert parse_devices("cuda:1, cpu") == (GPU1, CPU)
    assert read_gib("8") == read_gib("8gb") == 8 * GIB
    assert read_gib("512mb") == 512 * MIB
    with pytest.raises(AllocationSyntaxError, match="column 8"):
        parse_devices("cuda:1,x9")
