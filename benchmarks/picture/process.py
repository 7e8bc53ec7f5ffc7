"""One process of the benchmark: one case and one side. `bench_host` has started ComfyUI."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import bench_host as host
import bench_models
import torch

from .cases import FIRST_STEPS, Case
from .memory import HighestRam, ballast, pinned_bytes, used_ram

RANK = 32


def measure(case: Case, side: str, path: str, small: str) -> tuple[dict[str, Any], list[Any]]:
    """Seconds, bytes and pictures. `small` is a smaller model of the same family, to warm up with.

    The second is what is in memory. To hold it until the process ends saves giving it back piece by piece.
    """
    begin = time.monotonic()
    studio = Studio(case)
    host.place_node()  # on every side: a server has imported all nodes before a prompt comes
    studio.load_and_draw(small, None, 1)
    loras = [lora_tensors(path, seed) for seed in (4, 5, 6)] if case.lora else [None]
    host.unload()
    held = ballast(case.card)
    room = torch.cuda.mem_get_info()[0]
    before = used_ram()
    result: dict[str, Any] = {"steps": case.steps, "model": os.path.getsize(path)}
    pictures: dict[str, Any] = {}
    least_free = []
    warm = time.monotonic()

    def timed(what: str, draw: Callable[[], Any]) -> Any:
        studio.least_free = room
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model, picture = draw()
        torch.cuda.synchronize()
        result[what] = time.perf_counter() - begin
        pictures[what] = checksum(picture)
        least_free.append(studio.least_free)
        return model

    with pinned_bytes() as pinned, HighestRam() as ram:
        place = (lambda model: host.place(model, case.allocation)) if side == "ours" else None
        model = timed("first", lambda: studio.load_and_draw(path, place, FIRST_STEPS, loras[0]))
        result |= {**studio.stamps, "ram_first": ram.highest - before, **promised(model)}
        timed("second", lambda: studio.draw(model, case.steps, loras[0], settled=True))
        result |= {"step": studio.seconds_per_step, "second_first_step": studio.stamps["first_step"]}
        result |= {"free": studio.least_free, **plan_of(model), **waited(model)}
        if case.lora:
            timed("change", lambda: studio.draw(model, 4, loras[1]))
            timed("change_8", lambda: studio.draw(model, 8, loras[2]))
            timed("off", lambda: studio.draw(model, case.steps))
            result["step_off"] = studio.seconds_per_step
            timed("on", lambda: studio.draw(model, 4, loras[0]))
        else:
            timed("again", lambda: studio.draw(model, case.steps, seed=3, settled=True))
        result |= {"ram_peak": ram.highest - before, "ram": used_ram() - before, "pinned": pinned()}
    result |= {"free_least": min(least_free), "peak": room - min(least_free), "pictures": pictures}
    result["seconds"] = {"warm_up": warm - begin, "measured": time.monotonic() - warm}
    return result, [studio, model, held]


class Studio:
    """Draws the picture of a case, and notes when what was done and the least memory that was free between steps."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(2)
        self._case = case
        self._noises = {2: torch.randn(case.latent, generator=random)}
        tokens, width = bench_models.TEXT[case.family]
        about: dict[str, Any] = {}
        if case.family == "flux":
            about = {
                "pooled_output": torch.randn(1, bench_models.FLUX_DEV["vector"], generator=random),
                "guidance": 3.5,
            }
        self._text = torch.randn(1, tokens, width, generator=random), about
        self._noises[3] = torch.randn(case.latent, generator=random)
        self._patched: tuple[Any, Any] | None = None
        self.seconds_per_step = 0.0
        self.stamps: dict[str, float] = {}
        """Seconds of the last prompt: `load` (the loader), `place` (the node), `prepare` (from the beginning of
        sampling to the first call of the model), `first_step` (from there to the end of the first step)."""
        self.least_free = torch.cuda.mem_get_info()[1]

    def load_and_draw(
        self, path: str, place: Callable[[Any], Any] | None, steps: int, lora: Any = None
    ) -> tuple[Any, torch.Tensor]:
        self._patched = None
        begin = time.perf_counter()
        with torch.inference_mode():  # as ComfyUI runs all nodes
            model = host.load(path)
            loaded = time.perf_counter()
            before = {"load": loaded - begin}
            if place is not None:
                model = place(model)
                before["place"] = time.perf_counter() - loaded
        drawn = self.draw(model, steps, lora)
        self.stamps = {**before, **self.stamps}
        return drawn

    def draw(
        self, model: Any, steps: int, lora: Any = None, seed: int = 2, *, settled: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """The model without the LoRA, and the picture.

        `settled`: what was begun before the first call of the model ends before the first step begins, so that it does
        not count as part of it. Otherwise nothing waits.
        """
        import comfy.sample
        import comfy.sd
        from comfy.model_base import BaseModel

        if self._patched is None or self._patched[0] is not lora:  # ComfyUI keeps what the LoRA's node has returned
            with torch.inference_mode():
                self._patched = lora, comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0)[0] if lora else model
        patched = self._patched[1]
        called, stamps, apply_model = [], [], BaseModel.apply_model

        def noted(*given: Any, **named: Any) -> torch.Tensor:
            if not called:
                if settled:
                    torch.cuda.synchronize()
                called.append(time.perf_counter())
            return apply_model(*given, **named)

        def after_step(step: int, x0: Any, x: Any, total: int) -> None:
            if step in (0, total - 1):  # synchronising after every step would slow them down
                self.least_free = min(self.least_free, torch.cuda.mem_get_info()[0])
                torch.cuda.synchronize()
                stamps.append(time.perf_counter())

        (text, about), noise = self._text, self._noises[seed]
        condition = [[text, dict(about)]]
        arguments = (steps, 1.0, "euler", "simple", condition, condition, torch.zeros_like(noise))
        begin = time.perf_counter()
        with torch.inference_mode(), mock.patch.object(BaseModel, "apply_model", noted):
            picture = comfy.sample.sample(patched, noise, *arguments, callback=after_step, disable_pbar=True, seed=seed)
        if steps > 1:
            self.seconds_per_step = (stamps[-1] - stamps[0]) / (steps - 1)
        self.stamps = {"prepare": called[0] - begin, "first_step": stamps[0] - called[0]}
        return model, picture


def lora_tensors(path: str, seed: int) -> dict[str, torch.Tensor]:
    """As a LoRA file would hold them, for every linear: all weights with two dimensions."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    random, tensors = torch.Generator("cuda").manual_seed(seed), {}
    for name, about in header.items():
        shape = about.get("shape", ())
        if len(shape) == 2:
            name = f"diffusion_model.{name.removesuffix('.weight')}"
            for part, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                values = torch.randn(size, generator=random, device="cuda").mul_(0.02)
                tensors[f"{name}.lora_{part}.weight"] = values.cpu()
    return tensors


def checksum(picture: torch.Tensor) -> dict[str, Any]:
    data = picture.float().cpu().contiguous()
    return {"sum": data.double().sum().item(), "sha256": hashlib.sha256(data.numpy().tobytes()).hexdigest()}


def promised(model: Any) -> dict[str, Any]:
    """Seconds per step as forecast now, and as estimated when the model was placed, before anything was timed."""
    placed = getattr(model, "placed", None)
    if placed is None:
        return {}
    estimate, forecast = placed.plan.forecast, placed.states.of(model).forecast()
    simulated = forecast and (forecast.simulated or forecast.step)
    return {"estimate": estimate and estimate.step, "forecast": forecast and forecast.step, "simulated": simulated}


def waited(model: Any) -> dict[str, Any]:
    """Of a step timed by events: seconds, and those in which the GPU waited for weights."""
    placed = getattr(model, "placed", None)
    if placed is None:
        return {}
    state = placed.states.of(model)
    state.forecast()  # takes in what was timed
    facts = state.steps._facts.get(state.steps._latest)
    if facts is None:
        return {}
    seconds = facts.time.seconds
    return {"timed": seconds, "waited": seconds - sum(facts.time.computing.values())}


def plan_of(model: Any) -> dict[str, Any]:
    """The plan in force: bytes in RAM, bytes that a first step copies, and those of them that the others do not."""
    placed = getattr(model, "placed", None)
    if placed is None:
        return {}
    from multigpu.plan import CPU

    residence = placed.states.of(model).residence
    plan = residence.plan or placed.plan
    return {
        "homed": plan.bytes_on(CPU),
        "streamed": sum(placement.bytes for placement in plan.streamed) - residence.retained_bytes,
        "hoisted": residence.hoisted_bytes,
        "ring": plan.ring_bytes,
    }
