"""`multigpu doctor`: is this ComfyUI as the pack expects it? Prints which features are off, and the symbols at fault.

Prints the devices of this machine too, with the measured speeds that plans use, and the nodes of the Ray cluster that
MULTIGPU_RAY or the file `ray_head` names, if it does.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import DeviceError, InputError
from ..host import capabilities, comfyui_tree
from ..host.surface import Feature
from ..runtime import new_inventory
from ..settings import RAY_FILE, Settings
from ..units import format_bytes
from .terminal import Parser, put

if TYPE_CHECKING:
    from ..devices.inventory import Inventory


def run(arguments: Sequence[str]) -> int:
    """Exit code 0 when everything is as expected, 1 when a feature is off or a node of the cluster is not ready.

    Raises InputError without a ComfyUI.
    """
    parser = Parser(prog="python -m multigpu doctor", description="Compare a ComfyUI with what MultiGPU expects.")
    parser.add_argument("--comfyui", type=Path, metavar="FOLDER", help="the folder with ComfyUI's main.py")
    parser.add_argument("--all", action="store_true", help="list every symbol, also those that are as expected")
    options = parser.parse_args(arguments)
    tree = options.comfyui or comfyui_tree.find_tree()
    if tree is None:
        raise InputError(
            "no ComfyUI found around the current folder; say where it is: "
            "python -m multigpu doctor --comfyui FOLDER (the one with main.py)"
        )
    comfyui_tree.enter(tree)
    found = capabilities.probe()
    put(f"{report(found, list_all=options.all)}\n{devices(new_inventory())}\n")
    settings, reachable = _settings(found), True
    if settings.ray is not None:
        text, reachable = other_machines(settings.ray)
        put(f"{text}\n")
    return int(not reachable or any(True for _ in found.features_off()))


def _settings(found: capabilities.HostCapabilities) -> Settings:
    """Those of the environment, with the file that may name a cluster. Says what is wrong with them."""
    settings = Settings.from_environment(os.environ)
    if found.offers(Feature.SPEEDS):
        from ..host.user_folder import saved_text

        settings = settings.with_head(saved_text(RAY_FILE))
    for problem in settings.problems:
        put(f"{problem}\n")
    return settings


def other_machines(head: str) -> tuple[str, bool]:
    """The nodes of a Ray cluster in words, with their distance; and whether it can be used and every node is ready."""
    from ..remote.cluster import READY, Cluster

    lines, cluster = ["", f"Ray cluster   {head}"], Cluster(head)
    try:
        nodes = cluster.nodes()
        for node in nodes:
            memory = ", ".join(
                f"{each.name}{'' if each.total is None else f' ({format_bytes(each.total)})'}" for each in node.devices
            )
            lines.append(f"  {node.name:<12}{node.state}{': ' + memory if memory else ''}")
            if node.state == READY:
                versions = ", ".join(f"{name} {version}" for name, version in node.versions.items())
                lines.append(f"      {versions}; round trip {cluster.round_trip(node.name) * 1e3:.1f} ms")
        return "\n".join(lines if nodes else [*lines, "  no worker"]), all(node.state == READY for node in nodes)
    except DeviceError as problem:
        return "\n".join([*lines, f"  {problem}"]), False
    finally:
        cluster.close()


def devices(inventory: Inventory) -> str:
    """The devices of this machine, what they achieve, and a line for each backend that is installed but broken."""
    lines = ["", f"Devices       {inventory.describe()}", *(f"  {problem}" for problem in inventory.problems)]
    if inventory.accelerators:
        lines += ["", "Measured speeds: computing, and copying from other devices"]
    for device in inventory.accelerators:
        speeds = [f"compute {_figure(inventory.flops(device.id), 1e12, 'TFLOP/s')}"]
        for home in inventory.devices:
            if home.id != device.id:
                speeds.append(f"from {home.id} {_figure(inventory.bandwidth(home.id, device.id), 1e9, 'GB/s')}")
        lines.append(f"  {str(device.id):<12}{', '.join(speeds)}")
    return "\n".join(lines)


def _figure(figure: float | None, unit: float, name: str) -> str:
    return "not measured" if figure is None else f"{figure / unit:g} {name}"


def report(found: capabilities.HostCapabilities, *, list_all: bool) -> str:
    lines = [
        f"MultiGPU      {__version__}, Python {platform.python_version()}",
        f"ComfyUI       {found.version}",
        f"DynamicVRAM   {'on' if found.dynamic_vram else 'off'} in this process",
        f"Host symbols  {found.summary()}",
        "",
    ]
    off = dict(found.features_off())
    lines += [
        f"  {feature.value:<16}{'off: ' + off[feature.value] if feature.value in off else 'ok'}" for feature in Feature
    ]
    listed = [finding for finding in found.findings if list_all or finding.problem]
    if listed:
        lines += ["", "Symbols, and what they are used for"]
        lines += [
            f"  {finding.symbol.name}\n      {finding.problem or 'ok'}; {finding.symbol.why}" for finding in listed
        ]
    return "\n".join(lines)
