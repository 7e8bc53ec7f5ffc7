"""Compile the backend with the compiler that is there, once per torch, compiler, variant and source.

Imports no torch: a build needs to know only its version and where it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator

SOURCES = pathlib.Path(__file__).parent / "csrc"
MODULE = "simdev_native"
VARIANT_FLAGS = {
    "cuda": ["-DSIMDEV_CUDA"], "xpu": ["-DSIMDEV_XPU"], "mps": ["-DSIMDEV_MPS"], "npu": [], "privateuseone": [],
}  # fmt: skip


class NoCompiler(RuntimeError):
    """There is nothing to build the simulated devices with; tests that need them are skipped."""


def find_compiler() -> str:
    """The path of a C++ compiler: $CXX, else c++, g++ or clang++. Raises NoCompiler, naming what was looked for."""
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise NoCompiler(
        f"simulated devices need a C++20 compiler; looked for {', '.join(names)} on PATH. "
        "Install g++ or set CXX to a compiler."
    )


def cache_directory() -> pathlib.Path:
    """In the cache folder of `dev.py`; `MULTIGPU_DEV_CACHE` moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(os.environ.get("MULTIGPU_DEV_CACHE") or os.path.join(base, "multigpu-dev")) / "simdev"


def build_key(kind: str, compiler: str) -> str:
    """Changes whenever the compiled module could."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    parts = [kind, importlib.metadata.version("torch"), sysconfig.get_config_var("EXT_SUFFIX"), compiler, version]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def compile_command(kind: str, compiler: str, output: pathlib.Path) -> list[str]:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    root = pathlib.Path(torch.origin).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={MODULE}"]
    command += VARIANT_FLAGS[kind]
    for path in includes:
        command += ["-isystem", str(path)]
    command += [str(SOURCES / "all.cpp"), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    return [*command, "-o", str(output)]


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(kind: str, directory: pathlib.Path | None = None) -> pathlib.Path:
    """The compiled module for `kind`, built if it is not in the cache.

    Safe for several processes at once: one builds, the others wait, and the file appears under its name only when it is
    complete. A compiler error raises RuntimeError with the end of the compiler's output.
    """
    if os.name != "posix":
        raise NoCompiler("simulated devices are built on Linux and macOS only")
    compiler = find_compiler()
    directory = (directory or cache_directory()) / build_key(kind, compiler)
    target = directory / f"{MODULE}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / "lock"):
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            output = pathlib.Path(scratch) / target.name
            result = subprocess.run(compile_command(kind, compiler, output), capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"building the simulated devices failed:\n{result.stderr[-4000:]}")
            os.replace(output, target)
    return target


def load(kind: str) -> types.ModuleType:
    """Build if needed, import, and return the compiled module."""
    path = str(build(kind))
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
