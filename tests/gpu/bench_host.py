"""ComfyUI inside this process, with or without DynamicVRAM, from `.bundle` or any tree; and a Flux-shaped model."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FLUX_DEV = {"hidden": 3072, "double": 19, "single": 38, "context": 4096, "vector": 768}
SIZES = {"whole": {}, "small": {"double": 2, "single": 4}, "narrow": {"hidden": 384}}
"""Flux-dev, or smaller: fewer blocks, or as many thin ones."""


def start(tree: str | None = None, dynamic: bool = False) -> None:
    """Import the host as its main.py does. Call once, before anything of `comfy` is imported."""
    bundle = ROOT / ".bundle"
    sys.path[:0] = [str(ROOT), str(tree or bundle / "ComfyUI"), str(bundle / "site")]
    sys.path.append(server_packages())
    import multigpu.plan  # noqa: F401  before the host puts its own multigpu.py on the path

    sys.argv = [sys.argv[0], *([] if dynamic else ["--disable-dynamic-vram"])]
    import comfy.options

    comfy.options.enable_args_parsing()
    if dynamic:
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    if dynamic:
        devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
        if not comfy_aimdo.control.init_devices([(index, 0) for index in devices]):
            raise SystemExit("comfy-aimdo does not work on this machine: DynamicVRAM cannot be tested here")
        comfy_aimdo.control.set_log_warning()
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def server_packages() -> str:
    """The folder with the packages that the host's server needs: unpacked from the bundle, if they are not yet."""
    folder = Path(model_path("packages"))
    if not folder.is_dir():
        for wheel in (ROOT / ".bundle" / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return str(folder)


def write_flux(path: str, hidden: int, double: int, single: int, context: int, vector: int) -> None:
    """A random model file of Flux's shape in bf16; made on the GPU where there is one."""
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, into: int) -> None:
        for part, shape, scale in (("weight", (out, into), into**-0.5), ("bias", (out,), 0.1)):
            values = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) * scale
            tensors[f"{name}.{part}"] = values.cpu()

    def embedder(name: str, into: int) -> None:
        linear(f"{name}.in_layer", hidden, into)
        linear(f"{name}.out_layer", hidden, hidden)

    def norms(name: str) -> None:
        for which in ("query", "key"):
            tensors[f"{name}.{which}_norm.scale"] = torch.ones(128, dtype=torch.bfloat16)

    linear("img_in", hidden, 64)
    linear("txt_in", hidden, context)
    for name, into in (("time_in", 256), ("vector_in", vector), ("guidance_in", 256)):
        embedder(name, into)
    for block in range(double):
        for side in ("img", "txt"):
            name = f"double_blocks.{block}.{side}"
            linear(f"{name}_mod.lin", 6 * hidden, hidden)
            linear(f"{name}_attn.qkv", 3 * hidden, hidden)
            linear(f"{name}_attn.proj", hidden, hidden)
            linear(f"{name}_mlp.0", 4 * hidden, hidden)
            linear(f"{name}_mlp.2", hidden, 4 * hidden)
            norms(f"{name}_attn.norm")
    for block in range(single):
        name = f"single_blocks.{block}"
        linear(f"{name}.linear1", 7 * hidden, hidden)
        linear(f"{name}.linear2", hidden, 5 * hidden)
        linear(f"{name}.modulation.lin", 3 * hidden, hidden)
        norms(f"{name}.norm")
    linear("final_layer.linear", 64, hidden)
    linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden)
    save_file(tensors, path, metadata={"format": "pt"})


def flux_file(size: str) -> str:
    """The model file of a size, made if it is not there yet."""
    path = model_path(f"flux_shaped_{size}.safetensors")
    if not os.path.exists(path):
        write_flux(path, **{**FLUX_DEV, **SIZES[size]})
    return path


def write_gguf(source: str, target: str) -> None:
    """A model file as a GGUF file: matrices in Q8_0 (a byte for each number, a scale for 32), the rest in F32."""
    import gguf
    from safetensors import safe_open

    writer = gguf.GGUFWriter(target, "flux")
    with safe_open(source, "pt", device="cuda" if torch.cuda.is_available() else "cpu") as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            values = file.get_tensor(name).float()
            if values.dim() == 2:
                groups = values.reshape(values.shape[0], -1, 32)
                scale = groups.abs().amax(2, keepdim=True) / 127
                numbers = (groups / scale).round().to(torch.int8)
                rows = torch.cat([scale.half().view(torch.int8), numbers], 2).reshape(values.shape[0], -1)
                raw = rows.view(torch.uint8).cpu().numpy()
                writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, values.cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(path: str, pack: str) -> Any:
    """The model of a GGUF file, loaded by ComfyUI-GGUF, whose folder is `pack`."""
    import folder_paths

    folder_paths.add_model_folder_path("diffusion_models", os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("gguf_pack", os.path.join(pack, "__init__.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loader = module.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()
    return loader.load_unet(os.path.basename(path))[0]


def load(path: str, weight_dtype: torch.dtype | None = None) -> Any:
    import comfy.sd

    return comfy.sd.load_diffusion_model(path, model_options={"dtype": weight_dtype} if weight_dtype else {})


def place(patcher: Any, allocation: str) -> Any:
    """`patcher` placed by the Place Model node, as in a workflow."""
    from multigpu.runtime import current

    (node,) = (node for node in current().nodes() if node.GET_SCHEMA().node_id == "MultiGPUPlaceModel")
    return node.execute(model=patcher, mode="expert", expert_mode_allocations=allocation).result[0]


class Forward:
    """One denoising forward of a Flux-shaped model at `side` x `side` pixels, with fixed inputs."""

    def __init__(self, device: torch.device, side: int = 1024) -> None:
        random = torch.Generator(device="cpu").manual_seed(1)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(device, torch.bfloat16)

        self.latent = noise(1, 16, side // 8, side // 8).float()
        self.timestep = torch.full((1,), 0.7, device=device)
        self.conditions = {
            "c_crossattn": noise(1, 256, FLUX_DEV["context"]),
            "y": noise(1, FLUX_DEV["vector"]),
            "guidance": torch.full((1,), 3.5, device=device),
        }

    def __call__(self, patcher: Any) -> torch.Tensor:
        with torch.inference_mode():
            return patcher.model.apply_model(self.latent, self.timestep, **self.conditions)

    def with_peak(self, patcher: Any) -> tuple[torch.Tensor, int]:
        """The result, and the most bytes allocated meanwhile beyond what was allocated before.

        Not for the first forward: kernels are chosen while that one runs, and its last bits differ.
        """
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = self(patcher)
        return result, torch.cuda.max_memory_allocated() - before

    def seconds(self, patcher: Any, steps: int = 6, warm: int = 2) -> float:
        """Mean wall seconds per forward after `warm` others."""
        for _ in range(warm):
            self(patcher)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self(patcher)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps


def warm_up(small: str, forward: Forward) -> None:
    """Load, run and drop a small model, so that what libraries take once is there before anything is counted."""
    patcher = load(small)
    load_on_device(patcher)
    forward(patcher)
    del patcher
    unload()


def load_on_device(patcher: Any) -> None:
    import comfy.model_management

    with torch.inference_mode():
        comfy.model_management.load_models_gpu([patcher], memory_required=4 << 30)


def unload() -> None:
    import gc

    import comfy.model_management

    from multigpu.devices.caches import trim_heap

    comfy.model_management.unload_all_models()
    gc.collect()
    torch.cuda.empty_cache()
    trim_heap()


def anonymous_bytes() -> int:
    """RAM that only this process holds and no file backs."""
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def model_path(name: str) -> str:
    folder = Path(os.environ.get("MULTIGPU_BENCH_MODELS", "/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / name)
