"""Pack what the GPU scripts need into one folder, for a machine where nothing can be installed.

    python tests/gpu/bundle.py COMFYUI_TREE [FOLDER]

FOLDER (`.bundle` by default) gets a slim ComfyUI (without the largest tokenizers, tests and templates), under `site/`
the packages that importing it needs and that such a machine lacks, under `wheels/`, packed, those that only its server
needs, and in `commit` that of this tree. comfy-kitchen goes without its compiled libraries, comfy-aimdo (DynamicVRAM)
with it. About 59 MB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEEP = (
    "alembic_db", "comfy", "comfy_api", "comfy_api_nodes", "comfy_config", "comfy_execution", "comfy_extras", "utils",
    "api_server", "app", "middleware",
)  # fmt: skip
LARGEST_FILE = 2_000_000
PURE = ("comfy-kitchen==0.2.26", "torchsde==0.2.6", "trampoline==0.1.2")
NATIVE = ("comfy-aimdo==0.4.11",)
SERVER = (
    "alembic", "annotated-types", "av", "blake3", "mako", "pydantic", "pydantic-core", "pydantic-settings",
    "python-dotenv", "simpleeval", "spandrel", "sqlalchemy", "typing-inspection",
)  # fmt: skip
"""The server's packages, pinned in requirements/packages.txt; those that a machine with torch and transformers has are
left out, and what ComfyUI can do without."""
PLATFORM = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
PINS = Path(__file__).parents[2] / "requirements" / "packages.txt"


def main(tree: str, folder: str = ".bundle") -> None:
    target = Path(folder)
    shutil.rmtree(target, ignore_errors=True)
    host = target / "ComfyUI"
    for name in KEEP:
        if (Path(tree) / name).is_dir():
            shutil.copytree(Path(tree) / name, host / name, ignore=_too_large)
    for file in [*Path(tree).glob("*.py"), *Path(tree).glob("*.ini"), Path(tree) / "requirements.txt"]:
        shutil.copy(file, host / file.name)
    with tempfile.TemporaryDirectory() as wheels:
        _download(wheels, ["--platform", "any"], PURE)
        _download(wheels, PLATFORM, NATIVE)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target / "site")
    pinned = [pin.split()[0] for pin in PINS.read_text().splitlines() if pin.partition("==")[0] in SERVER]
    _download(target / "wheels", PLATFORM, pinned)
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(described, capture_output=True, text=True, check=False).stdout
    (target / "commit").write_text(commit or "unknown\n")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    sys.stdout.write(f"{target}: {size / 1e6:.1f} MB\n")


def _download(folder: str | Path, platform: list[str], names: list[str] | tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, *platform, *names], check=True)


def _too_large(folder: str, names: list[str]) -> set[str]:
    return {
        name
        for name in names
        if name == "__pycache__"
        or (
            not name.endswith(".py")
            and (Path(folder) / name).is_file()
            and (Path(folder) / name).stat().st_size > LARGEST_FILE
        )
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
