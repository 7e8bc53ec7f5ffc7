"""Command lines for a ComfyUI without its web server, and workflows with components on another machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from devtools.client import Workflow
from devtools.hosts import NEWEST, Frontend, Host
from devtools.places import Places
from devtools.server import ServerSpec, prepare_base
from tests.host.driver import PACK, spec_for
from tests.host.workflows import flux, placed

NODE_B = "ray://node-b/cpu"


def arguments(base: Path, models: Path, host: Host = NEWEST, devices: tuple[str, ...] = ("--cpu",)) -> list[str]:
    """What a ComfyUI with our pack and these models is started with, in this base folder, which is made.

    `devices` are the flags that choose them.
    """
    places = Places.here()
    packs = {"multigpu": places.root}
    prepare_base(ServerSpec(tree=places.root, python=Path(sys.executable), base=base, models=models, packs=packs))
    return [
        *devices, "--base-directory", str(base), "--database-url", "sqlite:///:memory:", "--disable-api-nodes",
        "--extra-model-paths-config", str(base / "extra_paths.yaml"),
        "--front-end-root", str(Frontend(host).files(places)),
    ]  # fmt: skip


def driver_spec(base: Path, head: str, *, in_file: bool = False) -> ServerSpec:
    """The ComfyUI where the user sits, which knows the cluster with this head from the environment, or from a file.

    It has the pack `tests/packs/one_by_one_pack`, too.
    """
    environment = {name: os.environ[name] for name in ("RAY_AUTH_TOKEN_PATH", "PYTHONPATH")}
    if in_file:
        folder = base / "user" / "__multigpu"
        folder.mkdir(parents=True)
        (folder / "ray_head").write_text(f"{head}\n")
    environment["MULTIGPU_RAY"] = "" if in_file else head
    root = Places.here().root
    packs = {PACK: root, "one_by_one": root / "tests" / "packs" / "one_by_one_pack"}
    return spec_for(NEWEST, base, Path(sys.executable), environment=environment, packs=packs)


def remote(seed: int) -> Workflow:
    """Flux with every component on node-b."""
    workflow = flux(seed)
    for part in ("model", "clip", "vae"):
        workflow = placed(workflow, part, compute_device=NODE_B)
    return workflow
