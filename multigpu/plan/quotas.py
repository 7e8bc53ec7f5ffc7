"""Quotas: from a request and the devices' budgets to bytes per device, before any block is looked at.

The quotas of a plan sum to the model's bytes exactly. Rounding to whole blocks comes later and moves each device by
less than one block; `room` leaves space for that wherever the planner, and not the user, chooses the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import AllocationError, DoesNotFit, UnknownDevice
from ..units import GIB, format_bytes, write_bytes_below
from .request import WHOLE, Auto, Expert, Mode, Part, Request, VirtualVram
from .types import CPU, DISK, Block, DeviceBudget, DeviceId

Quotas = dict[DeviceId, int]
Budgets = Mapping[DeviceId, DeviceBudget]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model in four numbers: all bytes, those that cannot leave, the largest block that can, and the desired ring."""

    total: int
    immovable: int
    largest: int
    ring: int

    @property
    def movable(self) -> int:
        return self.total - self.immovable

    @property
    def staging(self) -> int:
        """The size of the ring if enough is streamed: the desired one, but at least that of the largest block."""
        return max(self.ring, self.largest)

    def ring_for(self, leaving: int) -> int:
        """Staging memory for so many streamed bytes: never more than they are."""
        return min(leaving, self.staging)


def room(budget: DeviceBudget, size: ModelSize) -> int:
    """Bytes that certainly fit on a device: its free memory less one block, because whole blocks are moved."""
    return max(0, budget.free - size.largest)


def default_reserve(budget: DeviceBudget) -> int:
    """Memory that `auto` keeps free for inference: 2 GiB, on small devices a quarter of their memory."""
    return min(2 * GIB, budget.total // 4)


def ram_reserve(total: int) -> int:
    """RAM that stays free where the rest can go to disk, so that nothing is swapped: an eighth, from 1 to 4 GiB.

    Of less than 4 GiB, as in a small container, it is a quarter: Python and torch need what they need.
    """
    return min(4 * GIB, max(total // 8, min(GIB, total // 4)))


def beside_disk(budget: DeviceBudget) -> DeviceBudget:
    """What a device offers if the rest can go to disk: RAM without its reserve, any other device all it has free."""
    if not budget.device.is_cpu:
        return budget
    return replace(budget, free=max(0, budget.free - ram_reserve(budget.total)))


def disk_budget(blocks: Iterable[Block], bandwidth: float | None = None) -> DeviceBudget:
    """The model file as a device: it holds what of the model can rest in it."""
    count = sum(block.bytes for block in blocks if block.in_file)
    return DeviceBudget(DISK, count, count, bandwidth)


def check_compute(device: DeviceId | None) -> None:
    """Raise `AllocationError` for a device that computes nothing."""
    if device is not None and device.is_disk:
        raise AllocationError(
            "disk is named as compute device, but it can only hold weights; name another one, for example cuda:0"
        )


def lookup(device: DeviceId, budgets: Budgets) -> DeviceBudget:
    """The budget of a device. Raises `UnknownDevice` with the devices that are there."""
    if device not in budgets:
        raise UnknownDevice(f"{device} is not present; this machine has {', '.join(map(str, sorted(budgets)))}")
    return budgets[device]


def expert_quotas(request: Expert, size: ModelSize, budgets: Budgets, compute: DeviceId) -> Quotas:
    """Bytes per device of an expert allocation, in the user's order. See `docs/allocation.md` for the rules."""
    parts = [(part.device or compute, part) for part in request.parts]
    for device, part in parts:
        lookup(device, budgets)
        if device.is_disk and request.mode is Mode.FRACTION and part.amount is not None:
            raise AllocationError(
                "disk has an amount without a unit, a fraction of its size, but it has no size of its own; write disk,*"
            )
    if request.mode is Mode.RATIO and len(parts) > 1 and not any(part.remainder for _, part in parts):
        quotas = _in_proportion([(device, part.amount or 0) for device, part in parts], size.total)
    else:
        quotas = _filled_in_order(parts, request.mode, size.total, budgets)
    return _with_immovable(quotas, size, compute)


def _in_proportion(shares: list[tuple[DeviceId, int]], total: int) -> Quotas:
    """Split `total` exactly: each border is rounded down, so no device is off by a byte or more."""
    whole = sum(share for _, share in shares)
    quotas = {device: 0 for device, _ in shares}
    seen = border = 0
    for device, share in shares:
        seen += share
        quotas[device] += total * seen // whole - border
        border = total * seen // whole
    return quotas


def _filled_in_order(parts: list[tuple[DeviceId, Part]], mode: Mode, total: int, budgets: Budgets) -> Quotas:
    """Fill the plain amounts in the user's order, then the starred ones; the lone star, or cpu, takes what is left."""
    quotas = {device: 0 for device, _ in parts}
    left = total
    for device, part in sorted(parts, key=lambda entry: (entry[1].remainder, entry[1].amount is None)):
        take = left if part.amount is None else min(left, _in_bytes(part.amount, mode, total, budgets[device]))
        quotas[device] += take
        left -= take
    if left:
        lookup(CPU, budgets)
        quotas[CPU] = quotas.get(CPU, 0) + left
    return quotas


def _in_bytes(amount: int, mode: Mode, total: int, budget: DeviceBudget) -> int:
    if mode is Mode.BYTES:
        return amount
    if mode is Mode.FRACTION and not budget.known:
        raise AllocationError(
            f"a number without a unit is a share of the memory of {budget.device}, but that device does not tell how "
            f"much it has; write a size or percent of the model, for example {budget.device},4gb or {budget.device},50%"
        )
    return amount * (total if mode is Mode.RATIO else budget.total) // WHOLE


def _with_immovable(quotas: Quotas, size: ModelSize, compute: DeviceId) -> Quotas:
    """Give the compute device at least the bytes that cannot leave it, taken from the devices named last first."""
    missing = size.immovable - quotas.get(compute, 0)
    result = {compute: max(size.immovable, quotas.get(compute, 0)), **{d: n for d, n in quotas.items() if d != compute}}
    for device in reversed([device for device in result if device != compute]):
        given = min(max(0, missing), result[device])
        result[device] -= given
        missing -= given
    return result


def virtual_quotas(request: VirtualVram, size: ModelSize, budgets: Budgets, compute: DeviceId) -> Quotas:
    """`request.bytes` leave the compute device (all that can, if that is less); donors fill in the order given."""
    left = min(request.bytes, size.movable)
    quotas = {compute: size.total - left}
    if not left:
        return quotas
    if compute in request.donors:
        raise AllocationError(
            f"{compute} computes, so it cannot be its own donor; choose another device, for example cpu"
        )
    for donor in request.donors[:-1]:
        budget = lookup(donor, budgets)
        quotas[donor] = min(left, room(beside_disk(budget) if DISK in request.donors else budget, size))
        left -= quotas[donor]
    lookup(request.donors[-1], budgets)
    quotas[request.donors[-1]] = left
    return quotas


def auto_leaving(request: Auto, size: ModelSize, budget: DeviceBudget) -> int:
    """Bytes that have to leave the compute device so that the reserve stays free: none, if the model fits beside it."""
    if request.reserve is not None and not budget.known:
        raise AllocationError(
            f"{format_bytes(request.reserve)} of {budget.device} are to stay free, but that device does not tell how "
            f"much it has; write auto, or what rests there, for example {budget.device},4gb;cpu,*"
        )
    reserve = default_reserve(budget) if request.reserve is None else request.reserve
    usable = budget.free - reserve
    if size.total <= usable:
        return 0
    leaving = min(size.movable, size.total + size.staging - usable)
    if size.total - leaving + size.ring_for(leaving) > usable:
        raise DoesNotFit(_even_at_best(budget, size, reserve))
    return leaving


def _even_at_best(budget: DeviceBudget, size: ModelSize, reserve: int) -> str:
    needed = size.immovable + size.ring_for(size.movable)
    problem = f"{format_bytes(needed)} are needed on {budget.device} even if everything that can leave it does"
    if needed > budget.free:
        return f"{problem}, but {format_bytes(budget.free)} are free there; compute on a device with more free memory"
    asked = f"{format_bytes(reserve)} of the {format_bytes(budget.free)} free there are to stay free for inference"
    return f"{problem}, but {asked}; write auto,{write_bytes_below(budget.free - needed)}"


def auto_quotas(leaving: int, donors: Iterable[DeviceBudget], size: ModelSize, compute: DeviceId) -> Quotas | None:
    """Share `leaving` among the donors by the speed of their links, each within its room; None if it has no room."""
    open_donors = list(donors)
    rooms = {budget.device: room(budget, size) for budget in open_donors}
    if leaving > sum(rooms.values()):
        return None
    quotas = {compute: size.total - leaving, **{budget.device: 0 for budget in open_donors}}
    left = leaving
    while left:
        speeds = [(budget.device, max(1, int(budget.link_speed))) for budget in open_donors]
        for device, share in _in_proportion(speeds, left).items():
            take = min(share, rooms[device] - quotas[device])
            quotas[device] += take
            left -= take
        open_donors = [budget for budget in open_donors if quotas[budget.device] < rooms[budget.device]]
    return quotas


def overflowing_quotas(
    leaving: int, donors: Iterable[DeviceBudget], disk: DeviceBudget, size: ModelSize, compute: DeviceId
) -> Quotas | None:
    """All room of the donors, which is too little, and what is left on disk; None if that cannot hold it."""
    quotas = {compute: size.total - leaving, **{budget.device: room(budget, size) for budget in donors}}
    left = size.total - sum(quotas.values())
    return {**quotas, DISK: left} if left <= disk.free else None


def check_room(held: Quotas, size: ModelSize, budgets: Budgets, compute: DeviceId, request: Request) -> None:
    """Raise `DoesNotFit` if a device would hold more than it has free, with what would fit instead."""
    ring = size.ring_for(size.total - held.get(compute, 0))
    for device, count in held.items():
        free = lookup(device, budgets).free
        needed = count + (ring if device == compute else 0)
        if needed > free:
            staging = f" and {format_bytes(ring)} for staging" if device == compute and ring else ""
            raise DoesNotFit(
                f"{format_bytes(count)} of the model are to rest on {device}{staging}, "
                f"but {format_bytes(free)} are free there; {_what_would_fit(device, size, budgets, compute, request)}"
            )


def _what_would_fit(device: DeviceId, size: ModelSize, budgets: Budgets, compute: DeviceId, request: Request) -> str:
    """What to write instead, in the form of the request that does not fit."""
    if device != compute:
        fits = room(budgets[device], size)
        if isinstance(request, VirtualVram):
            return f"{format_bytes(fits)} fit there for certain: lower the virtual VRAM or add a donor"
        other = "disk" if device.is_cpu and DISK in budgets else "another device"
        return f"write {device},{write_bytes_below(fits)} or less, and give the rest to {other}"
    fits = room(budgets[compute], size) - size.staging
    if fits < size.immovable:
        needed = size.immovable + size.ring_for(size.movable)
        return (
            f"{format_bytes(needed)} are needed there even if everything that can leave does: "
            "compute on a device with more free memory"
        )
    if isinstance(request, VirtualVram):
        return f"set the virtual VRAM to {format_bytes(size.total - fits)} or more"
    return f"write {compute},{write_bytes_below(fits)} or less, and give the rest to another device"
