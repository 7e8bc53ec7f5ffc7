"""What a user waits for, whole: Place Model in mode auto against ComfyUI alone, from loading the file to the last step.

    python benchmarks/time_to_picture.py [--card 16] [--side 1024] [--rounds 2] [--small]

A Flux-shaped model in a DynamicVRAM process, on a GPU of which a ballast leaves `--card` GB. Each side is measured in
processes of its own, in turns; the file is in the page cache. `first` is loading (and placing) and a prompt of 4 steps,
`second` another one of 10 steps, `LoRA` and `other LoRA` are prompts of 4 steps with a LoRA of rank 32 on every linear
of the blocks, and with another one. Prints all values, the median of each, and the ratio. Needs one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SIDES = ("core", "ours")


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(HERE / "tests" / "gpu"))
    import bench_host as host

    host.start(options.host, dynamic=True)
    import comfy.model_management
    import comfy.sample
    import torch

    from multigpu.runtime import current

    (place,) = (node for node in current().nodes() if node.GET_SCHEMA().node_id == "MultiGPUPlaceModel")
    path, device = host.flux_file(options.size), torch.device("cuda:0")
    host.warm_up(host.flux_file("small"), host.Forward(device))
    ballast = torch.cuda.mem_get_info(device)[0] - int(options.card * 1e9)
    held = torch.empty(max(ballast, 0), dtype=torch.uint8, device=device)
    result: dict[str, Any] = {}
    noise = torch.randn(1, 16, options.side // 8, options.side // 8, generator=torch.Generator().manual_seed(2))
    random = torch.Generator().manual_seed(3)
    text = torch.randn(1, 256, host.FLUX_DEV["context"], generator=random)
    about = {"pooled_output": torch.randn(1, host.FLUX_DEV["vector"], generator=random), "guidance": 3.5}

    def prompt(model: Any, steps: int) -> torch.Tensor:
        latent = torch.zeros_like(noise)
        condition = [[text, dict(about)]]
        with torch.inference_mode():
            return comfy.sample.sample(
                model, noise, steps, 1.0, "euler", "simple", condition, condition, latent, disable_pbar=True, seed=2
            )

    def seconds(what: str, do: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        value = do()
        torch.cuda.synchronize()
        result[what] = time.perf_counter() - begin
        return value

    def loaded() -> tuple[Any, torch.Tensor]:
        model = host.load(path)
        if side == "ours":
            model = place.execute(model=model, mode="auto").result[0]
        return model, prompt(model, 4)

    model, first = seconds("first", loaded)
    result["picture"] = first.double().sum().item()
    seconds("second", lambda: prompt(model, 10))
    result["free"] = torch.cuda.mem_get_info(device)[0] / 1e9
    for what, seed in (("LoRA", 4), ("other LoRA", 5)):
        patched = lora(model, seed)
        seconds(what, lambda patched=patched: prompt(patched, 4))
    del held
    return result


def lora(model: Any, seed: int, rank: int = 32) -> Any:
    import comfy.sd
    import torch

    random, tensors = torch.Generator(device="cuda").manual_seed(seed), {}
    for name, module in model.model.named_modules():
        weight = getattr(module, "weight", None)
        if "_blocks." in name and isinstance(weight, torch.Tensor) and weight.dim() == 2:
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                values = torch.randn(shape, generator=random, device="cuda").cpu() * 0.02
                tensors[f"{name}.lora_{part}.weight"] = values
    return comfy.sd.load_lora_for_models(model, None, tensors, 0.7, 0)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", type=float, default=16)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--host")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = "small" if options.small else "whole"
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return
    found: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", side]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            print(side, said, flush=True)
            for what, value in json.loads(said).items():
                found[side].setdefault(what, []).append(value)
    for what, values in found["core"].items():
        core, ours = statistics.median(values), statistics.median(found["ours"][what])
        print(f"{what:12} ours {ours:8.3f}  core {core:8.3f}  ratio {ours / core:.3f}")


if __name__ == "__main__":
    main()
