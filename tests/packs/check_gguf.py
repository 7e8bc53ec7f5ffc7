"""The real ComfyUI-GGUF in a real ComfyUI on three simulated GPUs, behind our nodes. By hand: the pack is not ours.

    .venv/bin/python tests/packs/check_gguf.py FOLDER_OF_THE_PACK [--host 0.30.0]

Makes a small GGUF Flux, draws with the pack alone, then with its model placed: alone, after another node has cloned it,
with a LoRA on either side of the place node, and after frees. Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import gguf  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from devtools.client import PromptFailed, Workflow  # noqa: E402
from devtools.hosts import find  # noqa: E402
from devtools.server import Server  # noqa: E402
from tests.host import workflows  # noqa: E402
from tests.host.driver import Picture, spec_for  # noqa: E402
from tests.host.lifecycle import BOTH, FILES, PACKS, Keeper, own_models  # noqa: E402
from tests.host.workflows import node, placed  # noqa: E402
from tests.sim import simdev  # noqa: E402

SIM = Path(simdev.__file__).parents[1]
SPREAD = {"compute_device": "cuda:0", "mode": "expert", "expert_mode_allocations": "cuda:0,30%;cuda:1,30%;cpu,*"}

ALL = ("cuda:0", "cuda:1", "cpu")


def write_flux(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The tiny Flux as a GGUF file: matrices quantised, everything else in F32."""
    writer = gguf.GGUFWriter(target, "flux")
    for name, tensor in load_file(source).items():
        values = tensor.to(torch.float32).numpy()
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Checks:
    def __init__(self, machine: Keeper) -> None:
        self.machine, self.failed = machine, 0

    def draw(self, workflow: Workflow) -> tuple[Picture, ...] | str:
        try:
            return self.machine.draw(workflow)
        except PromptFailed as failure:
            return str(failure)

    def same(self, what: str, workflow: Workflow, want: Any, model: str = "Flux", homes: Collection[str] = ALL) -> None:
        """The workflow draws `want`, twice, with a free in between, and the model rests on just these devices."""
        problems = []
        for when in ("first", "after a free"):
            got = self.draw(workflow)
            rows = [row for row in self.machine.models() if row["model_class"] == model]
            resting = rows[0]["storages"] if rows else {}
            if got != want:
                problems.append(f"{when}: {got if isinstance(got, str) else 'another picture'}")
            if resting.keys() != {*homes}:
                problems.append(f"{when}: the model rests on {resting}")
            self.machine.free(**BOTH)
        allocated = self.machine.client.get("/simdev")["allocated"]
        if any(allocated.values()):
            problems.append(f"left on devices: {allocated}")
        self.failed += bool(problems)
        print("FAILED" if problems else "ok    ", what, *problems, flush=True)


def unet(seed: int, lora: float | None = None) -> Workflow:
    workflow = workflows.flux(seed, lora=lora)
    return workflow | {"model": node("UnetLoaderGGUF", unet_name="toy.gguf")}


def sampling(workflow: Workflow, source: str) -> Workflow:
    """The workflow with a node that clones the model, after the node `source`."""
    shift = {"max_shift": 1.15, "base_shift": 0.5, "width": 64, "height": 64}
    sample = workflow["sample"]
    return workflow | {
        "shifted": node("ModelSamplingFlux", model=[source, 0], **shift),
        "sample": {**sample, "inputs": {**sample["inputs"], "model": ["shifted", 0]}},
    }


def behind_place(workflow: Workflow) -> Workflow:
    """The LoRA after the place node: the place node gets the loader's output, the LoRA that of the place node."""
    return placed(workflow, "model", **SPREAD)


def before_place(workflow: Workflow) -> Workflow:
    return placed(workflow, "model", behind=["lora", 0], **SPREAD)


def check(machine: Keeper) -> int:
    checks = Checks(machine)
    bare, shifted = checks.draw(unet(1)), checks.draw(sampling(unet(1), "model"))
    lora, both = checks.draw(unet(1, 0.8)), checks.draw(sampling(unet(1, 0.8), "lora"))
    assert not any(isinstance(each, str) for each in (bare, shifted, lora, both)), (bare, shifted, lora, both)
    assert len({*map(repr, (bare, shifted, lora))}) == 3, "the pictures that are compared must differ"
    machine.free(**BOTH)
    checks.same("loader, place", placed(unet(1), "model", **SPREAD), bare)
    checks.same("loader, place, ModelSampling", sampling(placed(unet(1), "model", **SPREAD), "place_model"), shifted)
    checks.same("loader, place, LoRA", behind_place(unet(1, 0.8)), lora)
    checks.same("loader, LoRA, place", before_place(unet(1, 0.8)), lora)
    checks.same("loader, place, LoRA, ModelSampling", sampling(behind_place(unet(1, 0.8)), "lora"), both)
    checks.same("loader, LoRA, place, ModelSampling", sampling(before_place(unet(1, 0.8)), "place_model"), both)
    checks.same("the LoRA off again", placed(unet(1), "model", **SPREAD), bare)
    checks.same("another strength", behind_place(unet(1, 0.3)), checks.draw(unet(1, 0.3)))
    check_loaders(checks, bare)
    tracebacks = machine.our_tracebacks()
    print("FAILED" if tracebacks else "ok    ", "no traceback of ours in the log", *tracebacks)
    return checks.failed + bool(tracebacks)


def check_loaders(checks: Checks, bare: Any) -> None:
    """Every node of ours for a loader of the pack whose files can be small."""
    allocations = {"expert_mode_allocations": SPREAD["expert_mode_allocations"]}
    more = {"dequant_dtype": "default", "patch_dtype": "default", "patch_on_device": False}
    for loader, inputs in (("UnetLoaderGGUF", {}), ("UnetLoaderGGUFAdvanced", more)):
        for kind, widget in (("DisTorch2", "compute_device"), ("DisTorch", "device")):
            widgets = {**inputs, widget: "cuda:0", **allocations}
            loaded = node(f"{loader}{kind}MultiGPU", unet_name="toy.gguf", **widgets)
            checks.same(f"{loader}{kind}MultiGPU", unet(1) | {"model": loaded}, bare)
        there = unet(1) | {"model": node(f"{loader}MultiGPU", unet_name="toy.gguf", device="cuda:1", **inputs)}
        checks.same(f"{loader}MultiGPU", there, bare, homes={"cuda:1"})
    clip = {"clip_name": "toy_clip_l.safetensors", "type": "sd3"}
    want = checks.draw(unet(1) | {"clip": node("CLIPLoaderGGUF", **clip)})
    for kind, homes in (("", {"cuda:1"}), ("DisTorch2", {"cuda:1", "cpu"}), ("DisTorch", {"cuda:1", "cpu"})):
        widgets = {"device": "cuda:1"} | ({"expert_mode_allocations": "cuda:1,50%;cpu,*"} if kind else {})
        loaded = node(f"CLIPLoaderGGUF{kind}MultiGPU", **clip, **widgets)
        checks.same(f"CLIPLoaderGGUF{kind}MultiGPU", unet(1) | {"clip": loaded}, want, "SD3ClipModel_", homes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--host", default="0.30.0")
    parser.add_argument("--kind", default="Q8_0", help="one that the gguf package can write: Q8_0, Q5_0, Q4_1, ...")
    options = parser.parse_args()
    simdev.build("cuda")
    with tempfile.TemporaryDirectory() as base:
        folder = own_models(Path(base))
        kind = gguf.GGMLQuantizationType[options.kind]
        write_flux(folder / FILES["model"], folder / "diffusion_models" / "toy.gguf", kind)
        spec = spec_for(
            find(options.host),
            Path(base) / "run",
            Path(sys.executable),
            packs={**PACKS, "simdev_probe": SIM / "probe_pack", "ComfyUI-GGUF": options.pack.resolve()},
            models=folder,
            runner=(str(SIM / "serve.py"),),
            environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g"},
            flags=simdev.HOST_FLAGS,
        )
        with Server(spec) as server:
            failed = check(Keeper(server))
    print(f"{failed} failed; ComfyUI {options.host}, {options.kind}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
