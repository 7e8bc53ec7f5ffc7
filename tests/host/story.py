"""What `dev.py run` shows: models placed in three ways, one ejected, two kept and handed back.

    python tests/host/story.py ADDRESS PICTURE

ADDRESS is that of a running ComfyUI with this pack and the tiny models; PICTURE is the file that is drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from devtools import console
from devtools.client import Client, Finished
from devtools.problem import Problem
from multigpu.units import format_bytes
from tests.host.driver import Picture
from tests.host.workflows import flux, node, placed

REPORT = {"report": node("MultiGPUMemoryReport")}


def tell(client: Client, picture: Path) -> None:
    """Run the workflows and say what happened. The first picture, drawn without us, is what all others must equal."""
    devices = client.get("/system_stats")["devices"]
    console.heading("Devices that ComfyUI sees")
    console.table([(device["name"], f"{format_bytes(device['vram_total'])} of memory") for device in devices])

    stock = client.run(flux(seed=1))
    picture.write_bytes(stock.images[0])
    console.heading("Placing")
    console.line(f"  A tiny Flux draws a picture from stock nodes: {picture.name}")
    accelerators = [device["name"].split(" ")[0] for device in devices if device["type"] != "cpu"]
    for title, widgets in _requests(accelerators):
        _compare(client.run(placed(flux(seed=1), "model", **widgets)), stock)
        console.line(f"  Placed {title}, it draws the same, bit for bit:")
        _report(client, "- Flux")

    console.heading("Keeping and ejecting")
    workflow = placed(flux(seed=1), "model", keep_loaded="eject")
    for part in ("clip", "vae"):
        workflow = placed(workflow, part, keep_loaded="keep")
    client.run(workflow)
    console.line("  The diffusion model is set to eject, text encoder and VAE to keep:")
    _report(client)
    client.free(unload_models=True, free_memory=True)
    client.run(REPORT)  # ComfyUI frees memory before or after this prompt, but before the next
    console.line("  After ComfyUI has freed all memory:")
    _report(client)
    again = client.run(workflow)
    _compare(again, stock)
    kept = sorted(again.cached_nodes & {"model", "clip", "vae"})
    console.line(f"  The next prompt gets {' and '.join(kept) or 'nothing'} back without loading, and draws the same.")


def _requests(accelerators: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Three ways to ask for a placement, for the devices there are."""
    zero, *others = accelerators or ["cpu"]
    shares = f"{zero},30%;" + "".join(f"{other},25%;" for other in others[:1]) + "cpu,*" if accelerators else "cpu,*"
    donors = ",".join([*others[:1], "cpu"])
    virtual = {"mode": "virtual VRAM", "virtual_vram_gb": 0.02, "donor_device": donors}
    return [
        (f'by string, "{shares}"', {"mode": "expert", "expert_mode_allocations": shares}),
        (f"by virtual VRAM, 0.02 GB to {donors}", virtual),
        ("automatically", {"mode": "auto"}),
    ]


def _report(client: Client, only: str = "- ") -> None:
    """Show the Memory Report's lines about models."""
    (text,) = client.run(REPORT).history["outputs"]["report"]["text"]
    for line in text.splitlines():
        if line.startswith(only):
            console.line(f"      {line.removeprefix('- ')}")


def _compare(finished: Finished, stock: Finished) -> None:
    if [*map(Picture.decode, finished.images)] != [*map(Picture.decode, stock.images)]:
        raise Problem("A placed model drew another picture than the stock workflow; the log under .dev may say why.")


if __name__ == "__main__":
    try:
        tell(Client(sys.argv[1]), Path(sys.argv[2]))
    except Problem as problem:
        sys.stderr.write(f"\n{problem}\n")
        sys.exit(2)
