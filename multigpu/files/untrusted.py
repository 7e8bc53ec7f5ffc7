"""Reading files that anybody may have written: regular files only, and JSON as strictly as the `safetensors` library.

Time and memory are in proportion to the bytes that are read, whatever they contain.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelFileError

MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format, which holds here for every header and index."""
MOST = 2**64 - 1
"""The largest number that a header can mean: file formats count with 64 bits."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LONGEST_SHOWN = 60


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading. Raises `ModelFileError` in one line.

    Anything but a regular file is refused before it is opened: a pipe may wait for ever, and a device never ends.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind == stat.S_IFREG:
            return path.open("rb")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise ModelFileError(f"{str(path)!r} cannot be read: no file can have this name") from None
    raise ModelFileError(f"{path} cannot be read: it is {_KINDS.get(kind, 'no regular file')}; give a model's file")


def parse_json(text: bytes) -> Any:
    """JSON with each object as a tuple of (name, value) pairs, so that a name which stands there twice can be seen.

    Only whole numbers from 0 to `MOST` are numbers here; any other becomes None. Raises `ValueError` in one clause.
    """
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=tuple,
            parse_int=_whole_number,
            parse_float=_other_number,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise ValueError("its text is not JSON (it is nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"its text is not JSON ({error})") from None


def _whole_number(text: str) -> int | None:
    if len(text) <= len(str(MOST)) and not text.startswith("-"):
        number = int(text)
        return number if number <= MOST else None
    _other_number(text)
    return None


def _other_number(text: str) -> None:
    if math.isinf(float(text)):
        raise ValueError(f"the number {shown(text)} is too large")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def product(numbers: list[int]) -> int | None:
    """All numbers multiplied from left to right; None as soon as that is more than `MOST`."""
    result = 1
    for number in numbers:
        result *= number
        if result > MOST:
            return None
    return result


def shown(value: object) -> str:
    """A name or a value as a message shows it: text in quotes and without control characters, all of it cut short."""
    if isinstance(value, (str, list, tuple)):
        value = value[: _LONGEST_SHOWN + 1]
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
