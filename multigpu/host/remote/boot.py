"""Starts ComfyUI in this process, without its web server, and the service that answers calls of other machines."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import HostError

PACK = "comfyui_multigpu"
"""The name under which the pack that ComfyUI has loaded is found; this module may be another import of it."""


def boot(comfyui: Path, arguments: Sequence[str]) -> Any:
    """The service of the ComfyUI in that folder, started with these arguments of its command line.

    Raises `HostError` if there is no ComfyUI, or if it does not load this pack.
    """
    if not (comfyui / "main.py").is_file():
        raise HostError(f"{comfyui} is no ComfyUI folder: it has no main.py; give the folder that has it")
    sys.argv[:] = [str(comfyui / "main.py"), *arguments]
    sys.path.insert(0, str(comfyui))
    output = [os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2)]
    redirect_stdout(output[0]).__enter__()  # for good: ComfyUI's log wants files that are never closed
    redirect_stderr(output[1]).__enter__()
    loop, server, _ = _main_of(comfyui).start_comfyui()
    loop.run_until_complete(_startup(server))
    threading.Thread(target=_messages, args=(loop, server), name="multigpu-messages", daemon=True).start()
    pack = sys.modules.get(PACK)
    if pack is None:
        raise HostError(f"the ComfyUI in {comfyui} has not loaded MultiGPU; install it there, and do not switch it off")
    service = importlib.import_module(f"{pack.__package__}.host.remote.service")
    return service.Service(pack.current(), output)


def _main_of(comfyui: Path) -> ModuleType:
    """ComfyUI's `main.py`, by its path: there may be another module of that name."""
    found = importlib.util.spec_from_file_location("comfyui_main", comfyui / "main.py")
    assert found is not None and found.loader is not None
    main = importlib.util.module_from_spec(found)
    found.loader.exec_module(main)
    return main


async def _startup(server: Any) -> None:
    """What packs have asked for when the web server starts, such as nodes for those of other packs."""
    for each in [*server.app.on_startup]:
        await each(server.app)


def _messages(loop: asyncio.AbstractEventLoop, server: Any) -> None:
    """The messages for web clients, of which there are none, are taken from their queue, which would grow for ever."""
    asyncio.set_event_loop(loop)
    loop.run_until_complete(server.publish_loop())
