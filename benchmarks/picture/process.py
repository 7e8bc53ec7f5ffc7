"""One process of the benchmark: one case and one side. `bench_host` has started ComfyUI."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import bench_host as host
import bench_models
import torch

from .cases import FIRST_STEPS, Case

RANK = 32


def measure(case: Case, side: str, path: str, small: str) -> dict[str, Any]:
    """Seconds, bytes and pictures. `small` is a smaller model of the same family, to warm up with."""
    studio = Studio(case)
    host.place_node()  # on every side: a server has imported all nodes before a prompt comes
    studio.load_and_draw(small, None, 1)
    host.unload()
    loras = [lora_tensors(path, seed) for seed in (4, 5, 6)] if case.lora else [None]
    held = ballast(case.card)
    room = studio.least_free = torch.cuda.mem_get_info()[0]
    before = anonymous_bytes()
    result: dict[str, Any] = {"steps": case.steps}
    pictures: dict[str, Any] = {}

    def timed(what: str, draw: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model, picture = draw()
        torch.cuda.synchronize()
        result[what] = time.perf_counter() - begin
        pictures[what] = checksum(picture)
        return model

    with pinned_bytes() as pinned, HighestRam() as ram:
        place = (lambda model: host.place(model, case.allocation)) if side == "ours" else None
        model = timed("first", lambda: studio.load_and_draw(path, place, FIRST_STEPS, loras[0]))
        result["ram_peak"] = ram.highest - before
        timed("second", lambda: studio.draw(model, case.steps, loras[0]))
        result["step"] = studio.seconds_per_step
        if case.lora:
            timed("change", lambda: studio.draw(model, 4, loras[1]))
            timed("change_8", lambda: studio.draw(model, 8, loras[2]))
            timed("off", lambda: studio.draw(model, case.steps))
            result["step_off"] = studio.seconds_per_step
            timed("on", lambda: studio.draw(model, 4, loras[0]))
        result |= {"ram": anonymous_bytes() - before, "pinned": pinned(), "pictures": pictures}
    result |= {"free": studio.least_free, "peak": room - studio.least_free, "model": os.path.getsize(path)}
    result |= plan_of(model)
    del held
    return result


class Studio:
    """Draws the picture of a case, and notes the time between steps and the memory that was free at their end."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(2)
        self._case = case
        self._noise = torch.randn(case.latent, generator=random)
        tokens, width = bench_models.TEXT[case.family]
        about: dict[str, Any] = {}
        if case.family == "flux":
            about = {
                "pooled_output": torch.randn(1, bench_models.FLUX_DEV["vector"], generator=random),
                "guidance": 3.5,
            }
        self._text = torch.randn(1, tokens, width, generator=random), about
        self._patched: tuple[Any, Any] | None = None
        self.seconds_per_step = 0.0
        self.least_free = torch.cuda.mem_get_info()[1]

    def load_and_draw(
        self, path: str, place: Callable[[Any], Any] | None, steps: int, lora: Any = None
    ) -> tuple[Any, torch.Tensor]:
        self._patched = None
        model = host.load(path)
        if place is not None:
            model = place(model)
        return self.draw(model, steps, lora)

    def draw(self, model: Any, steps: int, lora: Any = None) -> tuple[Any, torch.Tensor]:
        """The model without the LoRA, and the picture."""
        import comfy.sample
        import comfy.sd

        if self._patched is None or self._patched[0] is not lora:  # ComfyUI keeps what the LoRA's node has returned
            self._patched = lora, comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0] if lora else model
        patched = self._patched[1]
        stamps = []

        def after_step(step: int, x0: Any, x: Any, total: int) -> None:
            if step in (0, total - 1):  # synchronising after every step would slow them down
                self.least_free = min(self.least_free, torch.cuda.mem_get_info()[0])
                torch.cuda.synchronize()
                stamps.append(time.perf_counter())

        text, about = self._text
        condition = [[text, dict(about)]]
        arguments = (steps, 1.0, "euler", "simple", condition, condition, torch.zeros_like(self._noise))
        with torch.inference_mode():
            picture = comfy.sample.sample(
                patched, self._noise, *arguments, callback=after_step, disable_pbar=True, seed=2
            )
        if steps > 1:
            self.seconds_per_step = (stamps[-1] - stamps[0]) / (steps - 1)
        return model, picture


def ballast(card: float | None) -> torch.Tensor | None:
    if card is None:
        return None
    size = torch.cuda.mem_get_info()[0] - int(card * 1e9)
    if size < 0:
        raise SystemExit(f"a card of {card} GB was asked for, but only {size / 1e9 + card:.1f} GB are free")
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


def lora_tensors(path: str, seed: int) -> dict[str, torch.Tensor]:
    """As a LoRA file would hold them, for every linear of the blocks."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, about in header.items():
        shape = about.get("shape", ())
        if "blocks." in name and len(shape) == 2:
            name = f"diffusion_model.{name.removesuffix('.weight')}"
            for part, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                tensors[f"{name}.lora_{part}.weight"] = torch.randn(size, generator=random).mul_(0.02)
    return tensors


def checksum(picture: torch.Tensor) -> dict[str, Any]:
    data = picture.float().cpu().contiguous()
    return {"sum": data.double().sum().item(), "sha256": hashlib.sha256(data.numpy().tobytes()).hexdigest()}


def plan_of(model: Any) -> dict[str, Any]:
    """The plan in force: bytes in RAM, bytes streamed and computed ahead, and the seconds per step that it promises."""
    placed = getattr(model, "placed", None)
    if placed is None:
        return {}
    from multigpu.plan import CPU

    residence = placed.states.of(model).residence
    plan = residence.plan or placed.plan
    forecast = placed.states.of(model).forecast()
    return {
        "homed": plan.bytes_on(CPU),
        "streamed": sum(placement.bytes for placement in plan.streamed) - residence.retained_bytes,
        "hoisted": residence.hoisted_bytes,
        "ring": plan.ring_bytes,
        "forecast": forecast and forecast.step,
    }


def anonymous_bytes() -> int:
    """RAM that no file backs. Unlike `smaps_rollup`, this costs nothing even with many pages."""
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class HighestRam:
    """The most anonymous RAM while it is entered, looked at every 20 ms."""

    def __init__(self) -> None:
        self.highest = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.highest = max(self.highest, anonymous_bytes())

    def __enter__(self) -> HighestRam:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()


class CountingRuntime:
    """The CUDA runtime that torch offers, with the RAM counted that is registered through it."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        error = self._real.cudaHostRegister(pointer, size, flags)
        if int(error) == 0:
            self.sizes[pointer] = size
        return error

    def cudaHostUnregister(self, pointer: int) -> Any:
        self.sizes.pop(pointer, None)
        return self._real.cudaHostUnregister(pointer)


@contextmanager
def pinned_bytes() -> Iterator[Callable[[], int]]:
    """Counts pinned RAM, whoever pins it: by registering, as ComfyUI and we do, or through torch's allocator."""
    runtime = CountingRuntime(torch.cuda.cudart())
    statistics = torch.cuda.host_memory_stats if hasattr(torch._C, "_cuda_hostMemoryStats") else dict

    def count() -> int:
        return sum(runtime.sizes.values()) + statistics().get("allocated_bytes.current", 0)

    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        yield count
