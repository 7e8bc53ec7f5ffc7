"""`dev.py run`: a real ComfyUI with this pack in it, one picture drawn, and what happened in words."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from multigpu.units import format_bytes

from . import fetch, models, workflows
from .client import Client, Finished
from .console import Console
from .guard import Guarded
from .hosts import Host
from .places import Places
from .prepare import prepare
from .problem import Problem
from .server import Server, ServerFailed, ServerSpec, check_port


def run(host: Host, places: Places, console: Console, *, serve: bool, port: int | None) -> int:
    if port is not None:
        check_port(port)
    console.line("MultiGPU for ComfyUI: development set-up")
    prepare([host], places, console)
    server = Server(_spec(host, places, port))
    try:
        with console.step(f"Starting ComfyUI {host.version}"):
            server.start()
    except ServerFailed as error:
        raise Problem(
            f"{error}\nThe whole log is {server.log_path}; mend what it names and run the same command again."
        ) from None
    try:
        show(server.client, host, places, console)
        if serve:
            _keep(server, console)
    finally:
        server.stop()
    return 0


def show(client: Client, host: Host, places: Places, console: Console) -> None:
    """Draw a picture and tell the story: the devices, the models, the memory before, with and after them."""
    console.heading(f"Devices that ComfyUI {host.version} sees")
    console.table([_device_row(device) for device in client.get("/system_stats")["devices"]])

    before = client.get("/debug/memory")
    finished = client.run(workflows.flux(seed=int(time.time())))
    loaded = client.get("/debug/models")
    during = client.get("/debug/memory")
    picture = _keep_picture(finished, places)

    console.heading("What happened")
    console.line(
        f"  A tiny Flux drew a 64 x 64 picture in {finished.seconds:.1f} s: {picture.relative_to(places.root)}"
    )
    console.line("  Its models and where their weights rest:")
    console.table([_model_row(model) for model in loaded], indent="    ")

    client.free(unload_models=True, free_memory=True)
    _wait_until_free(client)
    after = client.get("/debug/memory")
    console.line("  Memory of the ComfyUI process:")
    rows = [("before", before), ("with the models", during), ("after freeing them", after)]
    console.table([(name, format_bytes(facts["rss"])) for name, facts in rows], indent="    ")


def _spec(host: Host, places: Places, port: int | None) -> ServerSpec:
    return ServerSpec(
        tree=places.host_tree(host.version),
        python=places.python,
        base=places.dev / f"run-{host.version}",
        models=models.folder(places),
        packs={"multigpu": places.root},
        first_packs=places.root / "tests" / "host" / "debug_pack",
        frontend=fetch.frontend_files(host, places),
        flags=_device_flags(places),
        port=port,
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


def _keep_picture(finished: Finished, places: Places) -> Path:
    path = places.dev / "picture.png"
    path.write_bytes(finished.images[0])
    return path


def _wait_until_free(client: Client, timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not client.get("/debug/idle"):
        if time.monotonic() > end:
            raise Problem(f"ComfyUI did not free its models within {timeout:.0f} s; see its log under .dev.")
        time.sleep(0.05)


def _keep(server: Server, console: Console) -> None:
    console.line()
    console.line(f"ComfyUI is open at {server.client.address} with the tiny models in it. Ctrl-C stops it.")
    while server.running():
        time.sleep(0.5)
    raise Problem(f"ComfyUI ended by itself; the end of {server.log_path} says why.")


def _device_row(device: dict[str, Any]) -> tuple[str, str, str]:
    return (
        device["name"],
        f"{format_bytes(device['vram_total'])} of memory",
        f"{format_bytes(device['vram_free'])} free",
    )


def _model_row(model: dict[str, Any]) -> tuple[str, str]:
    places = ", ".join(f"{format_bytes(count)} on {device}" for device, count in sorted(model["storages"].items()))
    return model["model_class"], places
