"""Packages that a few tests need, each in a folder of its own beside `.venv`: all else must work without them."""

from pathlib import Path

from .environment import pip
from .hosts import Host
from .places import Places
from .steps import fingerprint, make_once


def ray(places: Places) -> Path:
    """Have Ray, and what it needs beside `.venv`, in `.dev/`. Returns the folder, for PYTHONPATH."""
    target = places.dev / "ray"
    _install(places, places.requirements / "ray.txt", target, "Ray", "80 MB, 250 MB on disk")
    return target


def comfyui_manager(host: Host, places: Places) -> Path:
    """Have the Manager that a host version pins, and what it needs beside `.venv`, in `.dev/`.

    Returns `manager_folder`, for PYTHONPATH.
    """
    target = manager_folder(host, places)
    pins = places.requirements / "manager" / f"{host.version}.txt"
    _install(places, pins, target, f"the Manager of ComfyUI {host.version}", "10 MB, 40 MB on disk")
    return target


def manager_folder(host: Host, places: Places) -> Path:
    return places.dev / "manager" / host.version


def _install(places: Places, pins: Path, target: Path, name: str, size: str) -> None:
    """What a file of pins names, once."""

    def make(part: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", part]
        pip(places, ["install", *options, "-r", pins], what=name)

    title = f"Installing {name} ({size}, checked against its hashes)"
    make_once(target, fingerprint(pins), make, places.dev / "lock", name, title)
