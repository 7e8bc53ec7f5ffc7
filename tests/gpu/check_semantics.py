"""Does a real GPU behave as the simulated devices say it does?

    python tests/gpu/check_semantics.py [results.json]

Needs torch with CUDA and one GPU; takes seconds. Prints a table, then the same as JSON. Every check states what the
simulation assumes; the exit code is 1 if the device disagrees anywhere. The same script runs on the simulation itself:

    SIMDEV=cuda python tests/sim/serve.py tests/gpu/check_semantics.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

Outcome = tuple[bool, str]  # the device agrees; what was seen
MiB = 1024**2
BUSY_CYCLES = 300_000_000  # a tenth of a second or more at GPU clock rates
CHECKS: list[Callable[[], Outcome]] = []


def check(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    CHECKS.append(function)
    return function


def busy(stream: torch.cuda.Stream | None = None) -> None:
    """Keep a stream busy, so that what is queued behind this is late."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)


def all_equal(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


# ---------------------------------------------------------------- copies between host and device
@check
def pageable_upload_is_staged() -> Outcome:
    """A non_blocking upload from pageable memory has read its source when the call returns."""
    seen = []
    for size in (8 * 1024, 64 * MiB):
        source = torch.ones(size, dtype=torch.uint8)
        torch.cuda.synchronize()
        busy()
        target = source.to("cuda", non_blocking=True)
        source.fill_(7)
        seen.append(all_equal(target.cpu(), 1))
    return all(seen), f"8 KiB: {seen[0]}, 64 MiB: {seen[1]}"


@check
def pinned_upload_reads_late() -> Outcome:
    """A non_blocking upload from pinned memory reads its source when the stream gets there."""
    source = torch.ones(MiB, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    busy()
    target = source.to("cuda", non_blocking=True)
    source.fill_(7)
    return all_equal(target.cpu(), 7), f"the device holds {int(target[0])} (1 was there at the call, 7 afterwards)"


@check
def blocking_upload_waits() -> Outcome:
    """A blocking upload from pinned memory is over when the call returns."""
    source = torch.ones(MiB, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    busy()
    target = source.to("cuda")
    source.fill_(7)
    return all_equal(target.cpu(), 1), f"the device holds {int(target[0])}"


@check
def pinned_download_needs_a_wait() -> Outcome:
    """A non_blocking download to pinned memory has not happened when the call returns."""
    source = torch.ones(MiB, dtype=torch.uint8, device="cuda")
    target = torch.zeros(MiB, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    busy()
    target.copy_(source, non_blocking=True)
    early = all_equal(target, 1)
    torch.cuda.synchronize()
    return not early and all_equal(target, 1), f"complete at return: {early}"


@check
def pageable_download_waits() -> Outcome:
    """A non_blocking download to pageable memory is over when the call returns."""
    source = torch.ones(MiB, dtype=torch.uint8, device="cuda")
    target = torch.zeros(MiB, dtype=torch.uint8)
    torch.cuda.synchronize()
    busy()
    target.copy_(source, non_blocking=True)
    early = all_equal(target, 1)
    return early, f"complete at return: {early}"


def _temporary(copy: Callable[[], object]) -> int:
    """Device bytes that a copy allocates and frees again."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _milliseconds(copy: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[2]


@check
def upload_converts_on_the_host_if_blocking_on_the_device_if_not() -> Outcome:
    """fp32 on the host to bf16 on the device: blocking sends 2 bytes per value, non_blocking 4 through a temporary."""
    n = 16 * MiB
    source = torch.zeros(n).pin_memory()
    target = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    seen = {}
    for non_blocking in (False, True):

        def upload(non_blocking: bool = non_blocking) -> None:
            target.copy_(source, non_blocking=non_blocking)

        seen[non_blocking] = _temporary(upload), _milliseconds(upload)
    text = "; ".join(
        f"{'non_blocking' if mode else 'blocking'}: {temporary // MiB} MiB temporary, {ms:.1f} ms"
        for mode, (temporary, ms) in seen.items()
    )
    return seen[False][0] == 0 and seen[True][0] >= 4 * n, text


@check
def download_converts_on_the_device_if_non_blocking() -> Outcome:
    """fp32 on the device to bf16 on the host: blocking sends 4 bytes per value, non_blocking converts first."""
    n = 16 * MiB
    source = torch.zeros(n, device="cuda")
    target = torch.zeros(n, dtype=torch.bfloat16, pin_memory=True)
    blocking = _temporary(lambda: target.copy_(source))
    late = _temporary(lambda: target.copy_(source, non_blocking=True))
    return (
        blocking == 0 and late >= 2 * n,
        f"temporaries: blocking {blocking // MiB} MiB, non_blocking {late // MiB} MiB",
    )


# ---------------------------------------------------------------- host memory
@check
def registered_memory_is_pinned() -> Outcome:
    """cudaHostRegister makes memory pinned where it is: is_pinned() is true, copies read late, views included."""
    runtime = torch.cuda.cudart()
    arena = torch.ones(4 * MiB, dtype=torch.uint8)
    code = int(runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0))
    pinned = arena.is_pinned() and arena[MiB:].is_pinned()
    torch.cuda.synchronize()
    busy()
    target = arena[MiB:].to("cuda", non_blocking=True)
    arena.fill_(7)
    late = all_equal(target.cpu(), 7)
    torch.cuda.synchronize()
    undone = int(runtime.cudaHostUnregister(arena.data_ptr()))
    return (code, pinned, late, undone, arena.is_pinned()) == (0, True, True, 0, False), (
        f"register {code}, is_pinned {pinned}, read late {late}, unregister {undone}, still pinned {arena.is_pinned()}"
    )


@check
def non_blocking_download_allocates_pinned_memory() -> Outcome:
    """`.to("cpu", non_blocking=True)` returns pinned memory."""
    back = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return back.is_pinned(), f"is_pinned {back.is_pinned()}"


# ---------------------------------------------------------------- streams and events
@check
def side_streams_do_not_wait_for_the_default_stream() -> Outcome:
    """Streams of torch's pool run beside the default stream without any order between them."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    busy()
    default_done = torch.cuda.Event()
    default_done.record()
    with torch.cuda.stream(side):
        torch.zeros(4, device="cuda")
    side.synchronize()
    finished = default_done.query()
    torch.cuda.synchronize()
    return not finished, f"the default stream had finished: {finished}"


@check
def streams_come_from_a_pool_of_32() -> Outcome:
    """torch.cuda.Stream() hands out 32 streams per priority in turn."""
    normal = {torch.cuda.Stream().stream_id for _ in range(100)}
    urgent = {torch.cuda.Stream(priority=-1).stream_id for _ in range(100)}
    return (len(normal), len(urgent), len(normal & urgent)) == (32, 32, 0), f"{len(normal)} and {len(urgent)} distinct"


@check
def events() -> Outcome:
    """An event that was never recorded is done and holds nobody; a recorded one is done when its stream got there."""
    fresh = torch.cuda.Event()
    seen = [fresh.query()]
    torch.cuda.current_stream().wait_event(fresh)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    busy(side)
    event = side.record_event()
    seen.append(not event.query())
    event.synchronize()
    seen.append(event.query())
    return all(seen), f"fresh done {seen[0]}, pending not done {seen[1]}, done after synchronize {seen[2]}"


@check
def waiting_orders_streams() -> Outcome:
    """wait_event makes another stream see what was copied before the event."""
    side = torch.cuda.Stream()
    source = torch.ones(MiB, dtype=torch.uint8).pin_memory()
    target = torch.zeros(MiB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    busy(side)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    return all_equal((target + 0).cpu(), 1), "the reader saw the copy"


@check
def elapsed_time_needs_finished_events() -> Outcome:
    """elapsed_time raises while the second event is pending, and is not negative afterwards."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    busy()
    last.record()
    try:
        first.elapsed_time(last)
        raised = False
    except (RuntimeError, ValueError):
        raised = True
    last.synchronize()
    return raised and first.elapsed_time(last) >= 0, f"raised {raised}, then {first.elapsed_time(last):.1f} ms"


# ---------------------------------------------------------------- the caching allocator
def _use_after_free(record: bool) -> bool:
    """Whether a late reader on another stream still sees what a freed tensor held."""
    torch.cuda.empty_cache()
    side = torch.cuda.Stream()
    value = torch.ones(4 * MiB, dtype=torch.uint8, device="cuda")
    result = torch.zeros(4 * MiB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    busy(side)
    with torch.cuda.stream(side):
        result.copy_(value, non_blocking=True)
    if record:
        value.record_stream(side)
    del value
    reused = torch.full((4 * MiB,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del reused
    return all_equal(result, 1)


@check
def freed_memory_is_reused_at_once() -> Outcome:
    """Without record_stream the next allocation may overwrite what another stream still reads; with it, not."""
    without, recorded = _use_after_free(False), _use_after_free(True)
    return not without and recorded, f"survived: without record_stream {without}, with it {recorded}"


@check
def allocations_are_rounded_to_512_bytes() -> Outcome:
    """memory_allocated counts multiples of 512 bytes."""
    before = torch.cuda.memory_allocated()
    kept = torch.zeros(1000, device="cuda")
    size = torch.cuda.memory_allocated() - before
    return size == 4096, f"{kept.nbytes} bytes count as {size}"


# ---------------------------------------------------------------- tensors
@check
def parameters_may_point_into_a_byte_ring() -> Outcome:
    """Slices of a uint8 buffer, viewed as bf16 and fp8, serve as parameter data, also when made in inference mode."""
    ring = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    layer = torch.nn.Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
    weight, x = layer.weight.data.clone(), torch.ones(2, 8, dtype=torch.bfloat16)
    seen = []
    with torch.inference_mode():
        for at in (0, 512):
            view = ring[at : at + weight.nbytes].view(torch.bfloat16).view(8, 8)
            view.copy_(weight)
            layer.weight.data = view
            seen.append(layer.weight.data_ptr() == ring.data_ptr() + at)
            seen.append(bool(torch.allclose(layer(x.cuda()).cpu(), x @ weight.t(), rtol=0.02, atol=0.02)))
        seen.append(ring[1024:1088].view(torch.float8_e4m3fn).view(8, 8).to(torch.bfloat16).sum().item() == 0)
    layer.weight.data = weight
    seen.append(layer.weight.device.type == "cpu")
    return all(seen), f"{sum(seen)} of {len(seen)} uses worked"


@check
def devices_do_not_mix() -> Outcome:
    """Operations refuse CPU tensors beside device tensors, except scalars and indices in x[i]."""
    x, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    index = torch.tensor([0, 2])
    refused = {
        "add": lambda: x + host,
        "matmul": lambda: x @ host,
        "cat": lambda: torch.cat([x, host]),
        "embedding": lambda: torch.nn.functional.embedding(index, x),
        "index from the device": lambda: host[index.cuda()],
    }
    wrong = []
    for name, function in refused.items():
        try:
            function()
            wrong.append(name)
        except RuntimeError:
            continue
    allowed = [(x + torch.tensor(2.0)).sum().item() == 48, x[index].shape == (2, 4)]
    return not wrong and all(allowed), f"not refused: {wrong or 'nothing'}; scalar and index accepted: {allowed}"


NOT_CHECKED = {
    "copies between devices": "two GPUs are needed to see the barrier, peer access and conversion at the source",
}


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here")
    start = time.perf_counter()
    rows = []
    for function in CHECKS:
        agrees, seen = function()
        torch.cuda.synchronize()
        rows.append({"check": function.__name__, "assumed": function.__doc__, "agrees": agrees, "seen": seen})
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": round(time.perf_counter() - start, 1),
        "checks": rows,
        "not_checked": NOT_CHECKED,
    }
    out = sys.stdout.write
    for row in rows:
        out(f"{'agrees  ' if row['agrees'] else 'DIFFERS '} {row['check']}\n           {row['seen']}\n")
    for name, reason in NOT_CHECKED.items():
        out(f"unchecked {name}\n           {reason}\n")
    text = json.dumps(report, indent=1)
    out(text + "\n")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text)
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
