"""`dev.py run`: starts a real ComfyUI with this pack in it and lets `tests/host/story.py` show what the pack does."""

import importlib.metadata
import os
import sys
import time
from dataclasses import replace

from . import console, models
from .guard import Guarded
from .hosts import Frontend, Host
from .places import Places
from .problem import Problem
from .server import Server, ServerSpec, usable_port


def run(host: Host, places: Places, *, serve: bool, port: int | None, simulate: int) -> int:
    """`simulate` is the number of simulated GPUs to run on; 0 takes the devices there are."""
    usable_port(port)  # before the long part
    models.prepare([host], places)
    server = Server(_spec(host, places, port, simulate))
    try:
        with console.step(f"Starting ComfyUI {host.version}"):
            server.start()
        story = [sys.executable, places.root / "tests" / "host" / "story.py", server.client.address]
        with Guarded([*story, places.dev / "picture.png"], env={"PYTHONPATH": str(places.root)}, show=True) as child:
            code = child.wait()
        if serve and code == 0:
            console.line(f"\nComfyUI is open at {server.client.address} with the tiny models in it. Ctrl-C stops it.")
            while server.running():
                time.sleep(0.5)
            raise Problem(f"ComfyUI ended by itself; the end of {server.log_path} says why.")
    finally:
        server.stop()
    return code


def _spec(host: Host, places: Places, port: int | None, simulate: int) -> ServerSpec:
    spec = ServerSpec(
        tree=places.host_tree(host.version),
        python=places.python,
        base=places.dev / f"run-{host.version}",
        models=models.folder(places),
        packs={"multigpu": places.root},
        frontend=Frontend(host).files(places),
        port=port,
    )
    if not simulate:
        threads = str(min(4, os.cpu_count() or 1))
        return replace(spec, flags=() if _has_accelerator() else ("--cpu",), environment={"OMP_NUM_THREADS": threads})
    return replace(
        spec,
        runner=(str(places.root / "tests" / "sim" / "serve.py"),),
        flags=("--use-pytorch-cross-attention", "--disable-cuda-malloc"),
        environment={"SIMDEV": f"cuda:{simulate}:6g", "MULTIGPU_DEV_CACHE": str(places.cache)},
    )


def _has_accelerator() -> bool:
    """ComfyUI has to be told when there is none. A torch whose version says so need not be imported."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return False
    import torch

    return torch.accelerator.is_available()
