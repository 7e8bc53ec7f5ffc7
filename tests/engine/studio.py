"""Load, place and draw with the host's own nodes."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

Hook = Callable[..., None]


@functools.cache
def measured_once() -> Any:
    """The devices for all tests of a process: measuring the speed of simulated ones takes long."""
    from multigpu.devices.inventory import Inventory

    return Inventory()


def load_whole(patcher: Any) -> None:
    """As the host loads a model; and what would come with the first step comes now."""
    import comfy.model_management as memory

    memory.load_models_gpu([patcher])
    placed = getattr(patcher, "placed", None)
    if placed is not None:
        placed.states.of(patcher).residence.due.finish()


class Studio:
    """One picture per recipe: the same with every placement, bit for bit."""

    def __init__(self, models: str, kind: str, world: Any) -> None:
        from multigpu.devices.inventory import Inventory
        from multigpu.errors import HostIncompatible
        from multigpu.host.capabilities import probe
        from multigpu.host.engine.model_states import ModelStates
        from multigpu.host.placing.device_scope import DeviceScope
        from multigpu.host.placing.placer import Placer
        from multigpu.lifecycle.absent import NoFreeFlow

        self.kind, self.world = kind, world
        self.accelerators = [] if world is None else world.devices
        self.states = ModelStates()
        flow = NoFreeFlow(HostIncompatible())
        self.placer = Placer(Inventory(), probe(), self.states, DeviceScope(), flow, hoist=False)
        self.models = Path(models)

    def settle(self) -> None:
        """What the prompt worker does between prompts: give back what dropped patchers had."""
        gc.collect()
        self.states.settle()

    @property
    def simulated(self) -> bool:
        return self.world is not None

    @property
    def spread(self) -> str:
        """A request that uses every device there is."""
        if not self.simulated:
            return "cpu,*"
        zero, one, two = self.accelerators
        return f"{zero},25%;{one},30%;{two},15%;cpu,*"

    # -- loading ------------------------------------------------------------------------------------------------

    def flux(self, dtype: str = "default", name: str = "toy_flux.safetensors") -> Any:
        import nodes

        return nodes.UNETLoader().load_unet(name, dtype)[0]

    def wan(self) -> Any:
        return self.flux(name="toy_wan.safetensors")

    def clip(self) -> Any:
        import nodes

        return nodes.CLIPLoader().load_clip("toy_clip_l.safetensors", "sd3")[0]

    def vae(self, name: str) -> Any:
        import nodes

        return nodes.VAELoader().load_vae(name)[0]

    def sd15(self) -> tuple[Any, Any, Any]:
        import nodes

        model, clip, vae = nodes.CheckpointLoaderSimple().load_checkpoint("toy_sd15.safetensors")
        return model, clip, vae

    def lora(self, model: Any, strength: float) -> Any:
        import nodes

        return nodes.LoraLoaderModelOnly().load_lora_model_only(model, "toy_flux_lora.safetensors", strength)[0]

    # -- placing ------------------------------------------------------------------------------------------------

    def hoist(self) -> None:
        """Let layers be computed ahead. Otherwise each step copies the same bytes, which most tests count on."""
        self.placer = replace(self.placer, hoist=True)

    def plan(self, patcher: Any, text: str | None = None, ring: int | None = 2 << 20) -> Any:
        """`ring` is small, so that blocks of tiny models do not all fit into it."""
        from multigpu.devices.torch_devices import device_id
        from multigpu.plan import parse_request, planner

        request, compute = parse_request(text or self.spread), device_id(patcher.load_device)
        with mock.patch.object(planner, "default_ring", planner.default_ring if ring is None else lambda *_: ring):
            return self.placer.plan(request, patcher, compute)

    def place(self, patcher: Any, text: str | None = None, ring: int | None = 2 << 20, *, fills: bool = False) -> Any:
        """`patcher` spread by a request, also where the nodes would leave it alone because nothing is streamed."""
        from multigpu.host.engine.placed_patcher import place
        from multigpu.host.engine.static_clone import static_clone

        own = static_clone(patcher) if patcher.is_dynamic() else patcher.clone()
        return place(own, self.plan(patcher, text, ring), self.states, fills=fills)

    def place_component(self, component: Any, text: str | None = None, compute: str | None = None) -> Any:
        """As a place node places it: spread by a request, on a compute device that is not named unless `compute` is."""
        from multigpu.plan import DeviceId, parse_request
        from multigpu.target import Target

        device = None if compute is None else DeviceId.parse(compute)
        placer = replace(self.placer, inventory=measured_once())
        return placer.place(component, Target(device, parse_request(text or self.spread)))

    def place_clip(self, clip: Any, **how: Any) -> Any:
        placed = clip.clone()
        placed.patcher = self.place(placed.patcher, **how)
        return placed

    def place_vae(self, vae: Any, **how: Any) -> Any:
        placed = copy.copy(vae)
        placed.patcher = self.place(placed.patcher, **how)
        return placed

    # -- drawing ------------------------------------------------------------------------------------------------

    def conditions(self, width: int = 4096, pooled: int = 2048, words: int = 3, **more: Any) -> list[Any]:
        """What a text encoder would give, without one. Other `words` are a number, too."""
        random = torch.Generator().manual_seed(words)
        text = torch.randn(1, 16, width, generator=random)
        return [[text, {"pooled_output": torch.randn(1, pooled, generator=random), "guidance": 3.5, **more}]]

    def latent(self, model: Any, positive: Any = None, steps: int = 2, seed: int = 1, **sampling: Any) -> torch.Tensor:
        """What `model` samples."""
        import nodes

        positive = positive or self.conditions()
        empty = {"samples": sampling.pop("empty", torch.zeros(1, 16, 8, 8))}
        cfg, sampler = sampling.pop("cfg", 1.0), sampling.pop("sampler", "euler")
        negative = sampling.pop("negative", positive)
        out = nodes.common_ksampler(model, seed, steps, cfg, sampler, "simple", positive, negative, empty, **sampling)
        return out[0]["samples"].clone()

    def text(self, clip: Any, words: str) -> list[Any]:
        import nodes

        return nodes.CLIPTextEncode().encode(clip, words)[0]

    def picture(self, model: Any, clip: Any, vae: Any, empty: torch.Tensor, cfg: float = 1.0) -> torch.Tensor:
        """From words to pixels."""
        import nodes

        positive, negative = self.text(clip, "a house by the sea"), self.text(clip, "")
        latent = self.latent(model, positive, negative=negative, cfg=cfg, empty=empty)
        return nodes.VAEDecode().decode(vae, {"samples": latent})[0]

    # -- looking ------------------------------------------------------------------------------------------------

    def resting(self, patcher: Any) -> dict[str, int]:
        """Bytes of the model's tensors by device, counted."""
        from multigpu.stream.census import bytes_by_device

        return {str(device): count for device, count in bytes_by_device(patcher.model).items()}

    def proven(self, patcher: Any) -> dict[str, int]:
        """The same, with those in pages of the model file as those of `disk`."""
        from multigpu.host.engine.file_pages import in_file
        from multigpu.stream.census import bytes_by_home

        return bytes_by_home(patcher.model, in_file)

    def snapshot(self) -> Any:
        """What a Memory Report is made of."""
        from multigpu.host.snapshots import Snapshots

        self.states.learn()
        return Snapshots(self.placer.inventory, list, threading.RLock()).take("test", "now")

    def planned(self, patcher: Any) -> dict[str, int]:
        plan = patcher.placed.plan
        return {str(home): count for home, count in plan.bytes_by_home().items() if count}

    def unload(self) -> None:
        import comfy.model_management as memory

        self.states.settle()
        memory.unload_all_models()
        memory.free_memory(1e30, torch.device("cpu"))
