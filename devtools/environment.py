"""The Python environment in `.venv`: ComfyUI's requirements and our own tools, every version pinned."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

from . import cpu_wheels, inventory, space
from .console import Console
from .guard import BASE_PYTHON, Guarded
from .pip import pip, versions
from .places import Places
from .problem import Problem
from .steps import Stamp, fingerprint, remove, whole_folder


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None


def stamp(places: Places) -> Stamp:
    files = sorted(places.requirements.glob("*.txt"))
    kind = "nvidia" if has_nvidia() else "plain"
    return Stamp(
        places.stamps, "environment", fingerprint(platform.python_version(), kind, Path(cpu_wheels.__file__), *files)
    )


def ready(places: Places) -> bool:
    return stamp(places).holds() and damage(places) is None


def ensure(places: Places, console: Console) -> None:
    """Make `.venv` if it is missing, does not have the pinned versions, or is damaged.

    It is made again rather than repaired: a killed pip leaves half-written packages that it later takes for complete
    ones. The downloads are in pip's cache by then.
    """
    done = stamp(places)
    if done.holds():
        found = damage(places)
        if found is None:
            console.line("  Python environment: ready (.venv)")
            return
        console.line(f"  Python environment: damaged, so it is made anew ({found})")
    done.clear()
    remove(places.venv)
    space.check(places, space.CPU)  # the least there can be, before anything is made
    with console.step("Making .venv"):
        _make_venv(places)
        pip(places, ["install", "-r", places.requirements / "pip.txt"], what="pip", console=console)
        build = _build_to_come(places)
    space.check(places, build)
    console.line(f"  pip brings a {build.name} build of torch: about {build.sizes}")
    with console.step("Installing torch"):
        pip(places, ["install", "-r", places.requirements / "torch.txt"], what="torch", console=console)
        extras = ["install", "--no-deps", "-r", places.requirements / "torch-extras.txt"]
        pip(places, extras, what="torchvision and torchaudio", console=console)
        _install_native(places, console)
        _run_script(places, Path(cpu_wheels.__file__))
    with console.step("Installing ComfyUI's requirements and the development tools"):
        files = ["-r", places.requirements / "host.txt", "-r", places.requirements / "dev.txt"]
        pip(places, ["install", *files], what="the pinned requirements", console=console)
    done.write()


def damage(places: Places) -> str | None:
    """What is wrong with a finished `.venv`: its Python does not run, or a file is missing. None if it is whole."""
    with Guarded([places.python, "-I", inventory.__file__]) as child:
        said = child.output.read().decode(errors="replace").strip().splitlines()
        return None if child.wait() == 0 else said[-1] if said else "its Python does not run"


def _build_to_come(places: Places) -> space.Build:
    """The build of torch that pip will install: of several with the pinned version, the one it names first."""
    pin = next(line for line in (places.requirements / "torch.txt").read_text().splitlines() if line[:7] == "torch==")
    offered = (version for version in versions(places, "torch") if version.partition("+")[0] == pin[7:])
    return build_of(next(offered, pin[7:]))


def build_of(version: str) -> space.Build:
    """By the label in a version such as 2.13.0+cpu. Without a label it is the package index's, CUDA only for Linux."""
    label = version.partition("+")[2] or ("cuda" if sys.platform == "linux" else "cpu")
    return space.CPU if label == "cpu" else space.CUDA


def _make_venv(places: Places) -> None:
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
        pip(places, ["install", "--no-deps", "-r", pins], what=what, console=console)
        return
    with whole_folder(places.dev / "wheels") as folder:
        only_pure = ["--no-deps", "--only-binary", ":all:", "--platform", "any"]
        pip(places, ["download", *only_pure, "-d", folder, "-r", pins], what=what, console=console)
        pip(places, ["install", "--no-deps", *sorted(folder.glob("*.whl"))], what=what, console=console)


def _run_script(places: Places, script: Path) -> None:
    with Guarded([places.python, "-I", script]) as child:
        said = child.output.read().decode(errors="replace").strip().splitlines()
        code = child.wait()
    if code != 0:
        raise Problem(f"{script.name} failed in .venv: {said[-1] if said else code}; delete .venv and try again.")
