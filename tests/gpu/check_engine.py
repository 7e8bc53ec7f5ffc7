"""The engine on a real GPU: bit-identical to the resident model, memory as planned, nothing races.

    python tests/gpu/check_engine.py [--dynamic] [--host TREE] [--runs 20] [--small]

Runs a Flux-shaped model in bf16 and with fp8 storage, resident and then placed at several shares with poisoned ring
bytes, `--runs` forwards each; a LoRA on and off; an unplaced model beside it. Then samples with layers computed ahead:
with other samplers, guidance and batches, and a LoRA; MULTIGPU_HOIST must not be off. Prints one line per check and
exits 1 if any failed. One GPU is enough; copies between GPUs are left to the simulator.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any
from unittest import mock

import bench_host as host
import torch

SLACK = 300 << 20


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, what: str, true: bool, detail: str = "") -> None:
        self.failed += not true
        print(f"{'ok    ' if true else 'FAILED'} {what} {detail}", flush=True)


def lora(patcher: Any, strength: float) -> Any:
    """A random rank-8 LoRA on every linear of the blocks."""
    import comfy.sd

    random = torch.Generator().manual_seed(4)
    tensors = {}
    for name, module in patcher.model.named_modules():
        if (
            "_blocks." in name
            and isinstance(getattr(module, "weight", None), torch.Tensor)
            and module.weight.dim() == 2
        ):
            out, into = module.weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, into, generator=random) * 0.02
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, 8, generator=random) * 0.02
    return comfy.sd.load_lora_for_models(patcher, None, tensors, strength, 0)[0]


def check_model(check: Checks, path: str, forward: host.Forward, dtype: torch.dtype | None, runs: int) -> None:
    from multigpu.runtime import current

    name, states = str(dtype or torch.bfloat16).removeprefix("torch."), current().states
    host.unload()
    ram = host.anonymous_bytes()
    patcher = host.load(path, dtype)
    host.load_on_device(patcher)
    forward(patcher)
    want, activations = forward.with_peak(patcher)
    size = os.path.getsize(path) * (dtype or torch.bfloat16).itemsize // 2
    check(f"{name}: resident runs agree", torch.equal(forward(patcher), want))
    check(f"{name}: numbers are finite", bool(want.isfinite().all()))
    for streamed in (25, 60, 100):
        host.unload()
        placed = host.place(patcher, f"cuda:0,{100 - streamed}%;cpu,*")
        if placed.model is not patcher.model:
            patcher = placed  # DynamicVRAM: the static copy is the one to go on with, and the first is let go
        torch.cuda.reset_peak_memory_stats()
        host.load_on_device(placed)
        same = sum(torch.equal(forward(placed), want) for _ in range(runs))
        plan = placed.placed.plan
        planned = plan.bytes_on(plan.compute) + plan.ring_bytes + activations
        peak, homed = torch.cuda.max_memory_allocated(), plan.total_bytes - plan.bytes_on(plan.compute)
        grown = host.anonymous_bytes() - ram
        check(f"{name}: {streamed} % streamed, ring poisoned", same == runs, f"{same} of {runs} equal")
        check(
            f"{name}: {streamed} % streamed, peak VRAM",
            peak <= planned + SLACK,
            f"{peak / 1e9:.2f} of {planned / 1e9:.2f} GB",
        )
        check(
            f"{name}: {streamed} % streamed, RAM",
            grown <= homed + SLACK,
            f"{grown / 1e9:.2f} for {homed / 1e9:.2f} GB homed there",
        )
        check(
            f"{name}: the model has the size asked for",
            abs(plan.total_bytes - size) < 0.02 * size,
            f"{plan.total_bytes / 1e9:.2f} GB",
        )
    patched = lora(placed, 0.7)
    begin = time.perf_counter()
    host.load_on_device(patched)
    on = time.perf_counter() - begin
    with_lora = forward(patched)
    grown = host.anonymous_bytes() - ram
    check(f"{name}: LoRA changes the picture", not torch.equal(with_lora, want), f"applied in {on:.1f} s")
    check(f"{name}: RAM with the LoRA", grown <= 1.1 * plan.total_bytes + 2.5e9, f"{grown / 1e9:.2f} GB")
    begin = time.perf_counter()
    host.load_on_device(placed)
    off = time.perf_counter() - begin
    check(f"{name}: LoRA taken off exactly", torch.equal(forward(placed), want), f"taken off in {off:.1f} s")
    host.unload()
    host.load_on_device(patched)
    check(f"{name}: LoRA after unloading", torch.equal(forward(patched), with_lora))
    del patched
    host.unload()
    check(
        f"{name}: nothing left on the device",
        torch.cuda.memory_allocated() < 64 << 20,
        f"{torch.cuda.memory_allocated() / 1e6:.1f} MB",
    )
    check(f"{name}: no page left pinned", states.of(placed).residence.idle)


def sampled(patcher: Any, guidance: float = 3.5, sampler: str = "euler", batch: int = 1) -> torch.Tensor:
    """What six steps at 512 x 512 pixels give."""
    import comfy.sample

    random = torch.Generator().manual_seed(5)
    noise = torch.randn(batch, 16, 64, 64, generator=random)
    text = torch.randn(1, 256, host.FLUX_DEV["context"], generator=random)
    pooled = torch.randn(1, host.FLUX_DEV["vector"], generator=random)
    prompt = [[text, {"pooled_output": pooled, "guidance": guidance}]]
    how = (6, 1.0, sampler, "simple", prompt, prompt, torch.zeros_like(noise))
    with torch.inference_mode():
        return comfy.sample.sample(patcher, noise, *how, disable_pbar=True, seed=2)


def settled_streamer(placed: Any, residence: Any) -> Any:
    """The streamer, once the plan stays as it is: measured steps may change it before the next prompt."""
    before = None
    while residence.streamer is not before:  # plans are changed a few times at most
        before = residence.streamer
        sampled(placed)
    return before


def check_hoisting(check: Checks, path: str, dtype: torch.dtype | None) -> None:
    """Half of the model in RAM: layers that see one token are copied only in the first step of a run.

    Also where computing hides all copies, so that a plan of its own would not do it.
    """
    from multigpu.plan import planner, search

    with mock.patch.object(planner, "best_links", lambda work, donors, ring: search.quick_links(work, donors)):
        _check_hoisting(check, path, dtype)


def _check_hoisting(check: Checks, path: str, dtype: torch.dtype | None) -> None:
    from multigpu.runtime import current

    name = f"{str(dtype or torch.bfloat16).removeprefix('torch.')}, computed ahead"
    ways: list[dict[str, Any]] = [{}, {"guidance": 1.5}, {"sampler": "heun"}, {"sampler": "dpm_2"}, {"batch": 2}, {}]
    host.unload()
    patcher = host.load(path, dtype)
    host.load_on_device(patcher)
    want = [sampled(patcher, **way) for way in ways]
    check(f"{name}: guidance changes the picture", not torch.equal(want[0], want[1]))
    host.unload()
    placed = host.place(patcher, "cuda:0,50%;cpu,*")
    hoisted = sum(placement.bytes for placement in placed.placed.plan.hoisted)
    check(
        f"{name}: the plan hoists", hoisted > 0, f"{hoisted / 1e9:.2f} of {placed.placed.plan.total_bytes / 1e9:.2f} GB"
    )
    if not hoisted:
        print("       the rest is left out: it needs MULTIGPU_HOIST not to be off", flush=True)
        return
    for way, its in zip(ways, want, strict=True):
        check(f"{name}: {way or 'euler'}", torch.equal(sampled(placed, **way), its))
    streamer = settled_streamer(placed, current().states.of(placed).residence)
    counters, blocks = streamer.counters, streamer.blocks
    rest = sum(block.size for block in blocks) - streamer.hoisting.spared_bytes
    copied, skipped = counters.copied_bytes, counters.hoisted
    sampled(placed)
    each = (counters.copied_bytes - copied) / 6
    check(f"{name}: the same prompt again copies the rest only", each == rest, f"{each / 1e9:.2f} GB per step")
    check(f"{name}: in every step", counters.hoisted - skipped == 6 * len(streamer.hoisting.numbers))
    kept = streamer.hoisting.kept_bytes
    check(f"{name}: kept outputs are small", kept <= 128 << 20, f"{kept / 1e6:.1f} MB")
    patched = lora(placed, 0.7)
    with_lora = sampled(patched)
    check(f"{name}: a LoRA changes the picture", not torch.equal(with_lora, want[0]))
    check(f"{name}: LoRA taken off exactly", torch.equal(sampled(placed), want[0]))
    check(f"{name}: the LoRA again", torch.equal(sampled(patched), with_lora))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    host.start(options.host, options.dynamic)
    path = host.flux_file("small" if options.small else "whole")
    forward = host.Forward(torch.device("cuda:0"))
    host.warm_up(host.flux_file("small"), forward)
    check = Checks()
    from multigpu.stream.streamer import Streamer

    Streamer.poison = True
    for dtype in (None, torch.float8_e4m3fn):
        check_model(check, path, forward, dtype, options.runs)
        check_hoisting(check, path, dtype)
    if options.dynamic:
        beside = host.load(path)
        check("an unplaced model beside it stays dynamic", beside.is_dynamic())
    print(f"{check.failed} failed")
    return int(check.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
