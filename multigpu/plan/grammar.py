"""The one grammar of allocations; `docs/allocation.md` is its reference.

    request  = "auto" ["," size] | legacy | expert | number       a lone number: fraction of the compute device
    expert   = part {";" part} [";"]
    part     = device "," ( amount ["*"] | "*" )
    amount   = number unit | number "%" | number                  bytes | ratio | fraction of the device's memory
    legacy   = [expert] "#" [device [";" number [unit] ";" device {"," device}]]

Every function here either returns or raises `AllocationError`. The numbers become integers at once, and
`format_request(parse_request(text))` is a fixed point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

from ..errors import AllocationError, AllocationSyntaxError
from ..units import GIB, UNITS, scale_decimal, write_bytes, write_decimal
from .request import SHARE_DIGITS, WHOLE, Auto, Expert, Mode, Part, Request, VirtualVram
from .types import DeviceId

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}"
_AMOUNT = re.compile(rf"(?:(?P<number>{_NUMBER})\s*(?P<unit>%|[a-z]*)\s*)?(?P<star>\*)?", re.IGNORECASE | re.ASCII)
_LONE = re.compile(_NUMBER)
_MEANT = {Mode.BYTES: "in bytes", Mode.RATIO: "a percentage", Mode.FRACTION: "a fraction"}
AUTO, VIRTUAL_VRAM, EXPERT = "auto", "virtual VRAM", "expert"
MODES = (AUTO, VIRTUAL_VRAM, EXPERT)
"""The modes of a place node."""
_EXAMPLE = {Mode.BYTES: "cuda:0,2.5gb;cpu,*", Mode.RATIO: "cuda:0,25%;cpu,75%", Mode.FRACTION: "cuda:0,0.8;cpu,0.5"}


class _Text:
    """The text being read, and errors about pieces of it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refuse(self, problem: str, piece: str, at: int, example: str = _EXAMPLE[Mode.BYTES]) -> NoReturn:
        """Raise `AllocationSyntaxError` for the piece that starts at offset `at`."""
        column = at + len(piece) - len(piece.lstrip()) + 1
        raise AllocationSyntaxError(problem, text=self.text, column=column, piece=piece.strip(), example=example)

    def split(self, separator: str, start: int, end: int) -> Iterator[tuple[int, str]]:
        """(offset, piece) for each piece of text[start:end]; an empty last piece is dropped."""
        pieces = self.text[start:end].split(separator)
        if len(pieces) > 1 and not pieces[-1].strip():
            pieces.pop()
        for piece in pieces:
            yield start, piece
            start += len(piece) + 1

    def device(self, piece: str, at: int) -> DeviceId:
        try:
            return DeviceId.parse(_short(piece))
        except AllocationError as error:
            self.refuse(str(error) if piece.strip() else "a device is missing here", piece, at)


def _short(piece: str) -> str:
    """A piece for a message."""
    piece = piece.strip()
    return piece if len(piece) <= 40 else f"{piece[:37]}..."


def parse_request(text: str) -> Request:
    """Read any request: `auto`, an allocation, a lone fraction, or the archived pack's `expert#compute;gb;donor`."""
    source = _Text(text)
    if "#" in text:
        return _parse_legacy(source)
    head, comma, tail = text.partition(",")
    if head.strip().lower() == "auto":
        return Auto(_parse_size(source, tail, len(head) + 1, "auto,3gb") if comma else None)
    return _parse_expert(source, len(text))


def parse_devices(text: str) -> tuple[DeviceId, ...]:
    """Read `cuda:1,cpu`: devices in the order given."""
    source = _Text(text)
    return tuple(source.device(piece, at) for at, piece in source.split(",", 0, len(text)))


def request_from_widgets(virtual_vram_gb: float, donor_device: str, expert_mode_allocations: str) -> Request:
    """The request behind the three widgets that saved workflows carry: a non-empty expert text wins."""
    if expert_mode_allocations.strip():
        return parse_request(expert_mode_allocations)
    return VirtualVram(read_gib(f"{virtual_vram_gb or 0:.9f}"), parse_devices(donor_device))


def request_from_mode(mode: str, virtual_vram_gb: float, donor_device: str, expert_mode_allocations: str) -> Request:
    """The request that the widgets of a place node mean; widgets of other modes are ignored.

    Raises `AllocationError` for invalid values.
    """
    if mode == AUTO:
        return Auto()
    if mode == VIRTUAL_VRAM:
        return request_from_widgets(virtual_vram_gb, donor_device, "")
    if mode == EXPERT:
        return parse_request(expert_mode_allocations)
    raise AllocationError(f"mode is {mode!r}; it can be {', '.join(MODES)}")


def read_gib(text: str) -> int:
    """Bytes of `8`, `8.5` (GiB) or `8gb`, `512mb` (with any unit). Raises `AllocationError`."""
    return _parse_size(_Text(text), text, 0, "8gb", bare=GIB)


def format_request(request: Request) -> str:
    """The shortest text that reads back as the same request."""
    if isinstance(request, Auto):
        return "auto" if request.reserve is None else f"auto,{write_bytes(request.reserve)}"
    if isinstance(request, VirtualVram):
        size = write_bytes(request.bytes)
        size = size[:-2] if size.endswith("gb") else size
        return f"#{request.compute or ''};{size};{','.join(map(str, request.donors))}"
    assert isinstance(request, Expert)
    body = ";".join(_format_part(request.mode, part) for part in request.parts)
    return body if request.compute is None else f"{body}#{request.compute}"


def _format_part(mode: Mode, part: Part) -> str:
    star = "*" if part.remainder else ""
    if part.amount is None:
        amount = star
    elif mode is Mode.BYTES:
        amount = write_bytes(part.amount) + star
    elif mode is Mode.RATIO:
        amount = f"{write_decimal(part.amount * 100, SHARE_DIGITS)}%{star}"
    else:
        amount = write_decimal(part.amount, SHARE_DIGITS) + star
    return amount if part.device is None else f"{part.device},{amount}"


def _parse_size(source: _Text, piece: str, at: int, example: str, bare: int | None = None) -> int:
    """A number of bytes: a number with a unit, or without one when `bare` says what it counts."""
    match = _AMOUNT.fullmatch(piece.strip())
    if match is None or match["number"] is None or match["star"]:
        source.refuse(f"{_short(piece)!r} is not a size", piece, at, example)
    unit = UNITS.get(match["unit"].lower()) if match["unit"] else bare
    if unit is None:
        source.refuse(f"{_short(piece)!r} is not a size", piece, at, example)
    return scale_decimal(match["number"], unit)


def _parse_legacy(source: _Text) -> Request:
    """`expert#compute;gb;donors`: as in the archived pack, a non-empty expert text wins over the virtual VRAM."""
    mark = source.text.index("#")
    fields = list(source.split(";", mark + 1, len(source.text)))
    example = "#cuda:0;4.0;cpu"
    if "#" in source.text[mark + 1 :]:
        at = source.text.index("#", mark + 1)
        source.refuse("a second '#' where only one is possible", "#", at, example)
    if len(fields) not in (1, 3):
        source.refuse("after '#' come compute device, gigabytes and donors", source.text[mark + 1 :], mark + 1, example)
    at, piece = fields[0]
    compute = source.device(piece, at) if piece.strip() else None
    virtual: VirtualVram | None = None
    if len(fields) == 3:
        size = _parse_size(source, fields[1][1], fields[1][0], example, bare=GIB)
        at, piece = fields[2]
        donors = tuple(source.device(name, start) for start, name in source.split(",", at, at + len(piece)))
        virtual = VirtualVram(size, donors, compute)
    if source.text[:mark].strip():
        expert = _parse_expert(source, mark)
        return Expert(expert.mode, expert.parts, compute)
    if virtual is None:
        source.refuse("neither an allocation before '#' nor virtual VRAM after it", source.text, 0, example)
    return virtual


def _parse_expert(source: _Text, end: int) -> Expert:
    if not source.text[:end].strip():
        source.refuse("the allocation is empty", source.text[:end], 0)
    lone = source.text[:end].strip()
    if _LONE.fullmatch(lone):
        return Expert(Mode.FRACTION, (Part(None, _fraction(source, lone, lone, source.text.index(lone))),))
    parts: list[Part] = []
    devices: set[DeviceId | None] = set()
    modes: list[Mode] = []
    for at, piece in source.split(";", 0, end):
        mode, part = _parse_part(source, piece, at)
        if part.device in devices:
            source.refuse(f"{part.device} is named twice; give each device one amount", piece, at)
        if part.amount is None and any(other.amount is None for other in parts):
            source.refuse("a second '*', but only one device can take the remainder", piece, at)
        if mode and modes and mode is not modes[0]:
            problem = f"{_short(piece)!r} is {_MEANT[mode]}, the amounts before it are {_MEANT[modes[0]]}; use one form"
            source.refuse(problem, piece, at, _EXAMPLE[modes[0]])
        modes += [mode] if mode else []
        parts.append(part)
        devices.add(part.device)
    mode = modes[0] if modes else Mode.BYTES
    if mode is Mode.RATIO and all(part.amount == 0 for part in parts):
        problem = "the percentages sum to 0, but the whole model has to be somewhere"
        source.refuse(problem, source.text[:end], 0, _EXAMPLE[Mode.RATIO])
    return Expert(mode, tuple(parts))


def _parse_part(source: _Text, piece: str, at: int) -> tuple[Mode | None, Part]:
    """One `device,amount`; the mode is None for a lone star, which fits every mode."""
    name, comma, amount = piece.partition(",")
    if not comma:
        what = f"{_short(piece)!r} is not 'device,amount'" if piece.strip() else "there is nothing between two ';'"
        source.refuse(what, piece, at)
    device = source.device(name, at)
    at += len(name) + 1
    match = _AMOUNT.fullmatch(amount.strip())
    if match is None or not match[0]:
        source.refuse(f"{_short(amount)!r} is not an amount such as 2.5gb, 25%, 0.8 or *", amount, at)
    star, number, unit = bool(match["star"]), match["number"], (match["unit"] or "").lower()
    if number is None:
        return None, Part(device, None, True)
    if unit == "%":
        return Mode.RATIO, Part(device, scale_decimal(number, WHOLE // 100), star)
    if not unit:
        return Mode.FRACTION, Part(device, _fraction(source, number, amount, at), star)
    if unit not in UNITS:
        source.refuse(f"{_short(unit)!r} is not a unit; units are b, kb, mb, gb and tb", amount, at)
    return Mode.BYTES, Part(device, scale_decimal(number, UNITS[unit]), star)


def _fraction(source: _Text, number: str, piece: str, at: int) -> int:
    billionths = scale_decimal(number, WHOLE)
    if billionths > WHOLE:
        problem = (
            f"{number} without a unit is a fraction of a device's memory and at most 1; write {number}gb for a size"
        )
        source.refuse(problem, piece, at, _EXAMPLE[Mode.FRACTION])
    return billionths
