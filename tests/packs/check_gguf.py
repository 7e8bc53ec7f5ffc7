"""The real ComfyUI-GGUF in a real ComfyUI on three simulated GPUs, behind our nodes. By hand: the pack is not ours.

    .venv/bin/python tests/packs/check_gguf.py FOLDER_OF_THE_PACK [--host 0.30.0] [--only PART ...]

Makes small GGUF files in a temporary folder, draws with the pack alone, then with its models placed, and compares. The
parts:

    place      2 minutes   place nodes behind the loader, with other nodes and a LoRA on either side
    loaders    2           our nodes for the two loaders of diffusion models
    kinds      7           a placed Flux in every quantisation that the pack has code for, and LoRAs on some
    texts      12          our nodes for the loaders of text encoders: CLIP-L, T5 XXL in a GGUF file, CLIP-G
    quadruple  12          those for the four encoders of HiDream; takes 1.5 GB of disk

The minutes are those of one core. Every check draws twice and frees everything after each: nothing may be left on the
devices, and no GGUF file mapped. Prints one line per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from devtools.client import PromptFailed, Workflow  # noqa: E402
from devtools.hosts import find  # noqa: E402
from devtools.server import Server  # noqa: E402
from tests.host import workflows  # noqa: E402
from tests.host.driver import Picture, spec_for  # noqa: E402
from tests.host.lifecycle import BOTH, FILES, PACKS, Keeper, own_models  # noqa: E402
from tests.host.workflows import node, placed  # noqa: E402
from tests.packs import gguf_files  # noqa: E402
from tests.sim import simdev  # noqa: E402

SIM = Path(simdev.__file__).parents[1]
SHARES = "cuda:0,30%;cuda:1,30%;cpu,*"
SPREAD = {"compute_device": "cuda:0", "mode": "expert", "expert_mode_allocations": SHARES}
ALL = ("cuda:0", "cuda:1", "cpu")
CLIP_L, CLIP_G, T5, LLAMA = "toy_clip_l.safetensors", "toy_clip_g.safetensors", "toy_t5xxl.gguf", "toy_llama.gguf"
HELD = re.compile(r"(\S+) (?:computes and )?holds [^(]*\(([\d.]+) %\)")


@dataclass(frozen=True)
class Drawn:
    """What a workflow draws without our nodes, and the bytes of the model that the checks are about."""

    pictures: tuple[Picture, ...]
    model: str
    bytes: int


class Checks:
    def __init__(self, machine: Keeper) -> None:
        self.machine, self.count, self.failed, self.began = machine, 0, 0, time.monotonic()

    def drawn(self, workflow: Workflow, model: str = "Flux") -> Drawn:
        pictures = self.machine.draw(workflow)
        assert all(len({*picture.pixels}) > 32 for picture in pictures), "nothing to be seen in the picture"
        found = Drawn(pictures, model, sum(self._resting(model).values()))
        self.machine.free(**BOTH)
        return found

    def same(
        self, what: str, workflow: Workflow, want: Drawn, homes: Iterable[str] = ALL, mapped: Iterable[str] = ()
    ) -> None:
        """The workflow draws the same, twice, with a free after each. Reports whatever is not as it should be.

        `mapped` are the GGUF files that the process still maps when the model is loaded.
        """
        problems: list[str] = []
        for when in ("first", "after a free"):
            with self.machine.said() as lines:
                try:
                    same = self.machine.draw(workflow) == want.pictures
                except PromptFailed as failure:
                    problems.append(f"{when}: {failure}")
                    break
            found = [] if same else ["another picture"]
            found += self._misplaced(want, {*homes}, lines)
            found += [] if self._mapped() == [*mapped] else [f"mapped are {self._mapped()}"]
            self.machine.free(**BOTH)
            found += [f"mapped after the free: {name}" for name in self._mapped()]
            found += [f"left on {device}: {count}" for device, count in self._allocated().items() if count]
            problems += [f"{when}: {problem}" for problem in found]
        self.report(what, problems)

    def kept(self, what: str, workflow: Workflow, want: Drawn) -> None:
        """Set to keep, the model stays where it is through two frees, and draws the same; then it is let go."""
        problems, seen = [], []
        for _ in range(3):
            problems += [] if self.machine.draw(workflow) == want.pictures else ["another picture"]
            self.machine.free(**BOTH)
            seen.append((self.machine.objects().get(want.model), self._resting(want.model)))
            problems += [f"still mapped: {name}" for name in self._mapped()]
        if seen[0][0] is None or len({*map(str, seen)}) != 1 or len(seen[0][1]) != len(ALL):
            problems.append(f"after the frees: {seen}")
        self.machine.forget()
        problems += [f"left on {device}: {count}" for device, count in self._allocated().items() if count]
        self.report(what, problems)

    def report(self, what: str, problems: list[str]) -> None:
        self.count, self.failed = self.count + 1, self.failed + bool(problems)
        took = f"{time.monotonic() - self.began:.0f} s"
        print("FAILED" if problems else "ok    ", f"{took:>6}", what, *problems, flush=True)

    def _misplaced(self, want: Drawn, homes: set[str], lines: list[str]) -> list[str]:
        """The model rests on just these devices, with all its bytes, in the shares that the log line says."""
        resting = self._resting(want.model)
        total = sum(resting.values())
        if {*resting} != homes or not 0 <= total - want.bytes <= want.bytes / 100:
            return [f"{want.bytes} bytes rest as {resting}"]
        said = [line for line in lines if f"[MultiGPU] {want.model}: " in line]
        shares = {device: float(share) for line in said for device, share in HELD.findall(line)}
        if len(homes) > 1 and any(abs(100 * resting[home] / total - shares.get(home, 0)) > 1 for home in homes):
            return [f"{resting} are not {shares}"]
        return []

    def _resting(self, model: str) -> dict[str, int]:
        rows = [row for row in self.machine.models() if row["model_class"] == model]
        return dict(rows[0]["storages"]) if rows else {}

    def _mapped(self) -> list[str]:
        return [Path(name).name for name in self.machine.memory()["mapped_models"] if name.endswith(".gguf")]

    def _allocated(self) -> dict[str, int]:
        return dict(self.machine.client.get("/simdev")["allocated"])


def unet(file: str = "toy.gguf", lora: float | None = None) -> Workflow:
    """A Flux of the pack, without a text encoder."""
    workflow = workflows.flux(1, lora=lora) | {"positive": node("TestConditions")}
    del workflow["clip"]
    return workflow | {"model": node("UnetLoaderGGUF", unet_name=file)}


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


def check_place(checks: Checks) -> None:
    bare, shifted = checks.drawn(unet()), checks.drawn(sampling(unet(), "model"))
    lora, both = checks.drawn(unet(lora=0.8)), checks.drawn(sampling(unet(lora=0.8), "lora"))
    assert len({*map(repr, (bare, shifted, lora))}) == 3, "the pictures that are compared must differ"
    checks.same("loader, place", behind_place(unet()), bare)
    checks.same("loader, place, ModelSampling", sampling(behind_place(unet()), "place_model"), shifted)
    checks.same("loader, place, LoRA", behind_place(unet(lora=0.8)), lora)
    checks.same("loader, LoRA, place", before_place(unet(lora=0.8)), lora)
    checks.same("loader, place, LoRA, ModelSampling", sampling(behind_place(unet(lora=0.8)), "lora"), both)
    checks.same("loader, LoRA, place, ModelSampling", sampling(before_place(unet(lora=0.8)), "place_model"), both)
    checks.same("the LoRA off again", behind_place(unet()), bare)
    checks.same("another strength", behind_place(unet(lora=0.3)), checks.drawn(unet(lora=0.3)))


def check_loaders(checks: Checks) -> None:
    bare = checks.drawn(unet())
    more = {"dequant_dtype": "default", "patch_dtype": "default", "patch_on_device": False}
    for loader, inputs in (("UnetLoaderGGUF", {}), ("UnetLoaderGGUFAdvanced", more)):
        _nodes_for(checks, loader, {"unet_name": "toy.gguf", **inputs}, unet(), "model", bare)
    here = unet() | {"model": node("UnetLoaderGGUFMultiGPU", unet_name="toy.gguf", device="cpu")}
    checks.same("UnetLoaderGGUFMultiGPU on the CPU", here, checks.drawn(here), ["cpu"], ["toy.gguf"])


def check_kinds(checks: Checks) -> None:
    for kind in gguf_files.KINDS:
        file = f"toy_{kind}.gguf"
        checks.same(f"a Flux in {kind}", behind_place(unet(file)), checks.drawn(unet(file)))
        if kind in ("F16", "BF16", "Q4_K"):
            want = checks.drawn(unet(file, lora=0.8))
            checks.same(f"a Flux in {kind}, place, LoRA", behind_place(unet(file, lora=0.8)), want)


def text(loader: str, file: str = "toy.gguf", **inputs: Any) -> Workflow:
    """A picture of the pack's Flux with the text encoder of one of the pack's loaders."""
    workflow = workflows.flux(1) | {"model": node("UnetLoaderGGUF", unet_name=file)}
    return workflow | {"clip": node(loader, **inputs)}


def check_texts(checks: Checks) -> None:
    one, three = "CLIPLoaderGGUF", "TripleCLIPLoaderGGUF"
    for loader, file, encoder, inputs in (
        (one, "toy.gguf", "SD3ClipModel_", {"clip_name": CLIP_L, "type": "sd3"}),
        (one, "toy.gguf", "SD3ClipModel_", {"clip_name": T5, "type": "sd3"}),
        ("DualCLIPLoaderGGUF", "768.gguf", "FluxClipModel_", {"clip_name1": CLIP_L, "clip_name2": T5, "type": "flux"}),
        (three, "toy.gguf", "SD3ClipModel_", {"clip_name1": CLIP_L, "clip_name2": CLIP_G, "clip_name3": T5}),
    ):
        workflow = text(loader, file, **inputs)
        other = {"positive": node("CLIPTextEncode", clip=["clip", 0], text="a tree")}
        want = checks.drawn(workflow, encoder)
        assert checks.drawn(workflow | other, encoder).pictures != want.pictures, "the text makes no difference"
        _nodes_for(checks, loader, inputs, workflow, "clip", want)


def check_quadruple(checks: Checks) -> None:
    names = {f"clip_name{index}": name for index, name in enumerate((CLIP_L, CLIP_G, T5, LLAMA), 1)}
    workflow = text("QuadrupleCLIPLoaderGGUF", **names)
    workflow |= {"positive": node("TestEveryCondition", conditioning=["text", 0]), "text": workflow["positive"]}
    want = checks.drawn(workflow, "HiDreamTEModel_")
    _nodes_for(checks, "QuadrupleCLIPLoaderGGUF", names, workflow, "clip", want)


def _nodes_for(checks: Checks, loader: str, inputs: dict[str, Any], stock: Workflow, part: str, want: Drawn) -> None:
    """The three nodes of ours for a loader, in the place of the workflow's node `part`."""
    files = ", ".join(value for value in inputs.values() if str(value).endswith((".gguf", ".safetensors")))
    for kind in ("DisTorch2", "DisTorch", ""):
        widget = "compute_device" if kind == "DisTorch2" and part == "model" else "device"
        device = {widget: "cuda:0", "expert_mode_allocations": SHARES} if kind else {widget: "cuda:1"}
        ours = f"{loader}{kind}MultiGPU"
        workflow = stock | {part: node(ours, **inputs, **device)}
        checks.same(f"{ours} ({files})", workflow, want, ALL if kind else ["cuda:1"])
        if kind == "DisTorch2":
            keep = {part: node(ours, **inputs, **device, keep_loaded="keep")}
            checks.kept(f"{ours} ({files}), kept", stock | keep, want)


PARTS = {
    "place": check_place, "loaders": check_loaders, "kinds": check_kinds, "texts": check_texts,
    "quadruple": check_quadruple,
}  # fmt: skip


def write_files(folder: Path, kind: str, parts: Iterable[str]) -> None:
    """What the parts need, next to the tiny models."""
    flux, models, encoders = folder / FILES["model"], folder / "diffusion_models", folder / "text_encoders"
    gguf_files.write_flux(flux, models / "toy.gguf", kind)
    gguf_files.write_flux(flux, models / "768.gguf", kind, pooled=768)
    for each in gguf_files.KINDS if "kinds" in parts else ():
        gguf_files.write_flux(flux, models / f"toy_{each}.gguf", each)
    if {"texts", "quadruple"} & {*parts}:
        gguf_files.write_random(encoders / T5, "t5encoder", gguf_files.t5(), "Q5_K")
        gguf_files.write_clip_g(encoders / CLIP_G)
    if "quadruple" in parts:
        gguf_files.write_random(encoders / LLAMA, "llama", gguf_files.llama(), "Q4_0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--host", default="0.30.0")
    parser.add_argument("--kind", default="Q8_0", choices=gguf_files.KINDS, help="the Flux of all parts but `kinds`")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    options = parser.parse_args()
    simdev.build("cuda")
    with tempfile.TemporaryDirectory() as base:
        folder = own_models(Path(base))
        write_files(folder, options.kind, options.only)
        packs = {"simdev_probe": SIM / "probe_pack", "conditions": Path(__file__).parent / "conditions_pack"}
        spec = spec_for(
            find(options.host),
            Path(base) / "run",
            Path(sys.executable),
            packs={**PACKS, **packs, "ComfyUI-GGUF": options.pack.resolve()},
            models=folder,
            runner=(str(SIM / "serve.py"),),
            environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g"},
            flags=simdev.HOST_FLAGS,
        )
        with Server(spec) as server:
            checks = Checks(Keeper(server))
            for part in options.only:
                PARTS[part](checks)
            checks.report("no traceback of ours in the log", checks.machine.our_tracebacks())
    print(f"{checks.count} checks, {checks.failed} failed; ComfyUI {options.host}, {options.kind}, {options.only}")
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
