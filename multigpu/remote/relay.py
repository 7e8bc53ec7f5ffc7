"""The process that talks to Ray for another one, over a pipe.

Ray ends a process that has lost its cluster's head, takes over signals, and starts threads. None of this may happen to
ComfyUI, so it happens here, in a child of it. When one of the two dies, the other notices that the pipe is closed.

Each request is answered with the same number. Requests say what to `do`:

| do | and | answer |
|---|---|---|
| start | `head`, `own` address, `head_here`; of a worker `name` and `made` | when connected |
| nodes | | `nodes`: name, state, devices |
| call | `node`, `method`, parts | the service's parts |
| ping | `node` | when it has answered |
| interrupt | `node` | none |

A failed request is answered with `unavailable`, `lost` or `failed`: the problem in words.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

from ..errors import ClusterUnavailable
from . import frames
from .facts import ray_mismatch
from .node import RUN, RayNode
from .worker import NAMESPACE, RESOURCE, create

AT_ONCE = 64
"""How many requests can wait for an answer at the same time."""

PROBE_SECONDS = 3.0
ASK_SECONDS = 0.5
"""How often a long call looks whether its node still lives."""

HEAD_SECONDS = 2.0
"""The head is lost when nobody has listened at its address for so long. Ray itself waits longer."""

DESCRIBE_SECONDS = 2.0
"""How long a node may take to describe itself; until then it is said to be starting."""

Sending = tuple[dict[str, Any], list[Any]]

OPEN = "open"
"""The argument of a process that asks a head without a token."""
TAKEN, REFUSED = 10, 11
"""Its exit codes: the head has answered, or not. With any other, what listens there is no head."""


def main() -> None:
    """Serve requests until the pipe ends, then end everything that was started here."""
    if sys.argv[1:2] == [OPEN]:
        sys.exit(ask_without_token(sys.argv[2]))
    incoming, outgoing = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what Ray prints goes to the log, not into the pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    relay = Relay(frames.Writer(outgoing), Path(sys.argv[1]))
    with suppress(KeyboardInterrupt):
        while (frame := frames.read(incoming)) is not None:
            relay.take(*frame)
    relay.stop()
    os._exit(0)  # calls may still be waiting in threads, and Ray's own end could wait for the head


class Relay:
    """The requests of one parent."""

    def __init__(self, answers: frames.Writer, folder: Path) -> None:
        """The folder is deleted at the end."""
        self._answers = answers
        self._folder = folder
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._node: RayNode | None = None
        self._own = ""
        """The id of that node. Workers drop what was made for it when it has ended."""
        self._actors: dict[str, Any] = {}
        self._worker: Any = None
        """The actor of the worker that was started here; it lives as long as this reference."""

    def take(self, number: int, about: dict[str, Any], parts: list[memoryview]) -> None:
        """Answer in another thread. An interrupt is passed on at once, and not answered."""
        if about["do"] == "interrupt":
            with suppress(Exception):  # the call that it concerns says what is wrong
                self._actor(about["node"]).interrupt.remote()
        else:
            self._threads.submit(self._answer, number, about, parts)

    def stop(self) -> None:
        if self._node is not None:
            self._node.stop()
        shutil.rmtree(self._folder, ignore_errors=True)  # there may be no node yet that would delete it

    def _end_with(self, node: RayNode) -> None:
        """Without its node this process could only wait."""
        node.wait()
        os._exit(1)

    def _end_with_head(self, head: str) -> None:
        """The same when the head is lost. A connection to it, over which nothing is said, ends when it does."""
        host, _, port = head.rpartition(":")
        end = time.monotonic() + HEAD_SECONDS
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), HEAD_SECONDS) as listening:
                end = _wait_for_close(listening) + HEAD_SECONDS
            time.sleep(0.1)
        sys.stderr.write(f"the head at {head} no longer answers\n")
        self.stop()
        os._exit(1)

    def _answer(self, number: int, about: dict[str, Any], parts: list[memoryview]) -> None:
        doing: dict[str, Callable[..., Sending]] = {
            "start": self._start, "nodes": self._nodes, "call": self._call, "ping": self._ping
        }  # fmt: skip
        do = doing[about.pop("do")]
        try:
            answer, sent = do(parts=parts, **about)
        except ClusterUnavailable as error:
            answer, sent = {"unavailable": str(error)}, []
        except Exception as error:  # noqa: BLE001  Ray raises errors of many kinds, and not only its own
            answer, sent = {"lost": str(error) if isinstance(error, ConnectionError) else _first_line(error)}, []
        with suppress(OSError, ValueError):  # the parent is gone, and so is soon this process
            self._answers.write(number, answer, sent)

    def _start(self, head: str, own: str, head_here: bool, name: str, made: list[Any],
               parts: list[memoryview]) -> Sending:  # fmt: skip
        if not head_here:
            check_head(head)
        resources = json.dumps({RESOURCE + name: 1} if name else {})
        new = ["--head", f"--port={head.rpartition(':')[2]}", "--include-dashboard=false"]
        options = new if head_here else [f"--address={head}"]
        self._node = RayNode(self._folder, [*options, f"--node-ip-address={own}", f"--resources={resources}"])
        threading.Thread(target=self._end_with, args=(self._node,), daemon=True).start()
        import ray

        ray.init(address=head, _node_ip_address=own, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self._own = ray.get_runtime_context().get_node_id()
        threading.Thread(target=self._end_with_head, args=(head,), daemon=True).start()
        if name:
            self._worker, about = create(name, *made)
            return about, []
        return {}, []

    def _nodes(self, parts: list[memoryview]) -> Sending:
        import ray

        alive: dict[str, bool] = {}
        for node in ray.nodes():  # one that was started again is there twice
            if (name := _name(node)) is not None:
                alive[name] = alive.get(name, False) or node["Alive"]
        asked = {}
        for name in filter(alive.get, alive):
            with suppress(ConnectionError):  # its actor is not there yet
                asked[name] = self._actor(name).describe.remote()
        if asked:
            ray.wait([*asked.values()], num_returns=len(asked), timeout=DESCRIBE_SECONDS)
        return {"nodes": [self._described(name, alive[name], asked.get(name)) for name in sorted(alive)]}, []

    def _described(self, name: str, alive: bool, asked: Any) -> dict[str, Any]:
        import ray

        about = {"name": name, "state": "starting" if alive else "lost"}
        try:
            return {**about, **ray.get(asked, timeout=0), "state": "ready"} if asked is not None else about
        except ray.exceptions.RayActorError:
            self._actors.pop(name, None)
        except ray.exceptions.GetTimeoutError:
            pass
        return about

    def _call(self, node: str, method: str, parts: list[memoryview]) -> Sending:
        import ray

        called = self._actor(node).serve.remote(self._own, method, [PickleBuffer(part) for part in parts])
        while not ray.wait([called], timeout=ASK_SECONDS)[0]:
            if not any(_name(each) == node and each["Alive"] for each in ray.nodes()):
                self._actors.pop(node, None)
                raise ConnectionError("its machine has left the cluster")
        try:
            failed, *answer = ray.get(called)
        except ray.exceptions.RayActorError:
            self._actors.pop(node, None)  # a worker that is started again has another actor
            raise ConnectionError("the process of its worker has died") from None
        return ({"failed": failed} if failed else {}), [memoryview(part).cast("B") for part in answer]

    def _ping(self, node: str, parts: list[memoryview]) -> Sending:
        import ray

        ray.get(self._actor(node).ping.remote())
        return {}, []

    def _actor(self, name: str) -> Any:
        import ray

        if name in self._actors:
            return self._actors[name]
        try:
            actor = ray.get_actor(RESOURCE + name)
        except ValueError:
            raise ConnectionError("the cluster has no worker of that name") from None
        return self._actors.setdefault(name, actor)


def check_head(head: str) -> None:
    """Raise `ClusterUnavailable` unless this cluster asks for a token, ours is the right one, and Ray can join it.

    The first is found out by another process, which has none: Ray reads its token once per process. It also ends a
    process that asks something other than a head.
    """
    command = [sys.executable, "-c", RUN.format(module="relay"), OPEN, head]
    asking = subprocess.Popen(command, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdin=subprocess.DEVNULL)
    import ray

    ended = asking.wait()
    if ended not in (TAKEN, REFUSED):
        raise ClusterUnavailable(f"what answers at {head} is not a Ray head; give the address and port of one")
    try:
        told = ask(head)
    except ray.exceptions.AuthenticationError:
        raise ClusterUnavailable(
            f"the Ray cluster at {head} has another token than {os.environ['RAY_AUTH_TOKEN_PATH']}; copy that file "
            "from the machine that runs the head"
        ) from None
    except ray.exceptions.RayError as error:
        raise ClusterUnavailable(f"the Ray head at {head} does not answer: {_first_line(error)}") from None
    if ended == TAKEN:
        raise ClusterUnavailable(
            f"the Ray cluster at {head} asks for no token, so that whoever reaches it could run code on its machines; "
            "start its head with `python -m multigpu worker --head-here`, or with RAY_AUTH_MODE=token"
        )
    if told:
        theirs, ours = {"Ray": told["ray_version"], "Python": told["python_version"]}, platform.python_version()
        if problem := ray_mismatch(theirs, {"Ray": ray.__version__, "Python": ours}):
            raise ClusterUnavailable(f"the Ray cluster at {head} cannot be joined: {problem}")


def ask(head: str) -> dict[str, Any]:
    """What the head tells of its cluster; nothing if it has just started.

    Raises one of Ray's errors when it does not answer.
    """
    from ray._raylet import GcsClient

    told = GcsClient(address=head).internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=PROBE_SECONDS)
    return dict(json.loads(told)) if told else {}


def ask_without_token(head: str) -> int:
    """What the head does with a question of somebody who has no token. May end this process instead."""
    import ray

    try:
        ask(head)
    except ray.exceptions.RayError:
        return REFUSED
    return TAKEN


def _wait_for_close(connection: socket.socket) -> float:
    """Returns the time when the other side has closed a connection, or its machine has fallen silent."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}.items():
        if hasattr(socket, name):  # seconds; where they cannot be chosen, the system's hours apply
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with suppress(OSError):
        while connection.recv(4096):
            continue
    return time.monotonic()


def _name(node: dict[str, Any]) -> str | None:
    """The name of a worker's node; None for a node of another kind. A lost node has no resources, but its label."""
    return next((key.removeprefix(RESOURCE) for key in node["Resources"] if key.startswith(RESOURCE)), None)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
