"""`multigpu plan`: shows how a model's weights would be spread over devices. Reads headers only and moves nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..devices.names import device_here, is_default
from ..errors import InputError
from ..files import Model, describe_model, read_tensors
from ..files.families import COMPONENTS
from ..files.model_file import READERS
from ..files.untrusted import shown
from ..plan import (
    DISK,
    Auto,
    Block,
    DeviceBudget,
    DeviceId,
    Plan,
    Request,
    VirtualVram,
    disk_budget,
    explain,
    format_request,
    make_plan,
    parse_devices,
    parse_request,
    read_gib,
)
from ..settings import Settings
from .machine import machine_budgets
from .terminal import Parser, complain, one_line, put

_DEVICE = re.compile(
    r"(?P<device>(?P<disk>disk)|[^=@/]+)(?(disk)|=(?P<free>[^=@/]+)(?:/(?P<total>[^=@/]+))?)(?:@(?P<speed>[0-9.]+))?"
)
_EXAMPLE = "cuda:0=24g@53,cuda:1=12g@12,cpu=64g@25"
_STEP_SECONDS = (1e-6, 1e6)
_LINK_SPEEDS = (1e-3, 1e6)
"""GB/s. No real value is outside these two ranges, and the simulator's sums would become inaccurate there."""


def run(arguments: Sequence[str]) -> int:
    """Print the plan; every wrong input is raised as `InputError`."""
    options = parser().parse_intermixed_args(arguments)
    files, text = split_words(options.words)
    request = read_request(options, text)
    model = describe_model(read_tensors(files), options.component, options.step_seconds)
    hoist = Settings.from_environment(os.environ).hoist
    blocks = (replace(block, once=hoist and block.once) for block in resting_in(files, model.blocks))
    model = replace(model, blocks=tuple(blocks))
    budgets = parse_budgets(options.devices) if options.devices else [*machine_budgets(_note), disk_budget(())]
    budgets = with_disk(budgets, model.blocks, request)
    here = [budget.device for budget in budgets]
    request = request.renamed(lambda named: device_here(named, here) or named)
    compute = _compute_device(options.compute, request, here)
    ring = read_gib(options.ring) if options.ring else None
    plan = make_plan(request, model.blocks, budgets, compute, ring_bytes=ring)
    if options.json:
        put(json.dumps(_as_data(files, request, model, plan), indent=1) + "\n")
    elif options.block:
        put(f"{one_line(explain.block_reason(plan, options.block))}\n")
    else:
        put(_as_text(files, request, model, plan, options.step_seconds))
    return 0


def parser() -> Parser:
    """The command line of `multigpu plan`."""
    it = Parser(
        "python -m multigpu plan",
        usage="%(prog)s FILE [FILE ...] [ALLOCATION | --virtual-vram GB --donor DEVICE | --auto] [options]",
        description="Show how a model's weights would be spread over devices. Reads only the headers of its files.",
        allow_abbrev=False,
    )
    it.add_argument(
        "words",
        nargs="+",
        metavar="FILE, ALLOCATION",
        help="a .safetensors or .gguf file, an index of shards (.json), or all shards of one model; then, if wanted, "
        "an allocation such as 'cuda:0,8gb;cpu,*'",
    )
    it.add_argument(
        "--devices",
        help=f"free memory and link speed in GB/s of each device, as in {_EXAMPLE}; disk@2 adds the model file",
    )
    it.add_argument("--compute", help="the compute device, as in cuda:1 or gpu:1 (default: the first accelerator)")
    it.add_argument(
        "--virtual-vram", metavar="GB", help="how much of the model leaves the compute device, as in 8 (GiB) or 512mb"
    )
    it.add_argument(
        "--donor", action="append", metavar="DEVICE", help="the device that takes it (default: cpu); may be repeated"
    )
    it.add_argument("--auto", action="store_true", help="let the planner decide (the default)")
    it.add_argument(
        "--component", choices=list(COMPONENTS), help="which model of a checkpoint to plan (default: diffusion)"
    )
    it.add_argument(
        "--step-seconds", type=_seconds, metavar="S", help="measured time of a step with all blocks resident"
    )
    it.add_argument("--ring", metavar="SIZE", help="staging memory on the compute device, as in 512mb")
    it.add_argument("--block", metavar="NAME", help="print only on which device this block rests, and why")
    it.add_argument("--json", action="store_true", help="print the plan as JSON")
    return it


def _seconds(text: str) -> float:
    value = _number(text)
    if not _STEP_SECONDS[0] <= value <= _STEP_SECONDS[1]:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not the time of a step; give seconds from {_range(_STEP_SECONDS)}, as in 0.2"
        )
    return value


def _range(bounds: tuple[float, float]) -> str:
    return " to ".join(f"{bound:.6f}".rstrip("0").rstrip(".") for bound in bounds)


def _number(text: str) -> float:
    """NaN, which lies in no range, for what is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def split_words(words: Sequence[str]) -> tuple[list[Path], str | None]:
    """Tell files from the allocation: what has a model's suffix or exists is a file."""
    suffixes = (*READERS, ".json")
    files: list[str] = []
    others: list[str] = []
    for word in words:
        is_file = word.lower().endswith(suffixes) or os.path.exists(word)
        (files if is_file else others).append(word)
    if len(others) > 1:
        raise InputError(
            f"{' and '.join(map(shown, others[:3]))} are not model files; give files and at most one allocation"
        )
    if not files:
        raise InputError(
            f"{shown(others[0])} is not a model file; give a .safetensors or .gguf file, or an index (.json)"
        )
    return [Path(word) for word in files], others[0] if others else None


def read_request(options: argparse.Namespace, text: str | None) -> Request:
    """The one request among allocation, virtual VRAM and auto."""
    given = [text is not None, options.virtual_vram is not None, options.auto]
    if sum(given) > 1:
        raise InputError("an allocation, --virtual-vram and --auto exclude each other; give one")
    if options.donor and options.virtual_vram is None:
        raise InputError("--donor goes with --virtual-vram; for example --virtual-vram 8 --donor cpu")
    if text is not None:
        return parse_request(text)
    if options.virtual_vram is not None:
        return VirtualVram(read_gib(options.virtual_vram), parse_devices(",".join(options.donor or ["cpu"])))
    return Auto()


def parse_budgets(text: str) -> list[DeviceBudget]:
    """Read `cuda:0=22g/24g@53,cpu=64g,disk@2`: free memory, total if it differs, GB/s (powers of ten) if known.

    The budget of disk is empty: `with_disk` fills it.
    """
    budgets = []
    for piece in text.split(","):
        match = _DEVICE.fullmatch(piece.strip())
        if match is None:
            raise InputError(f"{shown(piece.strip())} is not a device's budget; for example --devices {_EXAMPLE}")
        free = 0 if match["disk"] else read_gib(match["free"])
        total = read_gib(match["total"]) if match["total"] else free
        speed = _number(match["speed"]) if match["speed"] else None
        if speed is not None and not _LINK_SPEEDS[0] <= speed <= _LINK_SPEEDS[1]:
            raise InputError(
                f"{shown(match['speed'])} is not the speed of a link; give GB/s from {_range(_LINK_SPEEDS)}, as in @25"
            )
        bandwidth = None if speed is None else speed * 1e9
        budgets.append(DeviceBudget(DeviceId.parse(match["device"]), total, free, bandwidth))
    return budgets


def resting_in(files: Iterable[Path], blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks of these files; those of GGUF cannot rest in their file, because that is not how they are used."""
    in_file = all(path.suffix.lower() != ".gguf" for path in files)
    return tuple(replace(block, in_file=in_file) for block in blocks)


def with_disk(budgets: Iterable[DeviceBudget], blocks: Sequence[Block], request: Request) -> list[DeviceBudget]:
    """The budgets, with that of disk, if there is one, for these blocks; without it if none of them can rest there."""
    in_file = any(block.in_file for block in blocks)
    if not in_file and DISK in request.devices():
        raise InputError("disk is named, but the weights of a GGUF file cannot rest in it; write cpu instead")
    filled = (disk_budget(blocks, its.bandwidth) if its.device.is_disk else its for its in budgets)
    return [budget for budget in filled if in_file or not budget.device.is_disk]


def _compute_device(text: str | None, request: Request, here: Sequence[DeviceId]) -> DeviceId:
    if text and not is_default(text):
        named = DeviceId.parse(text)
        return device_here(named, here) or named
    if request.compute is not None:
        return request.compute
    return next((device for device in here if not device.is_cpu and not device.is_disk), here[0])


def _as_text(files: Sequence[Path], request: Request, model: Model, plan: Plan, step_seconds: float | None) -> str:
    component = f", its {model.component} model" if model.component else ""
    kind = f"a {model.family} model" if model.family != "unknown" else "a model of an unknown family"
    names = one_line(", ".join(path.name for path in files))
    title = f"{names}: {kind}{component}; request {format_request(request)}\n"
    timing = "" if step_seconds else "Times are rough estimates; give a measured step time with --step-seconds.\n"
    return f"{title}\n{explain.table(plan)}\n{timing if plan.streamed else ''}"


def _as_data(files: Sequence[Path], request: Request, model: Model, plan: Plan) -> dict[str, object]:
    return {
        "files": [str(path) for path in files],
        "family": model.family,
        "component": model.component,
        "request": format_request(request),
        "plan": plan.to_json(),
    }


def _note(sentence: str) -> None:
    complain("multigpu plan", sentence)
