"""This tree against another one: what a placed Flux-shaped model costs to load, change, run and free, as ratios.

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before [--dynamic] [--streamed 50] [--rounds 2] [--repeats 2] [--small]

Both trees are measured in turns, each time in a new process, which does everything but the first load `--repeats`
times. The least of all counts. Needs one NVIDIA GPU, or `--simulate`: then loading a small model on a simulated GPU
shows what our own code costs, without the noise of large copies (in the development environment, `.venv/bin/python`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def measure(tree: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds for each thing that a user waits for, with the package of `tree`."""
    sys.path[:0] = [tree, str(HERE / "tests" / "gpu")]
    import multigpu.plan  # before `bench_host` puts its own tree in front

    assert str(Path(multigpu.plan.__file__)).startswith(tree), multigpu.plan.__file__
    import bench_host as host
    import check_engine
    import torch

    if options.simulate:
        sys.path.append(str(HERE))
        from tests.sim import simdev

        simdev.install_from_text("cuda:1:24g")
    host.start(options.host, options.dynamic)
    path = host.flux_file(options.size)
    forward = host.Forward(torch.device("cuda:0"))
    result: dict[str, float] = {}

    def seconds(what: str, do: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        value = do()
        torch.cuda.synchronize()
        result[what] = min(time.perf_counter() - begin, result.get(what, math.inf))
        return value

    patcher = host.load(path)
    placed = seconds("place", lambda: host.place(patcher, f"cuda:0,{100 - options.streamed}%;cpu,*"))
    patched, changed = check_engine.lora(placed, 0.7), check_engine.lora(placed, 0.4)
    seconds("first load", lambda: host.load_on_device(placed))
    if not options.simulate:
        result["step"] = forward.seconds(placed)
    for _ in range(options.repeats):
        seconds("LoRA on", lambda: host.load_on_device(patched))
        seconds("LoRA changed", lambda: host.load_on_device(changed))
        if not options.simulate:
            step = forward.seconds(changed)
            result["step with LoRA"] = min(step, result.get("step with LoRA", step))
        seconds("LoRA off", lambda: host.load_on_device(placed))
        seconds("free", host.unload)
        seconds("load again", lambda: host.load_on_device(placed))
    host.unload()
    return result


def write_file(options: argparse.Namespace) -> None:
    """Make the model file, and wait until it is on the disk: writing it would slow down the tree that comes first."""
    sys.path.insert(0, str(HERE / "tests" / "gpu"))
    import bench_host as host

    host.flux_file(options.size)
    os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--streamed", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--tree", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = "narrow" if options.simulate else "small" if options.small else "whole"
    if options.simulate and options.host is None:
        options.host = str(max((HERE / ".dev" / "hosts").iterdir()))
    if options.tree:
        print(json.dumps(measure(options.tree, options)))
        return
    trees = {"other": str(Path(options.other).resolve()), "this": str(HERE)}
    best: dict[str, dict[str, float]] = {name: {} for name in trees}
    write_file(options)
    for number in range(options.rounds):
        for name, tree in [*trees.items()][:: -1 if number % 2 else 1]:  # the second may profit from the first
            command = [sys.executable, __file__, *sys.argv[1:], "--tree", tree]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(name, said.splitlines()[-1], flush=True)
            for what, value in json.loads(said.splitlines()[-1]).items():
                best[name][what] = min(value, best[name].get(what, value))
    for what, other in best["other"].items():
        print(f"{what:16} {best['this'][what]:8.4f} s, other {other:8.4f} s, ratio {best['this'][what] / other:.3f}")


if __name__ == "__main__":
    main()
