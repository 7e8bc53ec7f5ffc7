"""Devices and models that the planner's tests share."""

from __future__ import annotations

from collections.abc import Sequence

from multigpu.plan import CPU, Block, DeviceBudget, DeviceId, Plan
from multigpu.units import GIB

GPU0 = DeviceId("cuda", 0)
GPU1 = DeviceId("cuda", 1)
GPU2 = DeviceId("cuda", 2)


def blocks_of(*sizes: int, seconds: float | None = None) -> list[Block]:
    """Blocks b0, b1, ... of these sizes, in this order."""
    return [Block(f"b{i}", size, compute=seconds) for i, size in enumerate(sizes)]


def budget(device: DeviceId, free: int, bandwidth: float | None = None, total: int | None = None) -> DeviceBudget:
    return DeviceBudget(device, free if total is None else total, free, bandwidth)


def roomy(*devices: DeviceId, free: int = 1000 * GIB) -> list[DeviceBudget]:
    """Budgets with more room than any test needs."""
    return [budget(device, free) for device in devices or (GPU0, GPU1, CPU)]


def homes(plan: Plan) -> dict[str, str]:
    return {placement.block: str(placement.home) for placement in plan.placements}


FLUX_SECONDS = 0.1975
FLUX_LINK = 53.6e9


def flux_blocks(seconds: float = FLUX_SECONDS, text: int = 512, image: int = 4096) -> list[Block]:
    """Flux-dev in bf16, one block per linear layer, in order of execution: 23.8 GB.

    Compute is shared out by the operations of each layer; attention counts with the projection behind it.
    """
    width, both = 3072, text + image
    attention = 4 * both * both * width
    layers: list[tuple[str, int, int, int, int]] = [
        ("img_in", 64, width, image, 0),
        *((f"{name}.in", into, width, 1, 0) for name, into in (("time", 256), ("vector", 768), ("guidance", 256))),
        *((f"{name}.out", width, width, 1, 0) for name in ("time", "vector", "guidance")),
        ("txt_in", 4096, width, text, 0),
    ]
    for i in range(19):
        layers += [(f"double.{i}.{stream}_mod", width, 6 * width, 1, 0) for stream in ("img", "txt")]
        layers += [(f"double.{i}.{s}_qkv", width, 3 * width, n, 0) for s, n in (("img", image), ("txt", text))]
        for stream, tokens, extra in (("img", image, attention), ("txt", text, 0)):
            layers.append((f"double.{i}.{stream}_proj", width, width, tokens, extra))
            layers.append((f"double.{i}.{stream}_mlp.0", width, 4 * width, tokens, 0))
            layers.append((f"double.{i}.{stream}_mlp.2", 4 * width, width, tokens, 0))
    for i in range(38):
        layers.append((f"single.{i}.mod", width, 3 * width, 1, 0))
        layers.append((f"single.{i}.linear1", width, 7 * width, both, 0))
        layers.append((f"single.{i}.linear2", 5 * width, width, both, attention))
    layers += [("final.mod", width, 2 * width, 1, 0), ("final.linear", width, 64, image, 0)]
    work = [2 * into * out * tokens + extra for _, into, out, tokens, extra in layers]
    rate = seconds / sum(work)
    return [
        Block(name, 2 * (into * out + out), "linear", compute=operations * rate)
        for (name, into, out, _, _), operations in zip(layers, work, strict=True)
    ]


def total_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.bytes for block in blocks)
