"""Pack what the GPU scripts need into one folder, for a machine where nothing can be installed.

    python tests/gpu/bundle.py COMFYUI_TREE [FOLDER]

FOLDER (`.bundle` by default) gets a slim ComfyUI (without tokenizers, tests and templates) and, under `site/`, the
wheels that ComfyUI needs and that such a machine lacks. comfy-kitchen goes without its compiled libraries, comfy-aimdo
(DynamicVRAM) with it. About 15 MB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEEP = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfy_config", "utils", "app", "middleware")
LARGEST_FILE = 200_000
PURE = ("comfy-kitchen==0.2.26", "torchsde==0.2.6", "trampoline==0.1.2")
NATIVE = ("comfy-aimdo==0.4.11",)
PLATFORM = ["--platform", "manylinux2014_x86_64", "--python-version", "3.12"]


def main(tree: str, folder: str = ".bundle") -> None:
    target = Path(folder)
    shutil.rmtree(target, ignore_errors=True)
    host = target / "ComfyUI"
    for name in KEEP:
        if (Path(tree) / name).is_dir():
            shutil.copytree(Path(tree) / name, host / name, ignore=_too_large)
    for file in Path(tree).glob("*.py"):
        shutil.copy(file, host / file.name)
    with tempfile.TemporaryDirectory() as wheels:
        for options, names in ((["--platform", "any"], PURE), (PLATFORM, NATIVE)):
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary",
                ":all:",
                "-d",
                wheels,
            ]
            subprocess.run([*command, *options, *names], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target / "site")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    sys.stdout.write(f"{target}: {size / 1e6:.1f} MB\n")


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
