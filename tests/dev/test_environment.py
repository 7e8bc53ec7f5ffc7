"""The Python environment: sizes that are announced and checked are true, and a damaged one is made anew."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools import environment
from devtools.hosts import FRONTENDS, HOSTS, Host
from devtools.places import Places
from tests.dev.sandbox import MOUNT, Sandbox, assert_one_sentence, needs_mount

PINNED = "2.13.0"


def _site_packages(venv: Path) -> Path:
    return next(venv.glob("**/site-packages"))


def _break_interpreter(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/no/such/python")


def _remove_package(venv: Path) -> None:
    (_site_packages(venv) / "aiohttp").unlink()


def _remove_file(venv: Path) -> None:
    """`torch` becomes a folder of links to all that is in it but one."""
    link = _site_packages(venv) / "torch"
    real = link.resolve()
    link.unlink()
    link.mkdir()
    for path in real.iterdir():
        if path.name != "version.py":
            (link / path.name).symlink_to(path)


def _remove_list(venv: Path) -> None:
    (_site_packages(venv) / "pytest-9.2.0.dist-info").unlink()
    (_site_packages(venv) / "pytest-9.2.0.dist-info").mkdir()


def _remove_settings(venv: Path) -> None:
    (venv / "pyvenv.cfg").unlink()


DAMAGE = [
    (_break_interpreter, "bin/python: No such file or directory"),
    (_remove_package, "aiohttp/"),
    (_remove_file, "torch/version.py"),
    (_remove_list, "pytest-9.2.0.dist-info/RECORD"),
    (_remove_settings, "pyvenv.cfg"),
]


def _own_environment(sandbox: Sandbox) -> Path:
    """A whole `.venv` that may be damaged: its packages are links to those of the clone."""
    whole, venv = Places.here().venv, sandbox.root / ".venv"
    venv.unlink()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    for folder in (venv, venv / "bin", venv / "include", _site_packages(venv)):
        for path in (whole / folder.relative_to(venv)).iterdir():
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return venv


@pytest.mark.skipif(os.name == "nt", reason="the environment is built from links")
@pytest.mark.parametrize(("harm", "found"), DAMAGE, ids=[harm.__name__ for harm, _ in DAMAGE])
def test_a_damaged_environment_is_made_anew(tmp_path: Path, harm: Callable[[Path], None], found: str) -> None:
    """Without network that ends soon, with the sentence about the network."""
    sandbox = Sandbox(tmp_path, ready_environment=True)
    sandbox.go_offline()
    venv = _own_environment(sandbox)
    places = Places(root=sandbox.root, cache=tmp_path)
    assert environment.damage(places) is None, "not damaged yet"
    harm(venv)
    code, output = sandbox.run("test", "--only", "lint")
    assert "damaged, so it is made anew (" in output and found in output, output
    assert_one_sentence(code, output, "check the network")
    assert not (_site_packages(venv) / "torch").exists(), "it was not made anew"


def test_a_file_in_place_of_the_environment_is_replaced(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, ready_environment=False)
    sandbox.go_offline()
    (sandbox.root / ".venv").write_text("no folder")
    code, output = sandbox.run("test", "--only", "lint")
    assert "Making .venv" in output
    assert_one_sentence(code, output, "check the network")
    assert (sandbox.root / ".venv").is_dir()


def test_what_is_announced_is_what_this_environment_has() -> None:
    venv = Places.here().venv
    torch = runpy.run_path(str(_site_packages(venv) / "torch" / "version.py"))
    build = environment.build_to_come(Places.here())
    assert build is (environment.CUDA if torch["cuda"] else environment.CPU)
    assert 0.9 * build.environment < environment.held(venv) < 1.05 * build.environment


def test_the_build_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    builds = [environment.build_of(version).name for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.0")]
    assert builds == ["CPU", "CUDA", "CUDA"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment.build_of("2.13.0") is environment.CPU


PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)
BUILT_FOR_DEVICES = ("nvidia-", "cuda-", "triton")
"""What comes with a CUDA build of torch, which pins it."""


def _pins(*files: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package that these files pin."""
    texts = [(Places.here().requirements / file).read_text() for file in files]
    return {name: (version, hashes.count("sha256:")) for text in texts for name, version, hashes in PIN.findall(text)}


def test_every_package_of_the_environment_is_pinned() -> None:
    hashed = _pins("packages.txt", "kernels-pure.txt", "kernels-cuda.txt")
    assert len(hashed) > 80 and all(hashes for _, hashes in hashed.values())
    unhashed = _pins("torch.txt")
    assert unhashed.keys() == {"torch", "torchvision", "torchaudio"}
    pinned = {name: version for name, (version, _) in (hashed | unhashed).items()}
    installed = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in importlib.metadata.distributions()}
    ours = {name: version for name, version in installed.items() if not name.startswith(BUILT_FOR_DEVICES)}
    assert {name: version.partition("+")[0] for name, version in ours.items()}.items() <= pinned.items()


def test_every_host_is_pinned_by_hash() -> None:
    for host in HOSTS:
        assert [hashes for _, hashes in _pins(f"hosts/{host.version}.txt").values()] == [1, 1]


def test_the_newest_frontend_is_pinned_by_hash_and_is_the_newest() -> None:
    """A ComfyUI that pins a newer one was added? CONTRIBUTING.md has the command that renews the pin."""
    places = Places.here()
    assert _pins("hosts/newest-frontend.txt")["comfyui-frontend-package"][1] > 0
    *pinned, newest = ([int(part) for part in each.version(places).split(".")] for each in FRONTENDS)
    assert newest >= max(pinned)


def test_ray_is_pinned_by_hash_without_what_the_environment_has() -> None:
    pins = _pins("ray.txt")
    assert "ray" in pins and all(hashes for _, hashes in pins.values())
    assert not pins.keys() & _pins("packages.txt").keys()


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.version)
def test_the_manager_is_pinned_by_hash_without_what_the_environment_has(host: Host) -> None:
    pins = _pins(f"manager/{host.version}.txt")
    assert "comfyui-manager" in pins and all(hashes for _, hashes in pins.values())
    assert not pins.keys() & _pins("packages.txt").keys()


def test_no_pin_names_an_index() -> None:
    for file in Places.here().requirements.rglob("*.*"):
        assert "://" not in file.read_text() and "--index" not in file.read_text(), file


@needs_mount
def test_a_disk_with_room_for_a_cpu_build_only(tmp_path: Path) -> None:
    """pip is offered a wheel that calls itself a CUDA build, and prefers it. The check used to pass with 4 GB."""
    wheel = tmp_path / "wheels" / f"torch-{PINNED}+cu999-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()  # it would be read only if the set-up went on
    sandbox = Sandbox(tmp_path / "clone", ready_environment=False)
    sandbox.environment["PIP_FIND_LINKS"] = str(wheel.parent)
    code, output = sandbox.run_mounted("run", mount=sandbox.root, options="size=5g")
    assert_one_sentence(code, output, "needs 8.0", "with a CUDA build of torch", "free some space there")
    assert "Installing torch" not in output


@needs_mount
def test_pip_needs_no_room_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    """30 MB are downloaded where that folder has 1 MB."""
    (tmp_path / "small").mkdir()
    program = f"""
from pathlib import Path
from devtools import hosts
from devtools.hosts import HOSTS
from devtools.places import Places

class Elsewhere(Places):
    python, requirements = Places.here().python, Places.here().requirements

hosts.fetch(hosts.NEWEST, Elsewhere(Path({str(tmp_path)!r}), Path({str(tmp_path)!r})))
"""
    (tmp_path / "program.py").write_text(program)
    mount = f"mount -t tmpfs -o size=1m none {tmp_path / 'small'}"
    settings = os.environ | {"TMPDIR": str(tmp_path / "small"), "PYTHONPATH": str(Places.here().root)}
    ran = subprocess.run(
        [*MOUNT, f"{mount} && exec {sys.executable} {tmp_path / 'program.py'}"], env=settings, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
