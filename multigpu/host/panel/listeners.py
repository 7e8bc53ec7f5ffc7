"""Snapshots for the clients that listen, over the host's websocket. Nothing runs while nobody listens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import RequestError
from ...telemetry.bodies import ListenBody, shown
from ...telemetry.snapshot import Snapshot

EVENT = "multigpu.snapshot"
PERIOD = 0.5
"""Seconds between two snapshots."""
LASTS = 30.0
"""Seconds after which a client that has not asked again no longer listens."""


class Listeners:
    """Takes one snapshot for all clients, and sends it to them if something has changed. Used on the event loop."""

    def __init__(self, take: Callable[[], Snapshot], sockets: Mapping[str, Any]) -> None:
        """`take` is called on a thread of its own. `sockets` are those of the host's clients, by client id."""
        self._take = take
        self._sockets = sockets
        self._until: dict[str, float] = {}
        self._new: set[str] = set()
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.taken = 0
        """Counts the snapshots."""

    @property
    def running(self) -> bool:
        """Whether snapshots are being taken: as long as a client listens."""
        return self._task is not None

    def listen(self, wanted: ListenBody) -> None:
        """Begin, go on, or stop to send to a client. Raises RequestError for a client that is not connected."""
        if not wanted.on:
            self._stop(wanted.client)
            return
        if wanted.client not in self._sockets:
            raise RequestError(f"no client {shown(wanted.client)} is connected to ComfyUI's websocket", status=404)
        if wanted.client not in self._until:
            self._new.add(wanted.client)
        self._until[wanted.client] = time.monotonic() + LASTS
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _stop(self, client: str) -> None:
        self._until.pop(client, None)
        self._new.discard(client)

    async def _run(self) -> None:
        try:
            last: Snapshot | None = None
            while self._drop_gone():
                snapshot = await asyncio.to_thread(self._take)
                self.taken += 1
                changed = last is None or snapshot.differs(last)
                if changed:
                    last = snapshot
                self._send(snapshot, [*self._until] if changed else [*self._new])
                self._new.clear()
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

    def _send(self, snapshot: Snapshot, clients: list[str]) -> None:
        """Written once for all. A client that has not taken the last one yet is left out."""
        if not clients:
            return
        text = json.dumps({"type": EVENT, "data": snapshot.to_json()})
        self._sending = {client: task for client, task in self._sending.items() if not task.done()}
        for client in clients:
            socket = self._sockets.get(client)
            if socket is not None and client not in self._sending:
                self._sending[client] = asyncio.get_running_loop().create_task(_sent(socket, text))


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _sent(socket: Any, text: str) -> None:
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):  # it is gone, or being closed
        return
