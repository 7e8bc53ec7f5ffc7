"""The bar while files are read: it follows what is read, hears an interruption, and leaves no thread."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pack import Pack
from tests.engine.studio import Studio

SIZE = 64 << 20


class Bar:
    """Stands where the server's hook stands: notes what is shown, and raises from `stop_at` on."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.stop_at = 101

    def __call__(self, value: int, total: int, _preview: Any, **_more: Any) -> None:
        import comfy.model_management as memory

        self.seen.append(100 * value // total)
        if value >= self.stop_at:
            raise memory.InterruptProcessingException

    def wait_for(self, percent: int) -> int:
        """The first that was shown of at least so much."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if self.seen and self.seen[-1] >= percent:
                return self.seen[-1]
            time.sleep(0.02)
        raise AssertionError(f"{percent} % was never shown: {self.seen}")


@pytest.fixture
def bar(loaded_host: str) -> Iterator[Bar]:
    import comfy.utils

    made = Bar()
    comfy.utils.set_progress_bar_global_hook(made)
    yield made
    comfy.utils.set_progress_bar_global_hook(None)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("MultiGPU")] == []


@pytest.fixture
def touch(tmp_path: Path) -> Iterator[Callable[[float], str]]:
    """Reads a share of a mapped file of 64 MiB, as a loader does; returns the file."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:

        def read(share: float) -> str:
            assert not any(mapped[: int(share * SIZE) : mmap.PAGESIZE])
            return str(path)

        yield read


def test_the_bar_follows_what_is_read(bar: Bar, touch: Callable[[float], str]) -> None:
    from multigpu.host.reading import reading

    with reading([touch(0)]):
        touch(0.5)
        assert bar.wait_for(40) < 75
        touch(1)
        assert bar.wait_for(90) < 100
    assert bar.seen == sorted(bar.seen) and bar.seen[0] == 0 and bar.seen[-1] == 100


def test_an_interruption_is_raised_when_the_loader_is_done(bar: Bar, touch: Callable[[float], str]) -> None:
    import comfy.model_management as memory

    from multigpu.host.reading import reading

    bar.stop_at, done = 1, False
    with pytest.raises(memory.InterruptProcessingException), reading([touch(0)]):
        touch(0.5)
        bar.wait_for(1)
        done = True
    assert done and bar.seen[-1] < 100


def test_one_inside_another_shows_nothing(bar: Bar, touch: Callable[[float], str]) -> None:
    from multigpu.host.reading import reading

    with reading([touch(0)]):
        with reading([touch(0)]):
            assert bar.seen == [0]
        assert 100 not in bar.seen
    assert bar.seen.count(0) == 1 and bar.seen[-1] == 100


def test_a_file_that_cannot_be_read_leaves_the_bar_where_it_is(
    bar: Bar, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import folder_paths

    monkeypatch.setattr(folder_paths, "filename_list_cache", {})  # pytest removes the folder after the test
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 4096)
    paths, suffixes = folder_paths.folder_names_and_paths["diffusion_models"]
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([*paths, str(tmp_path)], suffixes))
    with pytest.raises(Exception, match="header"):
        pack.run("UNETLoaderMultiGPU", unet_name="broken.safetensors", weight_dtype="default", device="cpu")
    assert bar.seen == [0]


@pytest.mark.accelerator
def test_a_place_node_that_reads_a_model_again_shows_it(bar: Bar, studio: Studio, pack: Pack) -> None:
    model = studio.flux()
    assert bar.seen == [], "ComfyUI's own loader shows nothing"
    pack.one("MultiGPUPlaceModel", model=model, compute_device=studio.accelerators[1])
    assert bar.seen[0] == 0 and bar.seen[-1] == 100
