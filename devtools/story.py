"""What `dev.py run` shows: models placed in three ways, one ejected, two kept and handed back."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

from multigpu.units import format_bytes

from .client import Client, Finished
from .console import Console
from .problem import Problem
from .workflows import flux, placed

Rows = list[dict[str, Any]]


def tell(client: Client, console: Console, picture: Path) -> None:
    """Run the workflows and say what happened. The first picture, drawn without us, is what all others must equal."""
    devices = client.get("/system_stats")["devices"]
    console.heading("Devices that ComfyUI sees")
    console.table([_device_row(device) for device in devices])

    empty = client.get("/debug/memory")["rss"]
    stock = client.run(flux(seed=1))
    picture.write_bytes(stock.images[0])
    console.heading("Placing")
    console.line(f"  A tiny Flux draws a picture from stock nodes: {picture.name}")
    accelerators = [device["name"].split(" ")[0] for device in devices if device["type"] != "cpu"]
    for title, widgets in _requests(accelerators):
        finished = client.run(placed(flux(seed=1), "model", **widgets))
        _compare(finished, stock)
        console.line(f"  Placed {title}, it draws the same, bit for bit:")
        console.table([_model_row(row) for row in _models(client) if row["model_class"] == "Flux"], indent="      ")
    _keeping(client, console, stock, empty)


def _keeping(client: Client, console: Console, stock: Finished, empty: int) -> None:
    console.heading("Keeping and ejecting")
    workflow = placed(flux(seed=1), "model", keep_loaded="eject")
    for part in ("clip", "vae"):
        workflow = placed(workflow, part, keep_loaded="keep")
    client.run(workflow)
    before, full = _models(client), client.get("/debug/memory")["rss"]
    _free(client)
    after, left = _models(client), client.get("/debug/memory")["rss"]
    console.line("  The diffusion model is set to eject, text encoder and VAE to keep. Then all memory is freed:")
    console.table(_fates(before, after), indent="      ")
    again = client.run(workflow)
    now = {row["model_id"] for row in _models(client)}
    handed_back = [row["model_class"] for row in after if row["model_id"] in now]
    _compare(again, stock)
    console.line(
        f"  The next prompt gets {' and '.join(handed_back) or 'nothing'} back without loading, and draws the same."
    )

    for part in ("model", "clip", "vae"):
        workflow[f"place_{part}"]["inputs"]["keep_loaded"] = "default"
    client.run(workflow)
    _free(client)
    if left_over := _models(client):
        names = ", ".join(row["model_class"] for row in left_over)
        raise Problem(f"No model is set to keep any more, but {names} stayed loaded; the log under .dev may say why.")
    console.line("  Memory of the ComfyUI process:")
    rows = [("at the start", empty), ("with all three models", full), ("after ejecting one", left)]
    rows.append(("after unloading all", client.get("/debug/memory")["rss"]))
    console.table([(name, format_bytes(count)) for name, count in rows], indent="      ")


def _compare(finished: Finished, stock: Finished) -> None:
    if [*map(pixels, finished.images)] != [*map(pixels, stock.images)]:
        raise Problem("A placed model drew another picture than the stock workflow; the log under .dev may say why.")


def pixels(png: bytes) -> bytes:
    """The picture data of a PNG file, without what ComfyUI writes about the workflow."""
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    return zlib.decompress(data)


def _requests(accelerators: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Three ways to ask for a placement, for the devices there are."""
    zero, *others = accelerators or ["cpu"]
    shares = f"{zero},30%;" + "".join(f"{other},25%;" for other in others[:1]) + "cpu,*" if accelerators else "cpu,*"
    donors = ",".join([*others[:1], "cpu"])
    return [
        (f'by string, "{shares}"', {"mode": "expert", "expert_mode_allocations": shares}),
        (
            f"by virtual VRAM, 0.02 GB to {donors}",
            {"mode": "virtual VRAM", "virtual_vram_gb": 0.02, "donor_device": donors},
        ),
        ("automatically", {"mode": "auto"}),
    ]


def _models(client: Client) -> Rows:
    return [row for row in client.get("/debug/models") if row["alive"]]


def _free(client: Client, timeout: float = 30.0) -> None:
    """What ComfyUI's own button for models and execution cache does; returns when it is done."""
    client.free(unload_models=True, free_memory=True)
    end = time.monotonic() + timeout
    while not client.get("/debug/idle"):
        if time.monotonic() > end:
            raise Problem(f"ComfyUI did not free its models within {timeout:.0f} s; see its log under .dev.")
        time.sleep(0.05)


def _fates(before: Rows, after: Rows) -> list[tuple[str, str, str]]:
    there = {row["model_id"]: row for row in after}
    return [
        (
            row["model_class"],
            "kept" if row["model_id"] in there else "ejected",
            _resting(there.get(row["model_id"], {})),
        )
        for row in before
    ]


def _device_row(device: dict[str, Any]) -> tuple[str, str, str]:
    return (
        device["name"],
        f"{format_bytes(device['vram_total'])} of memory",
        f"{format_bytes(device['vram_free'])} free",
    )


def _model_row(row: dict[str, Any]) -> tuple[str, str]:
    return row["model_class"], _resting(row)


def _resting(row: dict[str, Any]) -> str:
    return ", ".join(f"{format_bytes(count)} on {device}" for device, count in sorted(row.get("storages", {}).items()))
