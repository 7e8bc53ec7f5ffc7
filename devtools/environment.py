"""The Python environment in `.venv`: ComfyUI's requirements and our own tools, every version pinned."""

import contextlib
import csv
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import console, guard
from .places import Places
from .problem import Problem, from_output
from .steps import STAMP, fingerprint, is_made, only_one, remove

CPU_WHEELS = Path(__file__).with_name("cpu_wheels.py")
DOWNLOAD = re.compile(r"\s*(Downloading|Using cached) (?:\S*/)?(\S+)(?<!\.metadata) (\([^)]+\))")
GB = 10**9


@dataclass(frozen=True)
class Build:
    """A build of torch and what the environment with it comes to, in GB, measured on Linux.

    `downloads` is what pip fetches when its cache is empty, `environment` the size of `.venv`. `clone` is the most that
    the clone grows by at any time: all of `.venv`, or torch with its libraries and the packages they come from.
    """

    name: str
    downloads: float
    environment: float
    clone: float


CPU = Build("CPU", downloads=0.45, environment=1.9, clone=2.3)
CUDA = Build("CUDA", downloads=3.0, environment=5.9, clone=8.0)
CACHE = 0.75
"""GB of tiny models and simulated accelerators in the cache folder."""


def has_nvidia() -> bool:
    return shutil.which("nvidia-smi") is not None


def is_ready(places: Places) -> bool:
    return is_made(places.venv, _inputs(places)) and damage(places) is None


def ensure(places: Places) -> None:
    """Make `.venv` if it is missing, was made from other pins, or is damaged.

    It is made again rather than repaired: a killed pip leaves half-written packages that it later takes for complete
    ones. The downloads are in pip's cache by then.
    """
    with only_one(places.dev / "lock"):
        if is_made(places.venv, _inputs(places)):
            found = damage(places)
            if found is None:
                console.line("  Python environment: ready (.venv)")
                return
            console.line(f"  Python environment: damaged, so it is made anew ({found})")
        remove(places.venv)
        _check_space(places, CPU)  # the least there can be, before anything is made
        with console.step("Making .venv"):
            _make_venv(places)
            build = build_to_come(places)
        _check_space(places, build)
        sizes = f"{build.downloads:.1f} GB of downloads, {build.environment:.1f} GB on disk"
        console.line(f"  pip brings a {build.name} build of torch: about {sizes}")
        with console.step("Installing ComfyUI's requirements and the development tools"):
            for pins in ("packages", "kernels-cuda" if has_nvidia() else "kernels-pure"):
                file = places.requirements / f"{pins}.txt"  # names all that is needed, with the hashes it may have
                pip(places, ["install", "--no-deps", "--require-hashes", "-r", file], what=f"the pinned {pins}")
        with console.step("Installing torch"):
            pip(places, ["install", "-r", places.requirements / "torch.txt"], what="torch")
            code, text = guard.run([places.python, "-I", CPU_WHEELS])
            if code != 0:
                raise Problem(f"{CPU_WHEELS.name} failed in .venv: {text}; delete .venv and try again.")
        (places.venv / STAMP).write_text(_inputs(places), encoding="utf-8")


def pip(places: Places, arguments: Sequence[str | Path], *, what: str) -> str:
    """Run the environment's pip and return what it printed; its downloads are shown as they come.

    Raises Problem when it fails; `what` is named then. Its temporary files are as large as its downloads and lie in the
    clone: the system's folder for them may be small.
    """
    scratch = places.dev / "pip"
    remove(scratch)
    scratch.mkdir(parents=True)

    def show(line: str) -> None:
        if found := DOWNLOAD.match(line):
            verb = "downloading" if found[1] == "Downloading" else "from pip's cache"
            console.detail(f"{verb} {found[2]} {found[3]}")

    command = [places.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    code, text = guard.run(command, show, env=dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)))
    if code != 0:
        raise from_output(text, what, places.venv)
    return text


def damage(places: Places) -> str | None:
    """What is wrong with a finished `.venv`: its Python does not run, or a file is missing. None if it is whole.

    Compiled bytecode does not count: Python makes it anew.
    """
    code, text = guard.run([places.python, "-I", "-S", "-c", ""])
    if code != 0:
        return text or "its Python does not run"
    packages = sysconfig.get_path("purelib", "venv", {"base": str(places.venv)})
    wanted = [str(places.venv / "pyvenv.cfg"), packages]
    for folder in sorted(Path(packages).glob("*.dist-info")):
        wanted.append(str(folder / "RECORD"))
        if os.path.isfile(wanted[-1]):
            with open(wanted[-1], encoding="utf-8", newline="") as file:
                wanted += (os.path.join(packages, path) for path, *_ in csv.reader(file) if not path.endswith(".pyc"))
    return next((path for path in wanted if not os.path.exists(path)), None)


def build_to_come(places: Places) -> Build:
    """The build of torch that pip will install: of several with the pinned version, the one it names first."""
    (pin,) = re.findall(r"^torch==(.+)$", (places.requirements / "torch.txt").read_text(), re.MULTILINE)
    offered = pip(places, ["index", "versions", "torch"], what="torch")
    found = re.search(rf"(?<![\w.]){re.escape(pin)}(\+\w+)?(?![\w.])", offered)
    return build_of(found[0] if found else pin)


def build_of(version: str) -> Build:
    """By the label in a version such as 2.13.0+cpu. Without a label it is the package index's, CUDA only for Linux."""
    label = version.partition("+")[2] or ("cuda" if sys.platform == "linux" else "cpu")
    return CPU if label == "cpu" else CUDA


def shortage(places: Places, build: Build, pip_cache: Path | None = None) -> str | None:
    """A sentence about the first disk that has less room than the set-up will take of it; None if all have enough.

    What lies there already is not needed again. Folders on the same disk share its room.
    """
    wanted = {places.root: build.clone - held(places.venv), places.cache: CACHE - held(places.cache)}
    if pip_cache:
        wanted[pip_cache] = build.downloads - held(pip_cache)
    disks: dict[int, list[Path]] = {}
    for folder in (folder for folder in wanted if wanted[folder] > 0):
        disks.setdefault(existing(folder).stat().st_dev, []).append(folder)
    for folders in disks.values():
        free, need = shutil.disk_usage(existing(folders[0])).free / GB, sum(wanted[folder] for folder in folders)
        if free < need:
            return (
                f"The disk for {' and '.join(map(str, folders))} has {free:.1f} GB free and the set-up needs "
                f"{need:.1f} with a {build.name} build of torch; free some space there."
            )
    return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def held(folder: Path) -> float:
    """GB of all files below a folder that can be seen."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone meanwhile
                total += os.lstat(os.path.join(path, name)).st_size
    return total / GB


def _inputs(places: Places) -> str:
    """What the environment is made from."""
    kind = "nvidia" if has_nvidia() else "plain"
    return fingerprint(platform.python_version(), kind, CPU_WHEELS, *sorted(places.requirements.glob("*.txt")))


def _check_space(places: Places, build: Build) -> None:
    """Raises Problem when a disk has too little room. pip's cache counts as soon as there is a pip to ask for it."""
    cache = None
    with contextlib.suppress(Problem):  # there is no pip yet, or the user has turned its cache off
        cache = Path(pip(places, ["cache", "dir"], what="pip's cache").splitlines()[-1])
    if text := shortage(places, build, cache):
        raise Problem(text)


def _make_venv(places: Places) -> None:
    code, text = guard.run([guard.BASE_PYTHON, "-m", "venv", places.venv])
    if code != 0 and "ensurepip" in text:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise Problem(f"This Python has no venv module; install it (Debian and Ubuntu: apt install {package}).")
    if code != 0:
        raise Problem(f"{guard.BASE_PYTHON} -m venv failed: {(text.strip() or 'no output').splitlines()[-1]}.")
