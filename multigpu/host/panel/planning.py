"""A plan for a node's widgets, made from the headers of model files: what would go where, before anything is loaded.

The same code as in the nodes reads the widgets and makes the plan. Nothing is measured for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths
import nodes
from comfy import model_management

from ...devices.inventory import Inventory
from ...devices.torch_devices import device_id
from ...errors import InputError, ModelFileError, RequestError
from ...files import describe_model, read_tensors
from ...files.families import retimed
from ...files.model_file import READERS
from ...lifecycle.ledger import Stamp, stamp
from ...nodes.loader_table import COMPUTE
from ...nodes.wishes import parts, speaking, wish
from ...plan import DISK, Block, DeviceId, Forecast, Plan, Request, disk_budget, make_plan
from ...target import Resolver
from ...telemetry.bodies import PlanBody, shown
from ...telemetry.snapshot import ModelMemory, plan_rows, step
from ..capabilities import HostCapabilities
from ..device_memory import budgets
from ..lifecycle.prompts import is_own
from ..placing.placer import REACHED
from ..surface import Feature

DIFFUSION, CHECKPOINTS = ("diffusion_models", "unet"), "checkpoints"
PLACES = "MultiGPUPlace"
"""What the ids of the place nodes begin with."""
COMPONENTS = {"MultiGPUPlaceCLIP": "text", "MultiGPUPlaceVAE": "vae", "clip_": "text"}
"""What a node, or one of its parts, gets of a checkpoint, where that is not the diffusion model."""
FOLDERS = (
    "diffusion_models", "checkpoints", "text_encoders", "clip_vision", "vae", "controlnet", "unet", "clip", "unet_gguf",
    "clip_gguf",
)  # fmt: skip
"""The folders that loaders take models from: the host's, its older names of two, and those of ComfyUI-GGUF."""
DIFFUSION_BLOCKS = "diffusion_model."
"""What the host puts before the names that a diffusion model's blocks have in its file."""
_KEPT = 8
"""Of how many models the blocks are remembered: people type, and each key asks again."""

Key = tuple[tuple[Stamp, ...], str | None]


class Planning:
    """Makes plans without models. Safe to use from any thread."""

    def __init__(
        self,
        inventory: Inventory,
        capabilities: HostCapabilities,
        resolver: Callable[[], Resolver],
        *,
        models: Callable[[], Iterable[ModelMemory]],
        hoist: bool,
        others: bool,
    ) -> None:
        """`models` are those in memory. With `others`, place nodes can name devices of other machines."""
        self._models = models
        self._others = others
        self._inventory = inventory
        self._capabilities = capabilities
        self._resolver = resolver
        self._hoist = hoist and capabilities.offers(Feature.HOISTING)
        self._known: dict[Key, tuple[Block, ...]] = {}
        self._lock = threading.Lock()

    def answer(self, wanted: PlanBody) -> dict[str, Any]:
        """The plan as plain values, None if no file is named; or the other machine that will make it, or why it is not
        known before the workflow runs.

        Raises RequestError for everything that is wrong.
        """
        if not is_own({"class_type": wanted.node}):
            raise RequestError(f"{shown(wanted.node)} is none of MultiGPU's nodes; send the id of one")
        values = {**_defaults(nodes.NODE_CLASS_MAPPINGS[wanted.node]), **wanted.inputs}
        if self._others and wanted.node.startswith(PLACES) and (node := _elsewhere(str(values.get(COMPUTE, "")))):
            return {"plan": None, "elsewhere": node}
        try:
            return {"plan": self._plan(wanted, values, _part(wanted, values))}
        except ModelFileError as problem:
            return {"plan": None, "unreadable": str(problem)}

    def _plan(self, wanted: PlanBody, values: dict[str, Any], part: str) -> dict[str, Any] | None:
        target = wish(values, self._resolver(), part)
        if not wanted.files:
            return None
        compute = target.compute or device_id(model_management.get_torch_device())
        blocks = self._blocks(wanted, part)
        try:
            plan = self._make(target.request.fitted(compute), blocks, compute)
        except InputError as problem:
            raise RequestError(str(problem), field=speaking(values, part)) from None
        forecast = (self._measured(plan, wanted.files) or plan.forecast) if plan.streamed else None
        return {
            "compute": str(plan.compute),
            "ring": plan.ring_bytes if plan.streamed else 0,
            "step": None if forecast is None else step(forecast),
            "homes": {str(home): count for home, count in plan.bytes_by_home().items()},
            "blocks": plan_rows(plan),
        }

    def _measured(self, plan: Plan, files: Collection[str]) -> Forecast | None:
        """The forecast of a model of these files that is loaded with every block at the home that the plan has for it,
        if its steps were timed.
        """
        for model in self._models():
            timed = model.forecast is not None and model.forecast.simulated is not None
            if timed and model.plan is not None and model.file in files and model.plan.compute == plan.compute:
                homes = {its.block.removeprefix(DIFFUSION_BLOCKS): its.home for its in model.plan.placements}
                if all(homes.get(its.block) == its.home for its in plan.placements):
                    return model.forecast
        return None

    def _make(self, request: Request, blocks: Sequence[Block], compute: DeviceId) -> Plan:
        memory = budgets(self._inventory.devices, needed=())
        links = self._inventory.links()
        memory = [replace(its, bandwidth=links.get((its.device, compute))) for its in memory]
        if any(block.in_file for block in blocks):
            memory.append(disk_budget(blocks))
        elif DISK in request.devices():
            raise InputError("disk is named, but the weights of this model cannot stay in its file; write cpu instead")
        flops = self._inventory.known(compute)
        return make_plan(request, retimed(blocks, REACHED * flops) if flops else blocks, memory, compute)

    def _blocks(self, wanted: PlanBody, part: str) -> tuple[Block, ...]:
        """Raises ModelFileError for a file whose header cannot be read."""
        paths = {name: _path(wanted.folder, name) for name in wanted.files}
        component = None
        if wanted.folder == CHECKPOINTS:
            component = COMPONENTS.get(part) or COMPONENTS.get(wanted.node, "diffusion")
        key = tuple(map(stamp, paths.values())), component
        with self._lock:
            if key not in self._known:
                self._known[key] = self._read(wanted.folder, paths, component)
                self._known = dict([*self._known.items()][-_KEPT:])
            return self._known[key]

    def _read(self, folder: str, paths: dict[str, str], component: str | None) -> tuple[Block, ...]:
        """The blocks of a model; of several text encoders one after the other, as the host makes one model of them."""
        several = len(paths) > 1 and folder in ("text_encoders", "clip")
        blocks: list[Block] = []
        try:
            for files in [[path] for path in paths.values()] if several else [[*paths.values()]]:
                found = describe_model(read_tensors(map(Path, files)), component).blocks
                prefix = f"{Path(files[0]).stem}." if several else ""
                blocks += [replace(its, name=prefix + its.name, order=len(blocks) + (its.order or 0)) for its in found]
        except InputError as problem:  # it is damaged, or a checkpoint without this component
            text = str(problem)
            for name, path in paths.items():
                text = text.replace(path, name)
            raise ModelFileError(text) from None
        safetensors = all(Path(path).suffix.lower() != ".gguf" for path in paths.values())
        diffusion = folder in DIFFUSION or (folder == CHECKPOINTS and component == "diffusion")
        in_file = self._capabilities.dynamic_vram and safetensors and diffusion
        return tuple(replace(block, in_file=in_file, once=self._hoist and block.once) for block in blocks)


def _defaults(node: Any) -> dict[str, Any]:
    """The values of the widgets that were not sent."""
    inputs = node.define_schema().inputs
    return {each.id: each.default for each in inputs if getattr(each, "default", None) is not None}


def _part(wanted: PlanBody, values: dict[str, Any]) -> str:
    there = parts(values)
    if wanted.part is not None and wanted.part not in there:
        raise RequestError(f"{wanted.node} has no part {shown(wanted.part)}; there are {', '.join(map(shown, there))}")
    return there[0] if wanted.part is None else wanted.part


def _path(folder: str, name: str) -> str:
    if folder not in FOLDERS:
        raise RequestError(f"no loader takes models from the folder {shown(folder)}; send one of {', '.join(FOLDERS)}")
    if Path(name).suffix.lower() not in READERS:
        raise ModelFileError(f"{shown(name)} has no header that tells what is in it; only {', '.join(READERS)} have")
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        raise RequestError(f"there is no file {shown(name)} in ComfyUI's model folder {shown(folder)}")
    return str(Path(path))


def _elsewhere(compute: str) -> str | None:
    """The other machine that a compute device is on; None for a device of this one."""
    from ...remote.names import is_remote, parse_remote

    try:
        return parse_remote(compute).node if is_remote(compute) else None
    except InputError as problem:
        raise RequestError(str(problem), field=COMPUTE) from None
