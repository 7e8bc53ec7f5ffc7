"""A server for tests of the lifecycle, and the workflows that drive it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devtools import models
from devtools.client import Workflow
from devtools.places import Places
from tests.host import workflows
from tests.host.driver import PACK, Driver
from tests.host.workflows import node

HERE = Path(__file__).parent
PACKS = {PACK: Places.here().root, "lifecycle_pack": HERE / "lifecycle_pack"}
CLASSES = {"model": "Flux", "clip": "SD3ClipModel_", "vae": "TAESD"}
FILES = {
    "model": "diffusion_models/toy_flux.safetensors",
    "clip": "text_encoders/toy_clip_l.safetensors",
    "vae": "vae/toy_taef1.safetensors",
}
LORA = "loras/toy_flux_lora.safetensors"
OTHER_VAE = "vae/toy_wan_vae.safetensors"
BOTH = {"unload_models": True, "free_memory": True}


def flux(seed: int, *, lora: float | None = None, after: str | None = None, **keep: Any) -> Workflow:
    """The stock Flux workflow with a place node for every part that `keep` names: flux(1, model="keep", clip=False).

    `after` is a class of a node with one input, put between the sampler and the VAE.
    """
    workflow = workflows.flux(seed, steps=1, lora=lora)
    for part, said in keep.items():
        source = ["lora" if part == "model" and lora is not None else part, 0]
        workflow = workflows.placed(workflow, part, behind=source, keep_loaded=said)
    if after is not None:
        workflow["after"] = node(after, value=["sample", 0])
        workflow["decode"]["inputs"]["samples"] = ["after", 0]
    return workflow


def short(seed: int, **wanted: Any) -> Workflow:
    """The same without a text encoder, which is most of the time and memory that it takes."""
    workflow = flux(seed, **wanted)
    workflow["positive"] = node("TestConditioning")
    del workflow["clip"]
    return workflow


class Keeper(Driver):
    """A server with the packs above. Every test starts with nothing loaded and no `keep_loaded` choice in effect."""

    def names(self) -> list[str]:
        return sorted(row["model_class"] for row in self.models())

    def objects(self) -> dict[str, tuple[int, int]]:
        """Class of every loaded model -> ids of its patcher and of the model itself."""
        return {row["model_class"]: (row["patcher_id"], row["model_id"]) for row in self.models()}

    def held(self) -> list[str]:
        """The classes of the models that are held for later prompts."""
        return list(self.client.get("/lifecycle/held")["models"])

    def tags(self) -> list[tuple[str, str]]:
        return [(row["identifier"], row["tag"]) for row in self.client.get("/lifecycle/history")]

    def forget(self) -> None:
        self.wait_idle()
        self.client.post("/lifecycle/let_go", {})
        self.free(**BOTH)
        self.collect()
        assert self.models() == []
        assert self.held() == []

    def tensor_bytes(self) -> int:
        """Bytes of all tensors in the process."""
        self.collect()
        return int(self.memory(everything=True)["tensors"].get("cpu", 0))

    @contextmanager
    def said(self) -> Iterator[list[str]]:
        """The log lines that come while the block runs."""
        before, lines = len(self.log()), list[str]()
        yield lines
        lines += self.log()[before:].splitlines()

    def wait_for(self, path: str, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not self.client.get(path):
            if time.monotonic() > end:
                raise TimeoutError(f"{path} was false for {timeout:.0f} s")
            time.sleep(0.02)


def own_models(base: Path) -> Path:
    """A folder with the tiny models of the Flux workflow, so that nobody else opens files in it."""
    folder, source = base / "models", models.folder(Places.here())
    for name in (*FILES.values(), LORA, OTHER_VAE):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(source / name)
        except OSError:  # another file system
            shutil.copy2(source / name, target)
    return folder
