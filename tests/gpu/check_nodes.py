"""The nodes on a real GPU: the real server, stock workflows and the same with our nodes, pictures compared.

    python tests/gpu/check_nodes.py [--static] [--host TREE] [--small]

Starts ComfyUI (from `.bundle` or TREE) with this pack, DynamicVRAM on unless `--static`; tells the story of
`dev.py run` on the GPU; draws with every loader node whose model can be tiny, on the GPU and spread over GPU and RAM;
puts parts on the CPU; then does the same with a Flux-shaped model of 24 GB (`--small`: without that). Prints one line
per check and exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import bench_host  # noqa: E402
import numpy  # noqa: E402
from check_engine import Checks  # noqa: E402

from devtools.client import Client, PromptFailed, Workflow  # noqa: E402
from devtools.problem import Problem  # noqa: E402
from devtools.server import Server, ServerSpec  # noqa: E402
from tests.host import story, workflows  # noqa: E402
from tests.host.driver import DEBUG_PACKS, PACK, Driver, Picture  # noqa: E402
from tests.host.workflows import node, placed  # noqa: E402

BUNDLE = ROOT / ".bundle"
UNET, CLIP = {"unet_name": "toy_flux.safetensors", "weight_dtype": "default"}, {"clip_name": "toy_clip_l.safetensors"}
VAE, CHECKPOINT = {"vae_name": "toy_taef1.safetensors"}, {"ckpt_name": "toy_sd15.safetensors"}
HALF = {"mode": "expert", "expert_mode_allocations": "cuda:0,50%;cpu,*"}
CONTROL = {"control_net_name": "toy_sd15_controlnet.safetensors"}


def loader_cases() -> Iterator[tuple[str, Workflow, Workflow]]:
    """The loader's name, the stock workflow, and the same with the loader in it."""
    flux, sd15, controlled = workflows.flux(), workflows.sd15(), workflows.sd15(control=1.0)
    for stock, slot, stem, inputs in (
        (flux, "model", "UNETLoader", UNET),
        (flux, "clip", "CLIPLoader", {**CLIP, "type": "sd3"}),
        (flux, "vae", "VAELoader", VAE),
        (sd15, "checkpoint", "CheckpointLoaderSimple", CHECKPOINT),
        (controlled, "controlnet", "ControlNetLoader", CONTROL),
        (controlled, "controlnet", "DiffControlNetLoader", {**CONTROL, "model": ["checkpoint", 0]}),
    ):
        compute = "device" if stem == "CLIPLoader" else "compute_device"
        spread = {compute: "cuda:0", "virtual_vram_gb": 4.0, "donor_device": "cpu"}
        for suffix, widgets in (("MultiGPU", {"device": "cuda:0"}), ("DisTorch2MultiGPU", spread)):
            yield f"{stem}{suffix}", stock, {**stock, slot: node(f"{stem}{suffix}", **inputs, **widgets)}
    parts = {f"{part}_device": "cuda:0" for part in ("unet", "clip", "vae")}
    advanced = node("CheckpointLoaderAdvancedMultiGPU", **CHECKPOINT, **parts)
    yield "CheckpointLoaderAdvancedMultiGPU", sd15, {**sd15, "checkpoint": advanced}


def place_cases() -> Iterator[tuple[str, Workflow, Workflow]]:
    for name, stock in (("flux", workflows.flux()), ("wan", workflows.wan())):
        workflow = stock
        for part in ("model", "clip", "vae"):
            workflow = placed(workflow, part, **HALF)
        yield f"{name}, three parts half in RAM", stock, workflow


def draw(comfy: Driver, workflow: Workflow) -> tuple[Picture, ...]:
    """The second of two runs: CUDA's libraries choose kernels during the first, and its last bits may differ."""
    comfy.run(workflow)
    workflow["sample"]["inputs"]["seed"] += 1
    pictures = comfy.draw(workflow)
    workflow["sample"]["inputs"]["seed"] -= 1
    return pictures


def check_cases(check: Checks, comfy: Driver, cases: Iterator[tuple[str, Workflow, Workflow]]) -> None:
    for name, stock, changed in cases:
        try:
            want, got = draw(comfy, stock), draw(comfy, changed)
        except PromptFailed as failure:
            check(name, False, str(failure))
            continue
        check(f"{name} draws what the stock nodes draw", got == want, resting(comfy))
        comfy.free(unload_models=True, free_memory=True)


def check_lora(check: Checks, comfy: Driver, static: bool) -> None:
    """Bit for bit on the static host. DynamicVRAM applies a LoRA at every use, in the type of the weights: alike."""
    stock = workflows.flux(lora=0.8)
    want, got = draw(comfy, stock), draw(comfy, placed(stock, "model", **HALF))
    off = difference(got, want)
    alike = difference(draw(comfy, workflows.flux(seed=7, lora=0.8)), want) / 4
    check(
        "flux with a LoRA, half in RAM", off <= (0 if static else alike), f"{off:.1f} of 255 off, {alike:.1f} allowed"
    )
    plain = draw(comfy, placed(workflows.flux(), "model", **HALF))
    check("the LoRA taken off again", plain == draw(comfy, workflows.flux()) != want, resting(comfy))
    comfy.free(unload_models=True, free_memory=True)


def check_report(check: Checks, comfy: Driver) -> None:
    comfy.run(placed(workflows.flux(), "model", **HALF))
    history = comfy.run({"report": node("MultiGPUMemoryReport")}).history
    (text,) = history["outputs"]["report"]["text"]
    print(text)
    placed_model = next(line for line in text.splitlines() if line.startswith("- Flux (default) computes on cuda:0"))
    check("the report has the placed model's bytes", "on cuda:0" in placed_model and "on cpu" in placed_model)
    comfy.free(unload_models=True, free_memory=True)


def check_cpu_parts(check: Checks, comfy: Driver) -> None:
    """The CPU's arithmetic is another: the pictures only have to be alike."""
    want = draw(comfy, workflows.flux())
    alike = difference(draw(comfy, workflows.flux(seed=7)), want) / 4
    for part in ("clip", "vae"):
        off = difference(draw(comfy, placed(workflows.flux(), part, compute_device="cpu")), want)
        detail = f"{off:.1f} of 255 off, {alike:.1f} allowed; {resting(comfy)}"
        check(f"{part} on the CPU, the model on the GPU", off <= alike, detail)
    comfy.free(unload_models=True, free_memory=True)


def difference(some: tuple[Picture, ...], others: tuple[Picture, ...]) -> float:
    """The mean difference of the pixels. Pictures are alike if it is a quarter of that of another seed, or less."""
    one, other = (numpy.frombuffer(pictures[0].pixels, dtype=numpy.uint8).astype(int) for pictures in (some, others))
    return float(numpy.abs(one - other).mean())


def check_large(check: Checks, comfy: Driver) -> None:
    stock = workflows.flux(size=1024, steps=4)
    stock["model"]["inputs"]["unet_name"] = "flux_shaped.safetensors"
    want = draw(comfy, stock)
    seconds = comfy.run(reseeded(stock)).seconds
    for asked in ("cuda:0,75%;cpu,*", "cuda:0,50%;cpu,*", "cuda:0,0%;cpu,*"):
        comfy.free(unload_models=True, free_memory=True)
        workflow = placed(stock, "model", mode="expert", expert_mode_allocations=asked)
        got = draw(comfy, workflow)
        again = comfy.run(reseeded(workflow)).seconds
        check(f"24 GB, {asked}", got == want, f"{again:.1f} s a prompt, stock {seconds:.1f} s; {resting(comfy)}")
    comfy.free(unload_models=True, free_memory=True)


def reseeded(workflow: Workflow) -> Workflow:
    sample = workflow["sample"]
    return {**workflow, "sample": {**sample, "inputs": {**sample["inputs"], "seed": 99}}}


def resting(comfy: Driver) -> str:
    rows = [row for row in comfy.models() if row["alive"]]
    return "; ".join(
        f"{row['model_class']} "
        + ", ".join(f"{count / 1e6:.0f} MB {device}" for device, count in sorted(row["storages"].items()))
        for row in rows
    )


@contextmanager
def started(tree: Path, models: Path, base: Path, static: bool) -> Iterator[Driver]:
    frontend = base / "frontend"
    frontend.mkdir()
    (frontend / "index.html").write_text("no frontend here")
    spec = ServerSpec(
        tree=tree,
        python=Path(sys.executable),
        base=base / "run",
        models=models,
        packs={PACK: ROOT},
        first_packs=DEBUG_PACKS,
        flags=("--disable-dynamic-vram",) if static else (),
        environment={"PYTHONPATH": os.pathsep.join([str(BUNDLE / "site"), bench_host.server_packages()])},
        frontend=frontend,
    )
    server = Server(spec)
    server.start()
    try:
        yield Driver(server)
    finally:
        ours = [line for line in server.log().splitlines() if "ultiGPU" in line or "DynamicVRAM" in line]
        print("The log's lines about us:", *ours[-60:], sep="\n")
        server.stop()


def make_models(tree: Path, large: bool) -> Path:
    folder = Path(bench_host.model_path("toy"))
    if not folder.is_dir():
        search = os.pathsep.join([str(BUNDLE / "site"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "devtools.toy", str(tree), str(folder)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": search}, check=True)
    whole = folder / "diffusion_models" / "flux_shaped.safetensors"
    if large and not whole.exists():
        bench_host.write_flux(str(whole), **{**bench_host.FLUX_DEV, "vector": 2048})
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--host", type=Path, default=BUNDLE / "ComfyUI")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    check = Checks()
    models = make_models(options.host, not options.small)
    with tempfile.TemporaryDirectory() as base, started(options.host, models, Path(base), options.static) as comfy:
        dynamic = "DynamicVRAM support detected and enabled" in comfy.log()
        check("DynamicVRAM is as asked for", dynamic is not options.static)
        comfy.run(workflows.flux(seed=1))
        tell(check, comfy.client, Path(base) / "picture.png")
        check_cases(check, comfy, place_cases())
        check_cases(check, comfy, loader_cases())
        check_lora(check, comfy, options.static)
        check_report(check, comfy)
        check_cpu_parts(check, comfy)
        if not options.small:
            check_large(check, comfy)
        check("no traceback of ours in the log", not comfy.our_tracebacks(), "".join(comfy.our_tracebacks())[:2000])
    print(f"{check.failed} failed")
    return int(check.failed > 0)


def tell(check: Checks, client: Client, picture: Path) -> None:
    try:
        story.tell(client, picture)
        check("the story of dev.py run", True)
    except (PromptFailed, Problem) as failure:
        check("the story of dev.py run", False, repr(failure))


if __name__ == "__main__":
    sys.exit(main())
