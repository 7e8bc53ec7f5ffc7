"""Bytes and how people write them.

One meaning for each unit, everywhere in this project: k, m, g and t are powers of 1024, with or without
`b` or `ib` behind them (`2g` = `2gb` = `2GiB` = 2147483648 bytes), as in the archived pack and as ComfyUI prints memory.
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
