"""The engine inside a real ComfyUI, in this very process: one host version and one kind of device per process.

MULTIGPU_HOST names the ComfyUI version (the newest by default), SIMDEV the simulated accelerators (`cuda`, `npu`; the
CPU without it). `python dev.py test --only engine` runs all combinations.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from devtools import models
from devtools.hosts import NEWEST, find
from devtools.places import Places
from tests.engine.pack import Pack
from tests.engine.pages import weights_in_pages
from tests.engine.studio import Studio
from tests.sim import simdev

HOST_TABLES = 4096
"""Bytes of tables that the host's quantisation kernels keep on a device for good."""

KIND = os.environ.get("SIMDEV") or "cpu"
FOREMOST = KIND == "cuda" and os.environ.get("MULTIGPU_HOST", NEWEST.version) == NEWEST.version
"""Whether this is the combination that is tested most: state machines run longer in it.

In it, weights are pages of the model file, as in a ComfyUI with DynamicVRAM; elsewhere they are copies in RAM.
"""

DEVICE_PLUG_IN = (
    "test_hoisting",
    "test_loading",
    "test_machine",
    "test_other_packs",
    "test_patches",
    "test_shared_models",
    "test_streaming",
)
"""What runs on `npu`: torch moves tensors to and from such devices in another way, which nodes and plans do not see."""


ONCE = (
    "test_cpu_data_types",
    "test_forecasts",
    "test_large_loaders",
    "test_measured_plans",
    "test_pack_components",
    "test_pack_nodes",
    "test_pack_patchers",
    "test_reading",
    "test_time_to_picture",
)
"""What depends neither on ComfyUI's version nor on the kind of device: runs on simulated `cuda` in the newest."""

MARKS = {
    "accelerator": "needs devices beside the CPU: runs on simulated ones",
    "cuda": "needs the streams and peers of CUDA: runs on simulated ones",
    "once": "depends on neither, as the files of `ONCE`: runs where those do",
    "pages": "needs weights that are pages of their file: runs where they are",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, why in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {why}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process of the same suite runs."""
    out = {"accelerator": KIND == "cpu", "cuda": KIND != "cuda", "once": not FOREMOST, "pages": not FOREMOST}
    deselected = [
        item
        for item in items
        if any(out[name] for name in MARKS if item.get_closest_marker(name))
        or (KIND == "npu" and item.path.stem not in DEVICE_PLUG_IN)
        or (not FOREMOST and item.path.stem in ONCE)
    ]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


@pytest.fixture(scope="session")
def world() -> simdev.World | None:
    if KIND == "cpu":
        return None
    try:
        return simdev.install_from_text(f"{KIND}:3:6g")
    except simdev.NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def loaded_host(world: simdev.World | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Import ComfyUI as its main.py does. Gives the folder of tiny models."""
    import multigpu.plan  # noqa: F401  before the host puts its own multigpu.py on the path

    places = Places.here()
    version = find(os.environ.get("MULTIGPU_HOST") or NEWEST.version).version
    tree, folder = places.host_tree(version), models.folder(places)
    if not tree.is_dir() or not folder.is_dir():
        pytest.fail(f"ComfyUI {version} or the tiny models are not there; `python dev.py test` makes them")
    sys.path.insert(0, str(tree))
    sys.argv = ["engine", "--use-pytorch-cross-attention", *(["--cpu"] if KIND == "cpu" else [])]
    import comfy.options

    comfy.options.enable_args_parsing()
    import folder_paths
    import utils.extra_config  # noqa: F401  as main.py does: `nodes` puts another `utils` on the path

    folder_paths.set_user_directory(str(tmp_path_factory.mktemp("user")))
    for kind in ("checkpoints", "controlnet", "diffusion_models", "text_encoders", "vae", "loras"):
        folder_paths.add_model_folder_path(kind, str(folder / kind))
    import comfy.sd

    if KIND == "cpu":
        hide_newer_torch()
    gc.freeze()  # the host's modules stay: looking through them in every round of the collector takes long
    with weights_in_pages() if FOREMOST else nullcontext(), small_parts():
        yield str(folder)


def hide_newer_torch() -> None:
    """Take away what torch has since 2.5 and 2.6: ComfyUI accepts 2.4. On the CPU, so that others run with it."""
    for module, name in ((torch, "accelerator"), (torch, "get_device_module"), (torch.mps, "recommended_max_memory")):
        vars(module).pop(name, None)


@contextmanager
def small_parts() -> Iterator[None]:
    """The tiny models' weights are read as large ones are: in many parts, by several threads."""
    from multigpu.stream import file_lane, file_reader

    small = {"THREADS": 3, "PART": 10_240, "WORTH_IT": 65_536}
    with mock.patch.multiple(file_reader, **small), mock.patch.object(file_lane, "PART", 200_000):
        yield


@pytest.fixture
def studio(loaded_host: str, world: simdev.World | None) -> Iterator[Studio]:
    """Loads, places and draws. Afterwards nothing may be left on a device, pinned, or racing."""
    import comfy.model_management as memory

    from multigpu.stream.streamer import Streamer

    studio = Studio(loaded_host, KIND, world)
    Streamer.poison = world is not None  # ring bytes are overwritten after use: a missing wait shows in the picture
    if world is not None:
        world.reset()
    with torch.inference_mode():
        yield studio
    studio.settle()
    memory.unload_all_models()
    gc.collect()
    memory.soft_empty_cache()
    assert memory.current_loaded_models == []
    if world is not None:
        races = world.take_races()
        assert not races, "races were seen:\n" + "\n".join(map(str, races))
        assert world.pinned_bytes() == 0, "RAM is still pinned"
        left = {device: world.allocated(device) for device in studio.accelerators}
        assert max(left.values()) <= HOST_TABLES, f"memory is still allocated: {left}"


@pytest.fixture(scope="session")
def loaded_pack(loaded_host: str) -> Pack:
    return Pack()


@pytest.fixture
def pack(loaded_pack: Pack, studio: Studio) -> Iterator[Pack]:
    """Our nodes. Afterwards torch's current device, and the host's own answer, are what they were."""
    import comfy.model_management as memory

    import multigpu.api

    answer, before = memory.get_torch_device, memory.get_torch_device()
    yield loaded_pack
    assert memory.get_torch_device is answer
    assert memory.get_torch_device() == before
    multigpu.api.clear_all_retention_anchors("test")
    gc.collect()
    loaded_pack.runtime.states.settle()
