"""`multigpu worker`: offers the devices of this machine to ComfyUI on others, over Ray (docs/remote.md)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ClusterUnavailable, InputError
from ..plan import SCHEME
from ..remote.cluster import check_ray, start_worker
from ..remote.names import check_node
from ..remote.token import token_file
from ..units import format_bytes
from .terminal import Parser, put

_HEAD = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", re.ASCII)


def run(arguments: Sequence[str]) -> int:
    """Serve until interrupted or until the cluster is gone, which is a `ClusterUnavailable`."""
    own, comfyui_arguments = split(arguments)
    parser = Parser(
        prog="python -m multigpu worker",
        description="Offer the devices of this machine to ComfyUI on other machines. Who has the cluster's token may "
        "run any code here.",
        epilog="What comes after -- is for the command line of ComfyUI.",
    )
    parser.add_argument("--name", required=True, help="this machine's name in workflows, as in ray://NAME/cuda:0")
    parser.add_argument("--head", required=True, metavar="HOST:PORT", help="the head of the Ray cluster")
    parser.add_argument("--head-here", action="store_true", help="start the head here; HOST is this machine's address")
    parser.add_argument("--comfyui", required=True, type=Path, metavar="FOLDER", help="the folder with main.py")
    options = parser.parse_args(own)
    name, comfyui = check_node(options.name), options.comfyui.absolute()
    if _HEAD.fullmatch(options.head) is None:
        raise InputError(f"{options.head!r} is no address of a head; give HOST:PORT, as in 192.168.1.20:6379")
    if not (comfyui / "main.py").is_file():
        raise InputError(f"{comfyui} has no main.py; give the folder of ComfyUI")
    check_ray()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    put(f"{name} is starting ComfyUI in {comfyui}\n")
    worker = start_worker(name, options.head, comfyui, comfyui_arguments, head_here=options.head_here)
    try:
        put(ready(name, options.head, worker.about))
        worker.wait()
    finally:
        worker.close()
    raise ClusterUnavailable(f"{name} has lost the Ray cluster at {options.head}; start its head, then this again")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before `--`, which are ours, and those after it."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def ready(name: str, head: str, about: dict[str, Any]) -> str:
    """What to type on the other machines."""
    rows = "".join(
        f"  {SCHEME}{name}/{each['name']}  {format_bytes(each['total']) if each['total'] else ''}".rstrip() + "\n"
        for each in about["devices"]
    )
    return (
        f"{name} is ready. It offers\n{rows}On the machine with the workflows, start ComfyUI with MULTIGPU_RAY={head}\n"
        f"and this token, which lets whoever has it run code here: {token_file(os.environ)}\n"
        "Ctrl-C ends it.\n"
    )
