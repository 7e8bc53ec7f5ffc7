"""What a header or an allocation costs is in proportion to its length, whatever it says.

One that is 32 times as long costs some 32 times as much where the cost is linear, and a thousand times where it is
quadratic. The limit lies between, far from both, so that a busy machine makes no difference.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import string
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from multigpu.errors import ModelFileError
from multigpu.files import describe_model, read_tensors
from multigpu.plan import parse_request
from tests.unit.files.model_files import write_raw_safetensors

SHORT, LONG = 16_000, 512_000
MOST_TIMES = 200
MOST_BYTES_PER_BYTE = 40


def shape(piece: str) -> Callable[[int], str]:
    """A header with one tensor, whose shape is the piece again and again."""
    return lambda size: f'{{"a":{{"dtype":"F32","data_offsets":[0,4],"shape":[{piece * (size // len(piece))}1]}}}}'


def name(pattern: str, piece: str) -> Callable[[int], str]:
    """The header of a known family with one tensor more, whose name has the piece again and again."""
    others = ("double_blocks.0.a.weight", "single_blocks.0.a.weight")
    entry = '"dtype":"F32","shape":[1,0],"data_offsets":[0,0]'
    known = ",".join(f'"{other}":{{{entry}}}' for other in others)
    last = '{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'
    return lambda size: f'{{{known},"{pattern.format(piece * (size // len(piece)))}":{last}}}'


def entries(size: int) -> str:
    rows = (f'"m.{i:x}.weight":{{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}}' for i in range(size // 64))
    return f'{{{",".join(rows)},"a":{{"dtype":"F32","shape":[],"data_offsets":[0,4]}}}}'


HEADERS = {
    "ones": shape("1,"),
    "large numbers": shape("999999999,"),
    "the largest numbers": shape("0,18446744073709551615,"),
    "one number of many digits": shape("9"),
    "lists": shape("[],"),
    "objects": shape('{"a":1},'),
    "texts": shape('"ab",'),
    "brackets": lambda size: "[" * size,
    "a name of attention": name("{}.weight", "attn"),
    "a name of words": name("{}weight", "a."),
    "a name of digits": name("output_blocks.{}.0.weight", "9"),
    "tensors": entries,
}


def read(path: Path) -> None:
    with contextlib.suppress(ModelFileError):
        describe_model(read_tensors([path]))


def seconds(work: Callable[[], object]) -> float:
    """Of this process, the least of three times."""

    def once() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    gc.disable()  # its cost depends on what all other tests have left
    try:
        return min(once() for _ in range(3))
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_costs_no_more_than_its_length(tmp_path: Path, kind: str) -> None:
    short, long = (
        write_raw_safetensors(tmp_path / f"{size}.safetensors", HEADERS[kind](size).encode(), 4)
        for size in (SHORT, LONG)
    )
    assert seconds(lambda: read(long)) < MOST_TIMES * seconds(lambda: read(short))
    tracemalloc.start()
    try:
        read(long)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES_PER_BYTE * LONG


def test_an_allocation_costs_no_more_than_its_length() -> None:
    names = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    short, long = (";".join(f"{name},1b" for name in names[:count]) for count in (500, 16_000))
    assert seconds(lambda: parse_request(long)) < MOST_TIMES * seconds(lambda: parse_request(short))
