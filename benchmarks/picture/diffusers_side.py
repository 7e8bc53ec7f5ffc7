"""One process of the benchmark with the library diffusers, where it is installed: the same file, the same picture size.

On a card that is smaller than the model its weights are offloaded leaf by leaf, copied on a stream of their own (group
offloading); without a ballast all of them are on the GPU. Its pictures are not compared: the model is not ComfyUI's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import bench_models
import torch

from .cases import FIRST_STEPS, Case
from .memory import HighestRam, ballast, pinned_bytes, used_ram

_HEAD = 128


def model_class(case: Case) -> tuple[str, dict[str, Any]]:
    """The class in diffusers, and the sizes of the model in its words."""
    sizes = bench_models.SIZES[case.family]
    size: dict[str, int] = sizes[case.size]
    if case.family == "flux":
        about = {"num_layers": size["double"], "num_single_layers": size["single"], "guidance_embeds": True}
        return "FluxTransformer2DModel", about | {"num_attention_heads": size["hidden"] // _HEAD}
    if case.family == "wan":
        about = {"num_layers": size["layers"], "ffn_dim": size["ffn"]}
        return "WanTransformer3DModel", about | {"num_attention_heads": size["dim"] // _HEAD}
    return "QwenImageTransformer2DModel", {"num_layers": size["layers"]}


def load(case: Case, path: str) -> Any:
    import diffusers
    from diffusers.hooks import apply_group_offloading

    name, sizes = model_class(case)
    cls = getattr(diffusers, name)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump({"_class_name": name, **sizes}, file)
        model = cls.from_single_file(path, config=folder, torch_dtype=torch.bfloat16)
    gpu = torch.device("cuda:0")
    if case.whole:
        return model.to(gpu)
    apply_group_offloading(model, gpu, offload_type="leaf_level", use_stream=True, non_blocking=True)
    return model


class Pipeline:
    """Calls the model as a pipeline of its family does, once for each step of an Euler sampler."""

    def __init__(self, case: Case) -> None:
        self._case = case
        random = torch.Generator().manual_seed(2)
        tokens, width = bench_models.TEXT[case.family]
        self._text = torch.randn(1, tokens, width, generator=random).to("cuda", torch.bfloat16)
        self._noises = [torch.randn(case.latent, generator=random).to("cuda", torch.bfloat16) for _ in range(2)]
        self._pooled = torch.randn(1, bench_models.FLUX_DEV["vector"], generator=random).to("cuda", torch.bfloat16)
        self.seconds_per_step = self.first_step = 0.0
        self.least_free = torch.cuda.mem_get_info()[1]

    def draw(self, model: Any, steps: int, seed: int = 0) -> torch.Tensor:
        x = self._noises[seed] if self._case.family == "wan" else _packed(self._noises[seed])
        begin, stamps = time.perf_counter(), []
        with torch.inference_mode():
            for step in range(steps):
                time_left = torch.full((1,), 1.0 - step / steps, device="cuda", dtype=torch.bfloat16)
                x = x - self._predicted(model, x, time_left) / steps
                if step in (0, steps - 1):
                    self.least_free = min(self.least_free, torch.cuda.mem_get_info()[0])
                    torch.cuda.synchronize()
                    stamps.append(time.perf_counter())
        self.first_step = stamps[0] - begin
        if steps > 1:
            self.seconds_per_step = (stamps[-1] - stamps[0]) / (steps - 1)
        return x

    def _predicted(self, model: Any, x: torch.Tensor, time_left: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"hidden_states": x, "encoder_hidden_states": self._text, "return_dict": False}
        rows, columns = self._case.height // 16, self._case.width // 16
        if self._case.family == "flux":
            places = torch.zeros(rows, columns, 3)
            places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
            given |= {
                "timestep": time_left,
                "pooled_projections": self._pooled,
                "guidance": torch.full((1,), 3.5, device="cuda"),
                "img_ids": places.reshape(-1, 3).cuda(),
                "txt_ids": torch.zeros(self._text.shape[1], 3, device="cuda"),
            }
        elif self._case.family == "wan":
            given |= {"timestep": time_left * 1000}
        else:
            given |= {"timestep": time_left, "img_shapes": [[(1, rows, columns)]]}
            given |= {"encoder_hidden_states_mask": torch.ones(1, self._text.shape[1], device="cuda", dtype=torch.long)}
        predicted: torch.Tensor = model(**given)[0]
        return predicted


def _packed(noise: torch.Tensor) -> torch.Tensor:
    """Two by two pixels of the latent as one token."""
    *_, height, width = noise.shape
    tokens = noise.reshape(1, 16, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(1, height * width // 4, 64)


def measure(case: Case, path: str) -> tuple[dict[str, Any], list[Any]]:
    """As `process.measure`, for bf16 models without a LoRA."""
    if case.kind != "bf16" or case.lora:
        raise SystemExit(f"{case.name} is not measured with diffusers: it has fp8 weights or a LoRA")
    entered = time.monotonic()
    pipeline = Pipeline(case)
    held = ballast(case.card)
    room = torch.cuda.mem_get_info()[0]
    before = used_ram()
    result: dict[str, Any] = {"steps": case.steps, "model": os.path.getsize(path)}
    least_free = []
    warm = time.monotonic()

    def timed(what: str, draw: Callable[[], Any]) -> Any:
        pipeline.least_free = room
        begin = time.perf_counter()
        drawn = draw()
        torch.cuda.synchronize()
        result[what] = time.perf_counter() - begin
        least_free.append(pipeline.least_free)
        return drawn

    def first() -> Any:
        begin = time.perf_counter()
        model = load(case, path)
        result["load"] = time.perf_counter() - begin
        pipeline.draw(model, FIRST_STEPS)
        return model

    with pinned_bytes() as pinned, HighestRam() as ram:
        model = timed("first", first)
        result |= {"first_step": pipeline.first_step, "ram_first": ram.highest - before}
        timed("second", lambda: pipeline.draw(model, case.steps))
        result |= {"step": pipeline.seconds_per_step, "second_first_step": pipeline.first_step}
        result["free"] = pipeline.least_free
        timed("again", lambda: pipeline.draw(model, case.steps, seed=1))
        result |= {"ram_peak": ram.highest - before, "ram": used_ram() - before, "pinned": pinned()}
    result |= {"free_least": min(least_free), "peak": room - min(least_free)}
    result["seconds"] = {"warm_up": warm - entered, "measured": time.monotonic() - warm}
    return result, [model, held]
