"""`make_plan`: from a request, a model's blocks and the devices' budgets to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import AllocationError, DoesNotFit, InputError
from ..units import KIB, MIB, format_bytes
from .assignment import Work
from .forecast import foreseen
from .quotas import (
    Budgets,
    ModelSize,
    Quotas,
    auto_leaving,
    auto_quotas,
    beside_disk,
    check_compute,
    check_room,
    expert_quotas,
    lookup,
    overflowing_quotas,
    virtual_quotas,
)
from .request import Auto, Expert, Request, VirtualVram
from .ring_model import RESIDENT, RingModel
from .search import Assignment, Donors, best_links, quick_links
from .types import DISK, Block, DeviceBudget, DeviceId, Placement, Plan, Reason, Timing

RING_BYTES = 512 * MIB
"""Staging memory for a large model."""
SECONDS_PER_BYTE = 1e-11
"""Assumed when no block's compute time is known: about that of a bf16 image model at 1024x1024 on a fast GPU."""
TINY_BYTES = 256 * KIB
"""Up to this size the fixed cost of a copy is larger than that of its bytes."""
_TINY_SHARE = 100
_LOW_INTENSITY = 0.5


def make_plan(
    request: Request,
    blocks: Iterable[Block],
    budgets: Iterable[DeviceBudget],
    compute: DeviceId,
    *,
    ring_bytes: int | None = None,
) -> Plan:
    """The plan for one model: every block gets a home, with the reason.

    The bytes of all homes add up to the model's. No donor exceeds its quota by one block or more, the compute device
    never exceeds it, and no device its free memory. `ring_bytes` is the staging memory on the compute device (None:
    `default_ring`).

    Raises `UnknownDevice` for a device without a budget, `DoesNotFit` when the bytes have no room, `AllocationError`
    for a request that contradicts itself. The same input gives the same plan in every process.
    """
    ordered = execution_order(blocks)
    known = _by_device(budgets)
    check_compute(compute)
    lookup(compute, known)
    if request.compute not in (None, compute):
        raise AllocationError(
            f"the request names {request.compute} as compute device, but {compute} was chosen; name the same in both"
        )
    fixed = immovable_reasons(ordered)
    work = _work(ordered, fixed)
    size = _size(work, ring_bytes)
    quotas = _quotas(request, work, size, known, compute)
    donors = _donors(quotas, compute)
    if donors == [DISK]:  # then what cannot rest there has to stay
        fixed = [
            reason or (None if b.in_file else Reason.NOT_IN_FILE) for b, reason in zip(ordered, fixed, strict=True)
        ]
        work = _work(ordered, fixed)
        size = _size(work, ring_bytes)
        quotas = _quotas(request, work, size, known, compute)
        donors = _donors(quotas, compute)
    links = best_links(work, _columns(quotas, donors, known), _ring(size, donors, known))
    plan = _build(ordered, fixed, work, size, links, compute, donors, known)
    check_room(plan.bytes_by_home(), size, known, compute, request)
    return plan


def possible_donors(
    request: Request, blocks: Iterable[Block], budgets: Iterable[DeviceBudget], compute: DeviceId
) -> frozenset[DeviceId]:
    """The devices whose link speeds `make_plan` would use for the same input: none if nothing leaves `compute`.

    For `auto` these are all other devices, for every other request the donors that it names. Link speeds and compute
    times in the input are ignored. Raises what `make_plan` would.
    """
    ordered = execution_order(blocks)
    known = _by_device(budgets)
    check_compute(compute)
    lookup(compute, known)
    work = _work(ordered, immovable_reasons(ordered))
    size = _size(work, None)
    if isinstance(request, Auto):
        return frozenset(known) - {compute} if auto_leaving(request, size, known[compute]) else frozenset()
    quotas = _quotas(request, work, size, known, compute)
    return frozenset(device for device, count in quotas.items() if count) - {compute}


def _donors(quotas: Quotas, compute: DeviceId) -> list[DeviceId]:
    return [device for device, count in quotas.items() if device != compute and count]


def _by_device(budgets: Iterable[DeviceBudget]) -> dict[DeviceId, DeviceBudget]:
    known: dict[DeviceId, DeviceBudget] = {}
    for budget in budgets:
        if known.setdefault(budget.device, budget) is not budget:
            raise InputError(f"{budget.device} has two budgets; give one for each device")
    return known


def execution_order(blocks: Iterable[Block]) -> list[Block]:
    """Blocks by `order`; a block without an order follows the block that is declared before it."""
    keyed: list[tuple[int, Block]] = []
    for block in blocks:
        before = keyed[-1][0] if keyed else -1
        keyed.append((before if block.order is None else block.order, block))
    return [block for _, block in sorted(keyed, key=lambda entry: entry[0])]


def immovable_reasons(blocks: Sequence[Block]) -> list[Reason | None]:
    """Why each block has to stay, None where it may leave.

    Tiny blocks are those of at most `TINY_BYTES` as long as all blocks of that size or smaller make up at most 1 % of
    the model: a model of nothing but small blocks can still be spread.
    """
    allowance, tiny = sum(block.bytes for block in blocks) // _TINY_SHARE, 0
    for size, count in sorted(Counter(block.bytes for block in blocks).items()):
        allowance -= size * count
        if size > TINY_BYTES or allowance < 0:
            break
        tiny = size
    return [block.immovable or (Reason.TINY if block.bytes <= tiny else None) for block in blocks]


def default_ring(largest: int, movable: int) -> int:
    """Staging memory: `RING_BYTES`, for small models an eighth of what can leave, but always room for two blocks."""
    return max(min(RING_BYTES, movable // 8), 2 * largest)


def _seconds(blocks: Sequence[Block]) -> tuple[float, ...]:
    """Compute seconds per block; unknown ones are estimated at the rate of those that are known."""
    timed = [(block.compute, block.bytes) for block in blocks if block.compute is not None]
    known_bytes = sum(size for _, size in timed)
    rate = sum(seconds for seconds, _ in timed) / known_bytes if known_bytes else SECONDS_PER_BYTE
    return tuple(rate * block.bytes if block.compute is None else block.compute for block in blocks)


def _work(blocks: Sequence[Block], fixed: Sequence[Reason | None]) -> Work:
    movable = tuple(i for i, reason in enumerate(fixed) if reason is None)
    in_file = (i for i, block in enumerate(blocks) if block.in_file)
    once = (i for i, block in enumerate(blocks) if block.once)
    return Work.of(tuple(block.bytes for block in blocks), _seconds(blocks), movable, in_file, once)


def _size(work: Work, ring_bytes: int | None) -> ModelSize:
    largest = max((work.sizes[i] for i in work.movable), default=0)
    total, movable = sum(work.sizes), work.movable_bytes
    ring = default_ring(largest, movable) if ring_bytes is None else ring_bytes
    return ModelSize(total, total - movable, largest, ring)


def _quotas(request: Request, work: Work, size: ModelSize, budgets: Budgets, compute: DeviceId) -> Quotas:
    if isinstance(request, Expert):
        return expert_quotas(request, size, budgets, compute)
    if isinstance(request, Auto):
        return _auto(request, work, size, budgets, compute)
    assert isinstance(request, VirtualVram)
    return virtual_quotas(request, size, budgets, compute)


def _auto(request: Auto, work: Work, size: ModelSize, budgets: Budgets, compute: DeviceId) -> Quotas:
    """As little as possible leaves, to the donors that are fastest in the simulator; of equal sets the smallest.

    To disk goes only what has no room on any other device.
    """
    leaving = auto_leaving(request, size, budgets[compute])
    if not leaving:
        return {compute: size.total}
    disk = budgets.get(DISK)
    others = [budget if disk is None else beside_disk(budget) for budget in budgets.values()]
    others = sorted((b for b in others if b.known and b.device not in (compute, DISK)), key=lambda b: -b.link_speed)
    best: Quotas | None = None
    best_seconds = float("inf")
    for count in range(1, len(others) + 1):
        quotas = auto_quotas(leaving, others[:count], size, compute)
        if quotas is None:
            continue
        donors = [device for device, held in quotas.items() if device != compute and held]
        links = quick_links(work, _columns(quotas, donors, budgets))
        seconds = links.seconds(work, _ring(size, donors, budgets))
        if seconds < best_seconds:
            best, best_seconds = quotas, seconds
    if best is None and disk is not None:
        best = overflowing_quotas(leaving, others, disk, size, compute)
    if best is None:
        free = ", ".join(f"{b.device} {format_bytes(b.free)}" for b in others) or "there is no other device"
        raise DoesNotFit(
            f"{format_bytes(leaving)} have to leave {compute}, but the other devices cannot hold them (free: {free}); "
            "free memory on one of them, or use a smaller or quantised model"
        )
    return best


def _ring(size: ModelSize, donors: Sequence[DeviceId], budgets: Budgets) -> RingModel:
    return RingModel(size.staging, tuple(budgets[device].link_speed for device in donors))


def _columns(quotas: Quotas, donors: Sequence[DeviceId], budgets: Budgets) -> Donors:
    offers = [budgets[device] for device in donors]
    return Donors(
        tuple(quotas[device] for device in donors),
        tuple(offer.free for offer in offers),
        tuple(offer.link_speed for offer in offers),
        donors.index(DISK) if DISK in donors else None,
    )


def _build(
    blocks: Sequence[Block],
    fixed: Sequence[Reason | None],
    work: Work,
    size: ModelSize,
    assignment: Assignment,
    compute: DeviceId,
    donors: Sequence[DeviceId],
    budgets: Budgets,
) -> Plan:
    """The plan with a reason for each block, and what the simulator expects of it."""
    threshold = _LOW_INTENSITY * sum(work.seconds) / size.total if size.total and donors else 0.0
    placements: list[Placement] = []
    leaving = 0
    for i, (block, reason, link) in enumerate(zip(blocks, fixed, assignment.links, strict=True)):
        home = compute if link == RESIDENT else donors[link]
        if link != RESIDENT:
            leaving += block.bytes
            reason = Reason.HOISTED if i in assignment.hoisted else Reason.STREAMED
        elif reason is None:
            reason = Reason.LOW_INTENSITY if work.seconds[i] < threshold * block.bytes else Reason.RESIDENT
        placements.append(Placement(block.name, block.bytes, home, compute, reason, block.once))
    speeds = {device: budgets[device].link_speed for device in (*donors, *budgets) if device != compute}
    plan = Plan(compute, tuple(placements), size.ring_for(leaving))
    return foreseen(plan, Timing(work.seconds, tuple(speeds.items())))
