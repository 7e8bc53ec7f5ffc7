"""Frames over a real pipe: whole, in order, and the end of the pipe wherever it comes."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from multigpu.remote import frames
from multigpu.remote.link import Message


def written(*parts: bytes) -> bytes:
    """A frame as bytes."""
    pipe = io.BytesIO()
    frames.Writer(pipe).write(7, {"do": "call"}, parts)
    return pipe.getvalue()


@pytest.mark.parametrize("parts", [(), (b"",), (b"a", b"", bytes(3_000_000))])
def test_a_frame_comes_back_as_it_was(parts: tuple[bytes, ...]) -> None:
    assert frames.read(io.BytesIO(written(*parts))) == (7, {"do": "call"}, list(parts))


def test_no_part_of_a_frame_is_taken_for_a_frame() -> None:
    whole = written(b"abc", b"de")
    for end in range(len(whole)):
        assert frames.read(io.BytesIO(whole[:end])) is None


@pytest.mark.parametrize("count", [0, 2**32 - 1])
def test_a_frame_with_an_impossible_number_of_parts_ends_the_pipe(count: int) -> None:
    assert frames.read(io.BytesIO(bytes(8) + count.to_bytes(4, "little") + bytes(64))) is None


def test_frames_of_several_threads_do_not_mix() -> None:
    """Each is larger than the pipe."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as incoming, os.fdopen(writing, "wb", 0) as outgoing:
        frames.widen(outgoing)
        writer = frames.Writer(outgoing)
        got: list[tuple[int, bytearray]] = []

        def read() -> None:
            while len(got) < 20:
                frame = frames.read(incoming)
                assert frame is not None
                got.append((frame[0], frame[2][0]))

        reader = threading.Thread(target=read)
        reader.start()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: writer.write(number, {}, [bytes([number]) * 1_500_000]), range(20)))
        reader.join()
    assert sorted(number for number, _ in got) == list(range(20))
    assert all(part == bytes([number]) * 1_500_000 for number, part in got)


def test_the_size_of_a_message_is_what_is_sent() -> None:
    assert Message(b"head", [bytes(10), memoryview(bytes(16)).cast("d")]).size == 30
