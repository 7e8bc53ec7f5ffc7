"""Drives one real ComfyUI: workflows in, pixels and facts out."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from devtools import models
from devtools.client import Client, Finished, Workflow
from devtools.hosts import Frontend, Host
from devtools.places import Places
from devtools.server import Server, ServerSpec

PACK = "multigpu"
DEBUG_PACKS = Path(__file__).parent / "debug_pack"
INPUT_ERROR = re.compile(
    r"multigpu\.errors\.(InputError|AllocationError|AllocationSyntaxError|UnknownDevice|DoesNotFit):"
)


@dataclass(frozen=True)
class Picture:
    """Decoded pixels. Two pictures are equal when every pixel is."""

    mode: str
    size: tuple[int, int]
    pixels: bytes

    @classmethod
    def decode(cls, file: bytes) -> Picture:
        with Image.open(io.BytesIO(file)) as image:
            return cls(image.mode, image.size, image.tobytes())

    def __repr__(self) -> str:
        return f"Picture({self.mode}, {self.size}, {hash(self.pixels):x})"


class Driver:
    """A started server with the debug pack in it. See `ServerSpec` for what can be varied."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def client(self) -> Client:
        return self.server.client

    def run(self, workflow: Workflow, timeout: float = 300.0, **more: Any) -> Finished:
        return self.client.run(workflow, timeout, **more)

    def draw(self, workflow: Workflow, timeout: float = 300.0) -> tuple[Picture, ...]:
        """The pictures a workflow saves, decoded."""
        return tuple(Picture.decode(file) for file in self.run(workflow, timeout).images)

    def models(self) -> list[dict[str, Any]]:
        """The entries of `current_loaded_models`; see the debug pack's `routes.py` for the fields."""
        rows: list[dict[str, Any]] = self.client.get("/debug/models")
        return rows

    def memory(self, *, everything: bool = False) -> dict[str, Any]:
        facts: dict[str, Any] = self.client.get("/debug/memory", **({"everything": 1} if everything else {}))
        return facts

    def patched(self) -> list[dict[str, str]]:
        """Host functions, classes and methods that are not what they were before any custom node was loaded."""
        answer = self.client.get("/debug/patched")
        assert answer["watched"] > 1000, "the snapshot saw too little of the host to mean anything"
        differences: list[dict[str, str]] = answer["differences"]
        return differences

    def collect(self) -> None:
        self.client.post("/debug/collect", {})

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Until the prompt worker has done all it was asked for, frees included."""
        self.until(lambda: self.client.get("/debug/idle"), timeout)

    def until(self, true: Callable[[], Any], timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while not true():
            if time.monotonic() > end:
                raise TimeoutError(f"it was not so for {timeout:.0f} s")
            time.sleep(0.02)

    def free(self, *, unload_models: bool = False, free_memory: bool = False) -> None:
        """`POST /free`, and wait until it has happened."""
        self.wait_idle()
        self.client.free(unload_models=unload_models, free_memory=free_memory)
        self.wait_idle()

    def log(self) -> str:
        return self.server.log()

    def our_tracebacks(self) -> list[str]:
        """Tracebacks through our pack, except for errors that tell the user what to change in the workflow."""
        return [text for text in tracebacks_of(PACK, self.log()) if not INPUT_ERROR.search(text.splitlines()[-1])]


def tracebacks_of(pack: str, log: str) -> list[str]:
    """Python tracebacks in a log that pass through a custom node pack of that name."""
    found = re.findall(r"^.*Traceback \(most recent call last\):\n(?:.*\n)*?(?=\S)[^\n]*", log, re.MULTILINE)
    inside = re.compile(rf"custom_nodes[/\\]{re.escape(pack)}[/\\]")
    return [text for text in found if inside.search(text)]


def spec_for(host: Host, base: Path, python: Path, **changes: Any) -> ServerSpec:
    """The usual server of a host version: our pack and the debug pack, on the CPU. `changes` replace fields."""
    places = Places.here()
    usual: dict[str, Any] = {
        "tree": places.host_tree(host.version),
        "python": python,
        "base": base,
        "models": models.folder(places),
        "packs": {PACK: places.root},
        "first_packs": DEBUG_PACKS,
        "frontend": Frontend(host).files(places),
        "flags": ("--cpu",),
    }
    return ServerSpec(**usual | changes)
