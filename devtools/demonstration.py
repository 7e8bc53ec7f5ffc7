"""`dev.py run`: starts a real ComfyUI with this pack in it and runs the demonstration (`story.py`)."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from . import fetch, models, story
from .console import Console
from .guard import Guarded
from .hosts import Host
from .places import Places
from .prepare import prepare
from .problem import Problem
from .server import Server, ServerFailed, ServerSpec, check_port


def run(host: Host, places: Places, console: Console, *, serve: bool, port: int | None, simulate: int = 0) -> int:
    """`simulate` is the number of simulated GPUs to run on; 0 takes the devices there are."""
    if port is not None:
        check_port(port)
    console.line("MultiGPU for ComfyUI: development set-up")
    prepare([host], places, console)
    server = Server(_spec(host, places, port, simulate))
    try:
        with console.step(f"Starting ComfyUI {host.version}"):
            server.start()
    except ServerFailed as error:
        raise Problem(
            f"{error}\nThe whole log is {server.log_path}; fix what it reports and run the same command again."
        ) from None
    try:
        story.tell(server.client, console, places.dev / "picture.png")
        if serve:
            _keep(server, console)
    finally:
        server.stop()
    return 0


def _spec(host: Host, places: Places, port: int | None, simulate: int) -> ServerSpec:
    simulated: dict[str, Any] = {
        "runner": (str(places.root / "tests" / "sim" / "serve.py"),),
        "flags": ("--use-pytorch-cross-attention", "--disable-cuda-malloc"),
        "environment": {"SIMDEV": f"cuda:{simulate}:6g", "MULTIGPU_DEV_CACHE": str(places.cache)},
    }
    present: dict[str, Any] = {
        "runner": (str(places.root / "devtools" / "quick_start.py"),),
        "flags": _device_flags(places),
        "environment": {"OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))},
    }
    return ServerSpec(
        tree=places.host_tree(host.version),
        python=places.python,
        base=places.dev / f"run-{host.version}",
        models=models.folder(places),
        packs={"multigpu": places.root},
        first_packs=places.root / "tests" / "host" / "debug_pack",
        frontend=fetch.frontend_files(host, places),
        port=port,
        **simulated if simulate else present,
    )


def _device_flags(places: Places) -> tuple[str, ...]:
    """ComfyUI has to be told when there is no accelerator. A torch that has no backend for one need not be imported."""
    version_file = next(places.venv.glob("**/site-packages/torch/version.py"))
    built_for = runpy.run_path(str(version_file))
    if sys.platform != "darwin" and not any(built_for.get(backend) for backend in ("cuda", "hip", "xpu")):
        return ("--cpu",)
    probe = "import torch; raise SystemExit(0 if torch.accelerator.is_available() else 3)"
    with Guarded([places.python, "-c", probe]) as child:
        return ("--cpu",) if child.wait(120) == 3 else ()


def _keep(server: Server, console: Console) -> None:
    console.line()
    console.line(f"ComfyUI is open at {server.client.address} with the tiny models in it. Ctrl-C stops it.")
    while server.running():
        time.sleep(0.5)
    raise Problem(f"ComfyUI ended by itself; the end of {server.log_path} says why.")
