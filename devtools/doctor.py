"""`dev.py doctor`: what is there on this machine, what is missing, and what to do about it. Changes nothing."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from . import console, environment, pythons
from .guard import Guarded
from .places import Places

COMPILERS = ("c++", "g++", "clang++", "cl")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def run(places: Places) -> int:
    """Print the findings. Returns 2 when something is missing without which nothing runs."""
    console.line("MultiGPU for ComfyUI: this machine\n")
    missing = 0
    for name, found, otherwise, fix in _findings(places):
        console.line(f"  {name:12}  {'ok' if found else otherwise:8}  {found or fix}")
        missing += otherwise == "missing" and not found
    console.line(f"\n{missing} missing; see above what to do." if missing else "\nReady: python dev.py run")
    return 2 if missing else 0


def _findings(places: Places) -> Iterator[tuple[str, str | None, str, str]]:
    """Name, what was found, and if it was not: its state and what to do.

    The states are later (dev.py will do it), optional (something cannot run without it) and missing (nothing can).
    """
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    venv = importlib.util.find_spec("ensurepip") and f"part of Python {platform.python_version()} at {sys.executable}"
    yield "venv", venv, "missing", f"install it (Debian and Ubuntu: apt install {package})"
    yield "git", _tool("git"), "missing", "install git: it is how this project is cloned and tested"
    fix = "install a C++ compiler (Debian: g++); simulator tests are skipped"
    yield "compiler", _tool(*COMPILERS), "optional", fix
    yield "browser", _tool(*BROWSERS), "optional", "install chromium for the browser tests; they are skipped"
    others = pythons.others()
    found = ", ".join(f"{version} at {path}" for version, path in others.items() if path)
    fix = f"none of {', '.join(others)} is found; the unit tests run with Python {platform.python_version()} only"
    yield "Pythons", found, "optional", fix
    clone = str(places.root) if os.access(places.root, os.W_OK) else None
    yield "clone", clone, "missing", f"{places.root} cannot be written: clone into a folder of your own"
    ready = environment.is_ready(places)
    yield "environment", ".venv" if ready else None, "later", "dev.py makes .venv"
    # Which build of torch pip will install is not known yet: the larger one is not needed for sure.
    for build, state in () if ready else ((environment.CPU, "missing"), (environment.CUDA, "optional")):
        fix = environment.shortage(places, build) or ""
        yield "disk", None if fix else f"enough for a {build.name} build of torch", state, fix
    there = environment.existing(places.cache)
    usable = there.is_dir() and os.access(there, os.W_OK)
    cache = f"{places.cache} ({environment.held(places.cache):.1f} GB; it may be deleted at any time)"
    fix = f"{there} cannot be written: set MULTIGPU_DEV_CACHE to a folder that you can write to"
    yield "cache", cache if usable else None, "missing", fix
    index = "pip reaches the package index" if _reaches_index(places) else None
    yield "index", index, "missing", "pip does not reach the package index: check the network or pip's settings"
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if environment.has_nvidia() else None
    fix = "nvidia-smi finds none: everything runs on the CPU and on simulated accelerators"
    yield "GPU", "; ".join(gpus.stdout.splitlines()) if gpus else None, "optional", fix


def _tool(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def _reaches_index(places: Places) -> bool:
    """Asks pip for a small package that is pinned anyway; nothing is installed."""
    pins = places.requirements / "kernels-pure.txt"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    limits = ["--disable-pip-version-check", "--retries", "1", "--timeout", "10", "-r", pins]
    with Guarded([*command, *limits], env={"PIP_ROOT_USER_ACTION": "ignore"}) as child:
        try:
            return child.wait(timeout=30) == 0
        except subprocess.TimeoutExpired:
            return False
