"""Real packs in a real ComfyUI on three simulated GPUs, with our nodes for them. By hand: the packs are not ours.

    .venv/bin/python tests/packs/check_packs.py FOLDER_OF_A_PACK ... [--host 0.30.0] [--packages FOLDER]

`--packages` is a folder with what the packs need, made by `pip install --no-deps --target FOLDER ...`. For each node of
a pack that the archived pack had one for, prints whether there is one of ours, with the inputs of the pack's node and
ours. With ComfyUI-WanVideoWrapper it also makes a small Wan model, and samples with the pack's own nodes and with ours:
on another device, and with blocks swapped to a third device. Exits 1 if a check failed. See docs/packs.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from devtools.client import PromptFailed, Workflow  # noqa: E402
from devtools.hosts import find  # noqa: E402
from devtools.server import Server  # noqa: E402
from multigpu.nodes.pack_table import BLOCK_SWAP, PACK_NODES  # noqa: E402
from tests.host.driver import spec_for  # noqa: E402
from tests.host.lifecycle import PACKS, Keeper, own_models  # noqa: E402
from tests.host.workflows import node  # noqa: E402
from tests.sim import simdev  # noqa: E402

SIM = Path(simdev.__file__).parents[1]
EMBEDS = """
class EmbedsOnDevice:  # as the pack's own node for it, which knows one device only
    INPUT_TYPES = classmethod(lambda cls: {"required": {"text": ("CONDITIONING",), "device": ("STRING", {})}})
    RETURN_TYPES, FUNCTION = ("WANVIDEOTEXTEMBEDS",), "moved"

    def moved(self, text, device):
        embeds = text[0][0].to(device)
        return ({"prompt_embeds": embeds, "negative_prompt_embeds": embeds},)

NODE_CLASS_MAPPINGS = {"EmbedsOnDevice": EmbedsOnDevice}
"""
WAN = "small_wan_for_the_wrapper.safetensors"


def write_wan(path: Path, width: int = 144, inner: int = 96, layers: int = 30) -> None:
    """A Wan 2.1 text to video model with random weights, of a width that the pack takes for the 1.3B one."""
    chance = torch.Generator().manual_seed(5)
    shapes = {
        "patch_embedding": (width, 16, 1, 2, 2), "text_embedding.0": (width, 4096), "text_embedding.2": (width, width),
        "time_embedding.0": (width, 256), "time_embedding.2": (width, width), "time_projection.1": (6 * width, width),
        "head.head": (64, width),
    }  # fmt: skip
    made = {"head.modulation": torch.randn(1, 2, width, generator=chance)}
    for layer in range(layers):
        block = f"blocks.{layer}"
        for attention in ("self_attn", "cross_attn"):
            shapes |= {f"{block}.{attention}.{part}": (width, width) for part in "qkvo"}
            made |= {f"{block}.{attention}.norm_{part}.weight": torch.ones(width) for part in "qk"}
        shapes |= {f"{block}.ffn.0": (inner, width), f"{block}.ffn.2": (width, inner)}
        made |= {f"{block}.norm3.weight": torch.ones(width), f"{block}.norm3.bias": torch.zeros(width)}
        made[f"{block}.modulation"] = torch.randn(1, 6, width, generator=chance)
    for name, shape in shapes.items():
        made[f"{name}.weight"] = torch.randn(shape, generator=chance) * shape[1] ** -0.5
        made[f"{name}.bias"] = torch.zeros(shape[0])
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in made.items()}, path)


class Checks:
    def __init__(self, machine: Keeper) -> None:
        self.machine, self.failed = machine, 0
        self.nodes = machine.client.get("/object_info")

    def say(self, what: str, problem: str = "") -> None:
        self.failed += bool(problem)
        print("FAILED" if problem else "ok    ", f"{what}{': ' if problem else ''}{problem}", flush=True)

    def inputs(self, packs: set[str]) -> None:
        for row in (*PACK_NODES, BLOCK_SWAP):
            if row.pack not in packs:
                continue
            ours = f"{row.target}MultiGPU"
            if row.target not in self.nodes:
                print("absent", f"{row.target}: this version of {row.pack} has no such node")
            elif ours not in self.nodes:
                self.say(ours, "there is none, although the pack has the node")
            else:
                theirs, found = (self.names(node_id) for node_id in (row.target, ours))
                added = [name for name in (row.device, row.offload) if name]
                same = [name for name in found if name not in added] == [n for n in theirs if n != row.replaces]
                same &= set(added) <= set(found)
                self.say(f"{ours} ({', '.join(found)})", "" if same else f"the pack's own has {', '.join(theirs)}")

    def names(self, node_id: str) -> list[str]:
        order = self.nodes[node_id]["input_order"]
        return [name for section in ("required", "optional") for name in order.get(section, ())]

    def sampled(self, workflow: Workflow) -> torch.Tensor | str:
        try:
            self.machine.run(workflow)
        except PromptFailed as failure:
            return str(failure)
        folder = self.machine.server.spec.base / "output"
        return load_file(max(folder.glob("wan_*.latent"), key=lambda path: path.name))["latent_tensor"]

    def wan(self) -> None:
        want = self.sampled(self.workflow(""))
        if isinstance(want, str):
            return self.say("WanVideoSampler of the pack alone", want)
        for device, swap in (("cuda:1", None), ("cuda:1", "cuda:2"), ("cuda:0", "cpu")):
            what = f"on {device}" + (f", blocks swapped to {swap}" if swap else "")
            self.machine.client.post("/simdev", {"reset": True})
            got = self.sampled(self.workflow("MultiGPU", device, swap))
            moved = self.machine.client.get("/simdev")["moved"]
            problem = got if isinstance(got, str) else ""
            if not problem and not torch.equal(torch.as_tensor(got), want):
                problem = "other latents than with the pack alone"
            for link in [f"cpu > {device}", *([f"{device} > {swap}"] if swap else [])]:
                if not problem and moved.get(link, 0) < 3e6:
                    problem = f"too little went from {link}: {moved}"
            self.say(f"WanVideoSamplerMultiGPU {what}", problem)
        return None

    def workflow(self, ours: str, device: str = "", swap: str | None = None) -> Workflow:
        loader = {"model": WAN, "base_precision": "bf16", "quantization": "disabled", "load_device": "offload_device"}
        workflow = {
            "model": node(f"WanVideoModelLoader{ours}", **loader),
            "clip": node("CLIPLoader", clip_name="toy_clip_l.safetensors", type="sd3"),
            "text": node("CLIPTextEncode", clip=["clip", 0], text="a cat"),
            "bridge": node("EmbedsOnDevice", text=["text", 0], device=device or "cuda:0"),
            "empty": node("WanVideoEmptyEmbeds", width=64, height=64, num_frames=5),
            "sample": node(f"WanVideoSampler{ours}", model=["model", 0], text_embeds=["bridge", 0],
                           image_embeds=["empty", 0], steps=2, cfg=1.0, shift=5.0, seed=3, force_offload=True,
                           scheduler="unipc", riflex_freq_index=0),
            "keep": node("SaveLatent", samples=["sample", 0], filename_prefix="wan"),
        }  # fmt: skip
        if ours:
            workflow["model"]["inputs"]["compute_device"] = device
            workflow["sample"]["inputs"]["compute_device"] = ["model", 1]
        if swap:
            arguments = {"blocks_to_swap": 20, "offload_img_emb": False, "offload_txt_emb": False, "swap_device": swap}
            workflow["swap"] = node("WanVideoBlockSwapMultiGPU", **arguments)
            workflow["model"]["inputs"]["block_swap_args"] = ["swap", 0]
        return workflow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--host", default="0.30.0")
    parser.add_argument("--packages", default="")
    options = parser.parse_args()
    simdev.build("cuda")
    with tempfile.TemporaryDirectory() as base:
        folder = own_models(Path(base))
        write_wan(folder / "diffusion_models" / WAN)
        embeds = Path(base) / "embeds.py"
        embeds.write_text(EMBEDS)
        others = {pack.name: pack.resolve() for pack in options.packs}
        spec = spec_for(
            find(options.host),
            Path(base) / "run",
            Path(sys.executable),
            packs={**PACKS, "simdev_probe": SIM / "probe_pack", "embeds.py": embeds, **others},
            models=folder,
            runner=(str(SIM / "serve.py"),),
            environment={**simdev.CPU_LIMIT, "SIMDEV": "cuda:3:6g", "PYTHONPATH": options.packages},
            flags=simdev.HOST_FLAGS,
        )
        with Server(spec) as server:
            checks = Checks(Keeper(server))
            for line in server.log().splitlines():
                if "has changed" in line or ("Cannot import" in line and "custom_nodes" in line):
                    checks.say("the packs are loaded and as expected", line)
            checks.inputs({pack.name for pack in options.packs})
            if "WanVideoModelLoader" in checks.nodes:
                checks.wan()
            for traceback in checks.machine.our_tracebacks():
                checks.say("no traceback of ours in the log", traceback)
            if checks.failed:
                print(server.log()[-6000:])
    print(f"{checks.failed} failed; ComfyUI {options.host}")
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
