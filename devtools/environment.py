"""The Python environment in `.venv`: ComfyUI's requirements and our own tools, every version pinned."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from . import cpu_wheels
from .console import Console
from .guard import BASE_PYTHON, Guarded
from .pip import pip
from .places import Places
from .problem import Problem
from .steps import Stamp, fingerprint, whole_folder

NEEDED_BYTES = 4 * 10**9
"""Free space that a first set-up needs; with a CUDA build of torch it is about twice as much."""


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None


def stamp(places: Places) -> Stamp:
    files = sorted(places.requirements.glob("*.txt"))
    kind = "nvidia" if has_nvidia() else "plain"
    return Stamp(
        places.stamps, "environment", fingerprint(platform.python_version(), kind, Path(cpu_wheels.__file__), *files)
    )


def ensure(places: Places, console: Console) -> None:
    """Make `.venv` if it is not there or not as the pins say.

    It is made anew rather than mended: a killed pip leaves half-written packages that it later takes for whole ones.
    The downloads are in pip's cache by then.
    """
    done = stamp(places)
    if done.holds() and places.python.exists():
        console.line("  Python environment: ready (.venv)")
        return
    _check_space(places)
    done.clear()
    console.line(
        "  Python environment in .venv: first about 0.6 GB of downloads (2 GB on disk); more with a CUDA torch"
    )
    with console.step("Making .venv"):
        _make_venv(places)
        pip(places.python, ["install", "-r", places.requirements / "pip.txt"], what="pip", console=console)
    with console.step("Installing torch"):
        pip(places.python, ["install", "-r", places.requirements / "torch.txt"], what="torch", console=console)
        extras = ["install", "--no-deps", "-r", places.requirements / "torch-extras.txt"]
        pip(places.python, extras, what="torchvision and torchaudio", console=console)
        _install_native(places, console)
        _run_script(places, Path(cpu_wheels.__file__))
    with console.step("Installing ComfyUI's requirements and the development tools"):
        files = ["-r", places.requirements / "host.txt", "-r", places.requirements / "dev.txt"]
        pip(places.python, ["install", *files], what="the pinned requirements", console=console)
    done.write()


def _check_space(places: Places) -> None:
    free = shutil.disk_usage(places.root).free
    if free < NEEDED_BYTES:
        raise Problem(
            f"{places.root} has {free / 1e9:.1f} GB of free disk space and the set-up needs {NEEDED_BYTES / 1e9:.0f}; "
            "free some space there, or clone onto a larger disk."
        )


def _make_venv(places: Places) -> None:
    if places.venv.exists():
        shutil.rmtree(places.venv)
    with Guarded([BASE_PYTHON, "-m", "venv", places.venv]) as child:
        text = child.output.read().decode(errors="replace")
        if child.wait() == 0:
            return
    if "ensurepip" in text:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Problem(
            f"This Python has no venv module; install it (Debian and Ubuntu: apt install python{version}-venv)."
        )
    raise Problem(f"{BASE_PYTHON} -m venv failed: {text.strip().splitlines()[-1] if text.strip() else 'no output'}.")


def _install_native(places: Places, console: Console) -> None:
    """ComfyUI's two kernel packages: the wheels with CUDA code beside an NVIDIA GPU, else the small pure ones."""
    what = "comfy-kitchen and comfy-aimdo"
    pins = places.requirements / "kernels.txt"
    if has_nvidia():
        pip(places.python, ["install", "--no-deps", "-r", pins], what=what, console=console)
        return
    with whole_folder(places.dev / "wheels") as folder:
        only_pure = ["--no-deps", "--only-binary", ":all:", "--platform", "any"]
        pip(places.python, ["download", *only_pure, "-d", folder, "-r", pins], what=what, console=console)
        pip(places.python, ["install", "--no-deps", *sorted(folder.glob("*.whl"))], what=what, console=console)


def _run_script(places: Places, script: Path) -> None:
    with Guarded([places.python, "-I", script]) as child:
        said = child.output.read().decode(errors="replace").strip().splitlines()
        code = child.wait()
    if code != 0:
        raise Problem(f"{script.name} failed in .venv: {said[-1] if said else code}; delete .venv and try again.")
