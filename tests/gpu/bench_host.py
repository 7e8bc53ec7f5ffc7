"""ComfyUI inside this process, with or without DynamicVRAM, from `.bundle` or any tree; and a Flux-shaped model."""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import bench_models
import torch
from bench_models import FLUX_DEV, model_path

ROOT = Path(__file__).parents[2]


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


def write_flux(path: str, **sizes: int) -> None:
    """A random model file of Flux's shape in bf16, with the sizes of `FLUX_DEV` or others."""
    bench_models.write(path, bench_models.flux(**sizes))


def flux_file(size: str) -> str:
    """The model file of a size, made if it is not there yet."""
    return bench_models.model_file("flux", size)


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


def place(patcher: Any, allocation: str | None = None) -> Any:
    """`patcher` placed by the Place Model node, as in a workflow: by an allocation, or in mode auto."""
    chosen = {"mode": "auto"} if allocation is None else {"mode": "expert", "expert_mode_allocations": allocation}
    return place_node().execute(model=patcher, **chosen).result[0]


@functools.cache
def place_node() -> Any:
    """The Place Model node. Asked for once before anything is timed: a server has all nodes when a prompt comes."""
    import nodes  # noqa: F401  the host's, which are there in a server

    from multigpu.runtime import current

    (node,) = (node for node in current().nodes() if node.GET_SCHEMA().node_id == "MultiGPUPlaceModel")
    return node


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
    """Load a model whole: what would come with the first step comes now."""
    import comfy.model_management

    with torch.inference_mode():
        comfy.model_management.load_models_gpu([patcher], memory_required=4 << 30)
        placed = getattr(patcher, "placed", None)
        residence = None if placed is None else placed.states.of(patcher).residence
        if hasattr(residence, "due"):  # not in older trees
            residence.due.finish()


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
