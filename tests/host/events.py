"""What ComfyUI tells a frontend over its websocket while a prompt runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from devtools.client import Client, Workflow

CLIENT = "multigpu-events"
LAST = {"execution_success", "execution_error", "execution_interrupted"}


@dataclass(frozen=True)
class Event:
    kind: str
    data: dict[str, Any]


def run_and_listen(client: Client, workflow: Workflow, timeout: float = 120.0) -> list[Event]:
    """Run a prompt; every event of it, in order. The last one says how it ended."""
    return asyncio.run(asyncio.wait_for(_listen(client.address, workflow), timeout))


def bar(events: list[Event], node: str) -> list[tuple[int, int]]:
    """The values and the maximum that a node's progress bar was given."""
    shown = [event.data for event in events if event.kind == "progress"]
    return [(data["value"], data["max"]) for data in shown if data["node"] == node]


async def _listen(address: str, workflow: Workflow) -> list[Event]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws?clientId={CLIENT}") as socket:
        async with session.post(f"{address}/prompt", json={"prompt": workflow, "client_id": CLIENT}) as answer:
            prompt = (await answer.json())["prompt_id"]
        events: list[Event] = []
        async for message in socket:
            told = json.loads(message.data) if message.type is aiohttp.WSMsgType.TEXT else {"data": {}}
            if told["data"].get("prompt_id") == prompt:
                events.append(Event(told["type"], told["data"]))
                if told["type"] in LAST:
                    return events
    raise AssertionError(f"ComfyUI closed the connection after {events}")
