"""Bytes and how people write them.

One meaning for each unit, everywhere in this project: k, m, g and t are powers of 1024, with or without `b` or `ib`
behind them (`2g` = `2gb` = `2GiB` = 2147483648 bytes), as in the archived pack and as ComfyUI prints memory.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

UNITS = {"b": 1, **{f"{p}{s}": n for p, n in (("k", KIB), ("m", MIB), ("g", GIB), ("t", TIB)) for s in ("", "b", "ib")}}
"""Unit in lower case -> bytes."""


def format_bytes(count: int) -> str:
    """Bytes for people: `512 B`, `1.5 MiB`, `23.84 GiB`."""
    for unit, size, digits in (("TiB", TIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if abs(count) >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} B"


def write_bytes(count: int) -> str:
    """Bytes as an allocation writes them: `2.5gb`, `300mb`, `1025b`. Reading it back gives `count` exactly.

    The largest unit is used in which a short decimal says the number; a decimal that is not a whole number of bytes
    means the next lower one, as everywhere in this project.
    """
    for unit, size, digits in (("tb", TIB, 3), ("gb", GIB, 3), ("mb", MIB, 2), ("kb", KIB, 0)):
        steps = -(-count * 10**digits // size)
        if count >= size and steps * size // 10**digits == count:
            return f"{write_decimal(steps, digits)}{unit}"
    return f"{count}b"


def write_bytes_below(count: int) -> str:
    """A short size of at most `count` bytes, for a suggestion: `11.87gb` rather than `12750674330b`."""
    for size in (TIB, GIB, MIB):
        if count >= size:
            return write_bytes(count * 100 // size * size // 100)
    return write_bytes(count)


def write_decimal(steps: int, digits: int) -> str:
    """`steps` * 10**-`digits` as the shortest exact decimal: (2500, 3) is `2.5`."""
    whole, part = divmod(steps, 10**digits)
    return f"{whole}.{part:0{digits}d}".rstrip("0").rstrip(".") if part else str(whole)


def scale_decimal(number: str, scale: int) -> int:
    """The decimal `number` times `scale`, exactly, rounded down: (`2.5`, 1024) is 2560."""
    whole, _, part = number.partition(".")
    return int((whole or "0") + part) * scale // int(10 ** len(part))
