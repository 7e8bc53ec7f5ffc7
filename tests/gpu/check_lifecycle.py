"""Keeping and ejecting on a real GPU: models of gigabytes in the real server, VRAM and RAM counted after every step.

    python tests/gpu/check_lifecycle.py [--static] [--host TREE]

Starts ComfyUI (from `.bundle` or TREE) with this pack, DynamicVRAM on unless `--static`. The workflow has two diffusion
models that sample one after the other, a text encoder and a VAE. Prints one line per step and check, and exits 1 if any
check failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bench_host
from check_engine import Checks
from check_nodes import BUNDLE, HALF, make_models, started

from devtools.client import Finished, Workflow
from tests.host import workflows
from tests.host.driver import Driver, Picture
from tests.host.workflows import node, placed

FILES = {
    "flux_six_blocks.safetensors": {"double": 2, "single": 4},
    "flux_three_blocks.safetensors": {"double": 1, "single": 2},
}
BOTH = {"unload_models": True, "free_memory": True}
SLACK = 150 << 20
"""What libraries and a prompt's small tensors may leave behind."""


def write_models(folder: Path, **width: int) -> dict[str, int]:
    """The two diffusion models, made if they are not there yet, and their sizes in bytes."""
    for name, blocks in FILES.items():
        if not (folder / name).exists():
            bench_host.write_flux(str(folder / name), **{**bench_host.FLUX_DEV, **blocks, "vector": 2048, **width})
    return {name: (folder / name).stat().st_size for name in FILES}


def workflow(**choices: str) -> Workflow:
    """Both models sample in turn; `choices` are the `keep_loaded` of `model`, `second`, `clip` and `vae`.

    The first model rests half on the GPU, half in RAM; the others are where ComfyUI would put them.
    """
    first, second = FILES
    made = workflows.flux()
    made["model"]["inputs"]["unet_name"] = first
    for part in ("model", "clip", "vae"):
        made = placed(made, part, keep_loaded=choices.get(part, "default"), **(HALF if part == "model" else {}))
    made["second"] = node("UNETLoader", unet_name=second, weight_dtype="default")
    made["place_second"] = node("MultiGPUPlaceModel", model=["second", 0], keep_loaded=choices.get("second", "default"))
    made["sample_second"] = node(
        "KSampler",
        **{**made["sample"]["inputs"], "model": ["place_second", 0], "latent_image": ["sample", 0], "denoise": 0.5},
    )
    made["decode"]["inputs"]["samples"] = ["sample_second", 0]
    return made


@dataclass(frozen=True)
class Memory:
    """Bytes in use on the GPU by whatever process, torch's cache of free memory there, and the server's own RAM."""

    used: int
    cached: int
    ram: int

    def __str__(self) -> str:
        return f"VRAM {self.used / 1e9:.2f} GB, cached {self.cached / 1e9:.2f} GB, RAM {self.ram / 1e9:.2f} GB"


class Story:
    def __init__(self, check: Checks, comfy: Driver, sizes: dict[str, int]) -> None:
        self.check, self.comfy = check, comfy
        self.first, self.second = sizes.values()
        self.run("warm up", workflow())
        self.free("all of it", times=2)
        self.empty = self.memory()

    def memory(self) -> Memory:
        device = self.comfy.client.get("/system_stats")["devices"][0]
        ram = self.comfy.memory()["anonymous"]
        return Memory(device["vram_total"] - device["vram_free"], device["torch_vram_free"], ram)

    def objects(self) -> dict[int, int]:
        """Bytes of each loaded model -> the number of the object."""
        return {row["model_size"]: row["model_id"] for row in self.comfy.models() if row["alive"]}

    def run(self, what: str, workflow: Workflow) -> Finished:
        finished = self.comfy.run(workflow)
        print(f"       {what}: {finished.seconds:.2f} s; {self.memory()}; {len(self.objects())} models", flush=True)
        return finished

    def free(self, what: str, times: int = 1) -> Memory:
        for _ in range(times):
            self.comfy.free(**BOTH)
        memory = self.memory()
        print(f"       free {what}: {memory}; {len(self.objects())} models", flush=True)
        return memory

    def is_empty(self, what: str) -> None:
        memory = self.memory()
        gone = not self.objects() and memory.used - self.empty.used < SLACK and memory.ram - self.empty.ram < SLACK
        self.check(f"{what}: everything is free again", gone, f"{memory}; at first {self.empty}")

    def one_leaves_the_others_stay(self) -> None:
        """Flagged, pinned, pinned: only the first is unloaded, and the next prompt gets the others back."""
        asked = workflow(model="eject", second="keep", clip="keep", vae="keep")
        before_run = self.run("one to eject, three to keep", asked)
        objects, before = self.objects(), self.memory()
        after = self.free("once")
        left = self.objects()
        self.check("only the flagged model is unloaded", len(objects) == 4 and len(left) == 3)
        self.check("the others are the same objects", left.items() <= objects.items())
        self.check("its VRAM is free", before.used - after.used > 0.45 * self.first, str(after))
        self.check("its RAM is free", before.ram - after.ram > 0.4 * self.first, str(after))
        self.check("the second model's VRAM is not", after.used - self.empty.used > 0.9 * self.second)
        self.check("no device keeps a cache", after.cached < SLACK, str(after))
        again = self.run("again", asked)
        self.check("kept models are handed back", {"second", "clip", "vae"} <= again.cached_nodes)
        self.check("the flagged one is loaded again", "model" not in again.cached_nodes)
        self.check("the picture is the same", pictures(again) == pictures(before_run))
        self.check("kept models are still the same objects", left.items() <= self.objects().items())
        self.run("all to eject", workflow(model="eject", second="eject", clip="eject", vae="eject"))
        self.free("twice", times=2)
        self.is_empty("one ejected, three kept, then all ejected")

    def all_stay(self) -> None:
        """Pinned, one of them half in RAM: a free unloads nothing, and the next prompt loads nothing."""
        asked = workflow(model="keep", second="keep", clip="keep", vae="keep")
        first = self.run("all to keep", asked)
        objects, before = self.objects(), self.memory()
        after = self.free("once")
        self.check("nothing is unloaded", self.objects() == objects, str(len(objects)))
        self.check("VRAM stays", abs(before.used - after.used) < SLACK, str(after))
        self.check("RAM stays", abs(before.ram - after.ram) < SLACK, str(after))
        self.check("no device keeps a cache", after.cached < SLACK, str(after))
        asked["sample"]["inputs"]["seed"] += 1
        other = self.run("another seed", asked)
        self.check("all loaders are handed back", {"model", "second", "clip", "vae"} <= other.cached_nodes)
        asked["sample"]["inputs"]["seed"] -= 1
        again = self.run("the first seed again", asked)
        self.check("the picture is the same", pictures(again) == pictures(first) != pictures(other))
        self.run("all to default", workflow())
        self.free("twice", times=2)
        self.is_empty("all kept, then all at default")

    def two_steps(self) -> None:
        """Flagged and three at default: the first free unloads the one, the second the rest."""
        self.run("one to eject, three at default", workflow(model="eject"))
        objects = self.objects()
        once = self.free("once")
        self.check("the first free unloads the flagged model alone", self.objects().items() < objects.items())
        self.check("three stay", len(self.objects()) == 3 and once.used - self.empty.used > 0.9 * self.second)
        self.free("a second time")
        self.is_empty("two frees")

    def default(self) -> None:
        self.run("all at default", workflow())
        self.free("once")
        self.is_empty("all at default, one free")


def pictures(finished: Finished) -> list[Picture]:
    return [*map(Picture.decode, finished.images)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--host", type=Path, default=BUNDLE / "ComfyUI")
    options = parser.parse_args()
    check = Checks()
    models = make_models(options.host, large=False)
    sizes = write_models(models / "diffusion_models")
    with tempfile.TemporaryDirectory() as base, started(options.host, models, Path(base), options.static) as comfy:
        story = Story(check, comfy, sizes)
        story.one_leaves_the_others_stay()
        story.all_stay()
        story.two_steps()
        story.default()
        check("no traceback of ours in the log", not comfy.our_tracebacks(), "".join(comfy.our_tracebacks())[:2000])
    print(f"{check.failed} failed")
    return int(check.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
