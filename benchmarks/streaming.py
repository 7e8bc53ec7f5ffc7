"""Seconds per step of a Flux-shaped model, streamed from RAM, against all resident and against ComfyUI's own offload.

    python benchmarks/streaming.py [--dynamic] [--host TREE] [--streamed 25 50 75 100] [--fp8] [--gguf PACK] [--small]

Needs one NVIDIA GPU that holds the whole model. Every figure of one table comes from one run of one process. The limit
is max(T, bytes streamed / link): T is the resident step, the link is measured first. `--gguf` takes the folder of
ComfyUI-GGUF: that pack loads the model, from a GGUF file in Q8_0. `--small` is to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
import bench_host as host

GIB = 1 << 30


def link_speed() -> float:
    """Bytes per second from registered RAM to the GPU, 1 GiB at a time."""
    from multigpu.stream.arena import Arena

    arena = Arena(torch.device("cpu"), [GIB])
    source = arena.room(GIB).flat.zero_()
    arena.pin(torch.device("cuda:0"))
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, GIB / (time.perf_counter() - begin))
    arena.unpin()
    return best


def ours(
    patcher: Any,
    forward: host.Forward,
    percent: int,
    ring: int | None,
    want: torch.Tensor,
    baseline: dict[str, int],
) -> dict[str, Any]:
    from multigpu.plan import CPU, planner

    host.unload()
    with mock.patch.object(planner, "default_ring", planner.default_ring if ring is None else lambda *_: ring):
        placed = host.place(patcher, f"cuda:0,{100 - percent}%;cpu,*")
    plan = placed.placed.plan
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    host.load_on_device(placed)
    loaded = time.perf_counter() - begin
    equal = torch.equal(forward(placed), want)
    seconds = forward.seconds(placed)
    equal &= torch.equal(forward(placed), want)
    row = {
        "who": "multigpu",
        "streamed": percent,
        "seconds": seconds,
        "equal": equal,
        "load": loaded,
        "streamed_bytes": plan.bytes_on(CPU),
        "ring": plan.ring_bytes,
        "peak": torch.cuda.max_memory_allocated(),
        "planned": plan.bytes_on(plan.compute) + plan.ring_bytes + baseline["activations"],
        "ram": host.anonymous_bytes() - baseline["ram"],
        "forecast": plan.forecast.step if plan.forecast else None,
    }
    host.unload()
    return row


def core_static(patcher: Any, forward: host.Forward, percent: int) -> dict[str, Any]:
    """ComfyUI's static patcher with a budget that leaves `percent` of the weights in RAM."""
    host.unload()
    size = patcher.model_size()
    buffer = 0 if percent == 100 else 400 << 20
    begin = time.perf_counter()
    with torch.inference_mode():
        patcher.partially_load(torch.device("cuda:0"), max(size * (100 - percent) // 100 + buffer, 1))
    loaded = time.perf_counter() - begin
    row = {
        "who": "core static",
        "streamed": percent,
        "seconds": forward.seconds(patcher),
        "load": loaded,
        "streamed_bytes": size - patcher.loaded_size(),
    }
    patcher.detach()
    host.unload()
    return row


def core_dynamic(patcher: Any, forward: host.Forward, percent: int) -> dict[str, Any]:
    """ComfyUI's DynamicVRAM with its residency capped."""
    host.unload()
    size = patcher.model_size()
    host.load_on_device(patcher)
    patcher._vbar_get().set_watermark(size * (100 - percent) // 100)
    row = {
        "who": "core dynamic",
        "streamed": percent,
        "seconds": forward.seconds(patcher),
        "streamed_bytes": size * percent // 100,
    }
    host.unload()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--streamed", type=int, nargs="+", default=[25, 40, 50, 75, 100])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--gguf", metavar="PACK")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--core", action="store_true", help="measure ComfyUI's own offload too")
    parser.add_argument("--ring", type=int, help="MiB of staging memory")
    options = parser.parse_args()
    host.start(options.host, options.dynamic)
    path = host.flux_file("small" if options.small else "whole")
    if options.gguf:
        path, source = path.replace(".safetensors", ".gguf"), path
        host.write_gguf(source, path)
    link = link_speed()
    baseline = {"ram": host.anonymous_bytes()}
    forward = host.Forward(torch.device("cuda:0"))
    dtype = torch.float8_e4m3fn if options.fp8 else None
    load = (lambda: host.load_gguf(path, options.gguf)) if options.gguf else (lambda: host.load(path, dtype))
    patcher = load()
    host.load_on_device(patcher)
    resident = forward.seconds(patcher, steps=10)
    want, baseline["activations"] = forward.with_peak(patcher)
    print(
        f"link {link / 1e9:.1f} GB/s, resident step {resident:.4f} s, model {patcher.model_size() / 1e9:.2f} GB",
        flush=True,
    )
    core = load() if options.core else None  # of its own: what was placed once rests in other memory
    rows: list[dict[str, Any]] = []
    for percent in options.streamed:
        rows.append(ours(patcher, forward, percent, options.ring and options.ring << 20, want, baseline))
        if options.core:
            rows.append((core_dynamic if options.dynamic else core_static)(core, forward, percent))
        for row in rows[-2 if options.core else -1 :]:
            limit = max(resident, row["streamed_bytes"] / link)
            row["over_limit"] = row["seconds"] / limit
            print(
                f"{row['who']:13} {percent:4} %  {row['seconds']:.4f} s  {row['over_limit']:.3f} of limit {limit:.4f}  "
                + " ".join(
                    f"{k}={v / 1e9:.2f}GB"
                    if k in ("streamed_bytes", "peak", "planned", "ram", "ring") and v is not None
                    else f"{k}={v}"
                    for k, v in row.items()
                    if k not in ("who", "streamed", "seconds", "over_limit")
                ),
                flush=True,
            )
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "streaming.json").write_text(
            json.dumps({"link": link, "resident": resident, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
