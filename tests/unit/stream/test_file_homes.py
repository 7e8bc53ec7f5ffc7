"""Blocks that rest in their file, on a device without streams. (Streams are tested on simulated accelerators.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from multigpu.devices.torch_devices import FILE, torch_device
from multigpu.errors import HostError
from multigpu.plan import DISK
from multigpu.stream import file_lane, file_speed
from multigpu.stream.census import bytes_by_home
from multigpu.stream.file_speed import reading_speed
from multigpu.stream.lanes import Arrival
from multigpu.stream.pages import PagedLeaf
from multigpu.stream.streamer import Streamer

from . import filed
from .filed import Filed, write

COUNT, WIDTH = 6, 64
MATRIX = 4 * WIDTH**2
X = torch.linspace(-1, 1, WIDTH)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Filed:
    monkeypatch.setattr(Streamer, "poison", True)
    return Filed(write(tmp_path / "weights", COUNT, WIDTH), COUNT, WIDTH)


@pytest.mark.parametrize("ring", [1, 2 * MATRIX, 100 * MATRIX])
def test_they_are_read_at_each_use(model: Filed, ring: int) -> None:
    want = model(X)
    residence = model.streamed(ring)
    for _ in range(3):
        assert torch.equal(model(X), want)
    pointers = {page.tensor.data_ptr() for page in model.pages.values()}
    in_file = bytes_by_home(model, lambda tensor: tensor.data_ptr() in pointers)
    assert in_file == {"disk": COUNT * MATRIX, "cpu": COUNT * 4}
    assert all(residence.is_in_file(block) and residence.is_homed(block) for block in model.blocks)
    assert residence.intact() and residence.misplaced(model.blocks) is None
    residence.leave(model.rest)
    assert torch.equal(model(X), want)
    assert {layer.weight.data_ptr() for layer in model.layers} == pointers, "nothing was copied"


def test_new_contents_bring_a_block_to_ram(model: Filed) -> None:
    residence = model.streamed(2 * MATRIX)
    model(X)
    residence.changing()
    residence.rewrite("layers.2", model.layers[2], "weight", torch.eye(WIDTH))
    residence.changed()
    assert not residence.is_in_file("layers.2") and residence.is_in_file("layers.3")
    changed = model(X)
    residence.leave(model.rest)
    assert torch.equal(model.layers[2].weight, torch.eye(WIDTH))
    assert torch.equal(model(X), changed)


def test_a_file_that_has_changed_is_not_used(model: Filed, tmp_path: Path) -> None:
    residence = model.streamed(2 * MATRIX)
    want = model(X)
    file = tmp_path / "weights"
    before = file.stat()
    with file.open("r+b") as changing:
        changing.write(b"other")
    with pytest.raises(HostError, match="has changed on disk since it was loaded"):
        model(X)
    import os

    with file.open("r+b") as changing:
        changing.write(torch.linspace(-1, 1, WIDTH).numpy().tobytes()[:5])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    residence.changing()
    assert torch.equal(model(X), want), "the failure has left nothing behind"
    residence.leave(model.rest)


def test_torch_has_no_name_for_the_file() -> None:
    assert torch_device(DISK) == FILE and FILE.type == "meta"


def test_an_arrival_is_waited_for_and_says_what_went_wrong() -> None:
    arrival = Arrival()
    arrival.over("event", OSError("gone"))
    assert arrival.event() == "event"
    with pytest.raises(OSError, match="gone"):
        arrival.check()


def leaves(model: Filed) -> list[PagedLeaf]:
    return [leaf for page in model.pages.values() for leaf in page.leaves.values()]


@pytest.mark.parametrize("cached", [True, False])
def test_the_speed_of_reading(model: Filed, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    monkeypatch.setattr(file_lane, "PART", 1000)
    speed = reading_speed(leaves(model), cached=cached)
    assert speed is not None and speed > 0
    assert reading_speed([], cached=cached) is None


def test_a_sample_of_a_large_file_is_read(model: Filed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lane, "PART", 1000)
    monkeypatch.setattr(file_speed, "SAMPLE", 8000)
    parts = file_speed._parts(leaves(model))
    assert 8 <= len(parts) <= 9 and {count for _, _, count in parts} == {1000}
    monkeypatch.setattr(file_speed, "LONGEST", 0.0)
    assert file_speed._read(parts) >= 0


# -- under a limit of RAM ----------------------------------------------------------------------------------------


@contextmanager
def ram_limit(limit: int) -> Iterator[Path]:
    """A control group inside that of this process, with a limit of RAM; skips the test where there can be none."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        groups = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        old = "memory" in groups
        top = Path("/sys/fs/cgroup/memory" if old else "/sys/fs/cgroup")
        group = top / groups["memory" if old else ""] / "multigpu-test"
        group.mkdir()
    except (OSError, KeyError) as reason:
        pytest.skip(f"no control group can be made here: {reason}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        except OSError as reason:
            pytest.skip(f"RAM cannot be limited here: {reason}")
        yield group
    finally:
        group.rmdir()


def test_a_model_twice_as_large_as_the_ram_that_is_allowed(tmp_path: Path) -> None:
    """In a process of its own. It would be killed if the weights became its own memory."""
    count, width, limit = 64, 2048, 512 << 20
    path = write(tmp_path / "weights", count, width)
    assert path.stat().st_size == 2 * limit
    with ram_limit(limit) as group:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", sys.executable, "-m", filed.__name__]
            + [str(path), str(count), str(width), str(limit)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[3],
        )
    assert done.returncode == 0, done.stderr
    anonymous, result = done.stdout.split()
    assert int(anonymous) < 256 << 20
    model = Filed(path, count, width)
    assert float(result) == model(torch.linspace(-1, 1, width)).double().sum().item()
