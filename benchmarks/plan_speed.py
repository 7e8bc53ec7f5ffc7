"""How long planning takes: python benchmarks/plan_speed.py [--most BLOCKS] [--repeat N]

Plans models over four devices, beside a plain loop over the blocks that adds up their bytes. The models are such that
the search cannot stop early: the links are as busy as the compute device. Times are the best of N runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from multigpu.plan import CPU, Block, DeviceBudget, DeviceId, make_plan, parse_request

COMPUTE = DeviceId("cuda", 0)
REQUEST = parse_request("cuda:0,40%;cuda:1,15%;cuda:2,15%;cpu,30%")


def model(count: int) -> tuple[list[Block], list[DeviceBudget]]:
    """`count` blocks of 1 to 32 MiB, some that compute little, and budgets whose links just keep up."""
    source = random.Random(count)
    blocks = []
    for i in range(count):
        size = source.randrange(1 << 20, 32 << 20)
        seconds = size * 1e-11 * source.choice((0.01, 1.0, 1.0, 2.0))
        blocks.append(Block(f"blocks.{i}", size, i, seconds))
    total = sum(block.bytes for block in blocks)
    whole = sum(block.compute or 0.0 for block in blocks)
    shares = {DeviceId("cuda", 1): 0.15, DeviceId("cuda", 2): 0.15, CPU: 0.30}
    budgets = [DeviceBudget(COMPUTE, total, total)]
    budgets += [DeviceBudget(device, total, total, share * total / whole) for device, share in shares.items()]
    return blocks, budgets


def plain_loop(blocks: list[Block]) -> int:
    total = 0
    for block in blocks:
        total += block.bytes
    return total


def best(run: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--most", type=int, default=100_000, help="largest number of blocks")
    options.add_argument("--repeat", type=int, default=5)
    chosen = options.parse_args()
    print(f"{'blocks':>8}  {'plain loop':>11}  {'plan':>11}  {'us/block':>9}")
    count = 1000
    while count <= chosen.most:
        blocks, budgets = model(count)
        repeat = chosen.repeat if count <= 10_000 else 1
        loop = best(lambda: plain_loop(blocks), repeat)  # noqa: B023
        planned = best(lambda: make_plan(REQUEST, blocks, budgets, COMPUTE), repeat)  # noqa: B023
        cells = [f"{seconds * 1e3:>8.2f} ms" for seconds in (loop, planned)]
        print(f"{count:>8}  {'  '.join(cells)}  {planned / count * 1e6:>9.2f}")
        count *= 10


if __name__ == "__main__":
    main()
