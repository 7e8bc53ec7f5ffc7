"""Snapshots for the clients that listen, over the host's websocket. Nothing runs while nobody listens."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from ...errors import RequestError
from ...telemetry.bodies import ListenBody, shown
from ...telemetry.snapshot import NOISE, Snapshot

log = logging.getLogger("multigpu")

EVENT, FIGURES = "multigpu.snapshot", "multigpu.figures"
PERIOD = 0.5
"""Seconds between two snapshots."""
LASTS = 300.0
"""Seconds after which a client that has not asked again no longer listens."""
AT_ONCE: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Lets a task run at once up to where it waits. Most messages are sent before that, and then nothing is scheduled."""


class Missing(IntEnum):
    """What a client has not been sent yet of the last snapshot, besides figures."""

    NOTHING = 0
    SNAPSHOT = 1
    BLOCKS = 2


class Listeners:
    """Takes one snapshot for all clients, and sends them what has changed. Used on the event loop."""

    def __init__(self, take: Callable[[], Snapshot], sockets: Mapping[str, Any]) -> None:
        """`take` is called on a thread of its own. `sockets` are those of the host's clients, by client id."""
        self._take = take
        self._sockets = sockets
        self._until: dict[str, float] = {}
        self._missing: dict[str, Missing] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.taken = 0
        """Counts the snapshots."""

    @property
    def running(self) -> bool:
        """Whether snapshots are being taken: as long as a client listens."""
        return self._task is not None

    def listen(self, wanted: ListenBody) -> bool:
        """Begin, go on, or stop to send to a client. Returns whether it begins.

        Raises RequestError for a client that is not connected.
        """
        if not wanted.on:
            self._stop(wanted.client)
            return False
        if wanted.client not in self._sockets:
            raise RequestError(f"no client {shown(wanted.client)} is connected to ComfyUI's websocket", status=404)
        begins = wanted.client not in self._until
        if begins:
            self._missing[wanted.client] = Missing.BLOCKS
        self._until[wanted.client] = time.monotonic() + LASTS
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return begins

    def _stop(self, client: str) -> None:
        self._until.pop(client, None)
        self._missing.pop(client, None)

    async def _run(self) -> None:
        try:
            last: Snapshot | None = None
            told = False
            while self._drop_gone():
                try:
                    snapshot = await asyncio.to_thread(self._take)
                except Exception:  # whatever it is, the next one may be possible
                    if not told:
                        log.exception("[MultiGPU] the panel cannot be shown what is in memory; it is tried again")
                    told = True
                    await _pause(PERIOD)
                    continue
                self.taken += 1
                new = _new(snapshot, last)
                figures = last is not None and not new and snapshot.far_from(last, NOISE)
                self._send(snapshot, new, figures)
                if new or figures:
                    last = snapshot
                await _pause(PERIOD)
        finally:
            self._task = None

    def _drop_gone(self) -> bool:
        """Forget the clients that are gone; whether any are left."""
        now = time.monotonic()
        for client, until in [*self._until.items()]:
            if now > until or client not in self._sockets:
                self._stop(client)
        return bool(self._until)

    def _send(self, snapshot: Snapshot, new: Missing, figures: bool) -> None:
        """Send each client what it misses now that there is something `new`, or only the figures.

        Each text is written once for all. A client that has not taken the last message yet is left out.
        """
        self._sending = {client: task for client, task in self._sending.items() if not task.done()}
        texts: dict[Missing, str] = {}
        for client, before in [*self._missing.items()]:
            missing = self._missing[client] = max(before, new)
            socket = self._sockets.get(client)
            if socket is None or client in self._sending or not (missing or figures):
                continue
            if missing not in texts:
                texts[missing] = _text(snapshot, missing)
            self._missing[client] = Missing.NOTHING
            task = asyncio.Task(_sent(socket, texts[missing]), loop=asyncio.get_running_loop(), **AT_ONCE)
            if not task.done():
                self._sending[client] = task


def _new(snapshot: Snapshot, last: Snapshot | None) -> Missing:
    """What clients miss that have been sent the last snapshot."""
    if last is None or snapshot.plans != last.plans:
        return Missing.BLOCKS
    return Missing.SNAPSHOT if snapshot.differs(last) else Missing.NOTHING


def _text(snapshot: Snapshot, missing: Missing) -> str:
    if missing is Missing.NOTHING:
        return _packed(FIGURES, snapshot.figures_to_json())
    return _packed(EVENT, snapshot.to_json(blocks=missing is Missing.BLOCKS))


def _packed(event: str, data: dict[str, Any]) -> str:
    return json.dumps({"type": event, "data": data}, separators=(",", ":"))


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _sent(socket: Any, text: str) -> None:
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):  # it is gone, or being closed
        return
