"""`dev.py doctor`: what is there on this machine, what is missing, and what to do about it. Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from multigpu.units import format_bytes

from . import environment, models, space
from .console import Console
from .guard import Guarded
from .hosts import HOSTS
from .places import Places

COMPILERS = ("c++", "g++", "clang++", "cl")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
INDEX_TIMEOUT = 30.0


@dataclass(frozen=True)
class Finding:
    """`state` is ok, later (dev.py will do it), optional (something cannot run without it) or missing (nothing can)."""

    name: str
    state: str
    text: str


def run(places: Places, console: Console) -> int:
    """Print the findings. Returns 2 when something is missing without which nothing runs."""
    console.line("MultiGPU for ComfyUI: this machine")
    console.line()
    missing = 0
    for finding in findings(places):
        console.table([(finding.name.ljust(12), finding.state.ljust(8), finding.text)])
        missing += finding.state == "missing"
    console.line()
    console.line("Ready: python dev.py run" if not missing else f"{missing} missing; see above what to do.")
    return 2 if missing else 0


def findings(places: Places) -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield from _venv_module()
    yield _tool("git", ("git",), "missing", "install git: it is how this project is cloned and tested")
    yield _tool("compiler", COMPILERS, "optional", "install a C++ compiler (Debian: g++); simulator tests are skipped")
    if (places.root / "tests" / "browser").is_dir():
        yield _tool("browser", BROWSERS, "optional", "install chromium for the browser tests; they are skipped")
    yield _clone(places)
    ready = environment.ready(places)
    yield _space(places, ready)
    yield Finding("environment", "ok" if ready else "later", ".venv" if ready else "dev.py makes .venv")
    yield from _hosts(places)
    made = models.folder(places).is_dir()
    yield Finding("tiny models", "ok" if made else "later", str(models.folder(places)) if made else "dev.py makes them")
    yield _cache(places)
    yield _index(places)
    yield _gpus()


def _venv_module() -> Iterator[Finding]:
    have = importlib.util.find_spec("ensurepip") is not None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    fix = f"install it (Debian and Ubuntu: apt install {package})"
    yield Finding("venv", "ok" if have else "missing", "part of this Python" if have else fix)


def _tool(name: str, candidates: tuple[str, ...], otherwise: str, fix: str) -> Finding:
    found = next((path for candidate in candidates if (path := shutil.which(candidate))), None)
    return Finding(name, "ok" if found else otherwise, found or fix)


def _clone(places: Places) -> Finding:
    if os.access(places.root, os.W_OK):
        return Finding("clone", "ok", str(places.root))
    return Finding("clone", "missing", f"{places.root} cannot be written: clone into a folder of your own")


def _space(places: Places, ready: bool) -> Finding:
    """Warns if there is too little room for the larger build of torch: which one pip will install is not known yet."""
    for build, state in () if ready else ((space.CPU, "missing"), (space.CUDA, "optional")):
        if text := space.shortage(places, build):
            return Finding("disk", state, text)
    return Finding("disk", "ok", f"{shutil.disk_usage(places.root).free / space.GB:.0f} GB free")


def _hosts(places: Places) -> Iterator[Finding]:
    for host in HOSTS:
        here = places.host_tree(host.version).is_dir()
        text = f"ComfyUI {host.version}" + ("" if here else ": dev.py fetches it")
        yield Finding("host", "ok" if here else "later", text)


def _cache(places: Places) -> Finding:
    there = space.existing(places.cache)
    if not there.is_dir() or not os.access(there, os.W_OK):
        fix = f"{there} cannot be written: set MULTIGPU_DEV_CACHE to a folder that you can write to"
        return Finding("cache", "missing", fix)
    held = format_bytes(space.held(places.cache))
    return Finding("cache", "ok", f"{places.cache} ({held}; it may be deleted at any time)")


def _index(places: Places) -> Finding:
    """Ask pip for a small package that is pinned anyway; nothing is installed."""
    pin = next(line for line in (places.requirements / "pip.txt").read_text().splitlines() if "==" in line)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    limits = ["--disable-pip-version-check", "--retries", "1", "--timeout", "10", pin]
    with Guarded([*command, *limits], env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}) as child:
        try:
            works = child.wait(INDEX_TIMEOUT) == 0
        except subprocess.TimeoutExpired:
            works = False
    if works:
        return Finding("index", "ok", "pip reaches the package index")
    return Finding("index", "missing", "pip does not reach the package index: check the network or pip's settings")


def _gpus() -> Finding:
    if not environment.has_nvidia():
        return Finding("GPU", "optional", "no nvidia-smi: everything runs on the CPU and on simulated accelerators")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    lines = listed.stdout.splitlines()
    return Finding("GPU", "ok" if lines else "optional", "; ".join(lines) or "nvidia-smi lists no GPU")
