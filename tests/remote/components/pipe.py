"""A second real ComfyUI in a process of its own, with calls over a socket of this machine: a `Link` without Ray."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch

from devtools.places import Places
from multigpu.remote.codec import unpack
from multigpu.remote.link import Message


def loaded(module: str) -> Any:
    """A module of the pack that this process's ComfyUI has loaded, which is another import than that of the tests."""
    return importlib.import_module(f"{sys.modules['comfyui_multigpu'].__package__}.{module}")


def send(connection: Connection, head: dict[str, Any], message: Message) -> None:
    connection.send_bytes(json.dumps({**head, "count": len(message.buffers)}).encode())
    connection.send_bytes(message.header)
    for buffer in message.buffers:
        connection.send_bytes(buffer)


def receive(connection: Connection) -> tuple[dict[str, Any], Message]:
    head = json.loads(connection.recv_bytes())
    header = connection.recv_bytes()
    return head, Message(header, [connection.recv_bytes() for _ in range(head["count"])])


class Call(NamedTuple):
    """A method, and the bytes of what was sent and of what came back."""

    method: str
    there: int
    back: int
    beside_tensors: int
    """Those that are not a tensor's, in the larger of the two messages."""


def beside_tensors(message: Message) -> int:
    return message.size - tensor_bytes(unpack(message))


def tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return tensor_bytes([*value.values()])
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


class PipeLink:
    """A `Link` to a worker process. `calls` is everything that was sent and came back."""

    def __init__(self, node: str, worker: PipeWorker, check: Callable[[], object]) -> None:
        """`check` is called while a call waits; when it raises, the worker is told to stop and the call raises that."""
        self.node = node
        self.check = check
        self.worker = worker
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        with self._lock:
            try:
                send(self.worker.calls, {"method": method}, message)
                interrupted = self._wait()
                head, answer = receive(self.worker.calls)
            except (OSError, EOFError) as gone:
                raise loaded("errors").RemoteDeviceLost(
                    self.node, method, f"its process has ended ({gone!r})"
                ) from None
        if interrupted is not None:
            raise interrupted
        if "problem" in head:
            raise loaded("errors").RemoteError(f"ray://{self.node}, {method}: {head['problem']}")
        beside = max(map(beside_tensors, (message, answer)))
        self.calls.append(Call(method, message.size, answer.size, beside))
        return answer

    def _wait(self) -> BaseException | None:
        """Until there is an answer. Returns what `check` has raised."""
        while not self.worker.calls.poll(0.02):
            try:
                self.check()
            except BaseException as interrupted:  # noqa: BLE001  given back
                self.interrupt()
                return interrupted
        return None

    def computes(self) -> bool:
        """Whether a call is under way."""
        return self._lock.locked()

    def interrupt(self) -> None:
        send(self.worker.control, {}, Message(b""))

    def close(self) -> None:
        pass


class PipeWorker:
    """The process. Ends when it is closed, or when this process ends."""

    def __init__(self, folder: Path, tree: Path, arguments: Sequence[str], simulated: str = "") -> None:
        """With `simulated` it has such devices: see `SIMDEV` in docs/simulated-devices.md."""
        self.log = folder / "worker.log"
        (self.calls, theirs), (self.control, other) = Pipe(), Pipe()
        ends = (theirs.fileno(), other.fileno())
        command = [sys.executable, "-m", "tests.remote.components.pipe", *map(str, ends), str(tree), *arguments]
        environment = {**os.environ, "SIMDEV": simulated}
        with self.log.open("wb") as log, theirs, other:
            self.process = subprocess.Popen(
                command, cwd=Places.here().root, stdout=log, stderr=log, pass_fds=ends, env=environment
            )

    def close(self) -> None:
        self.calls.close()
        self.control.close()
        self.process.kill()
        self.process.wait()


def serve(calls: Connection, control: Connection, tree: Path, arguments: list[str]) -> None:
    if os.environ["SIMDEV"]:
        from tests.sim import simdev

        simdev.install_from_text(os.environ["SIMDEV"])
    from multigpu.host.remote.boot import boot

    service = boot(tree, arguments)

    def listen() -> None:
        while True:
            receive(control)
            service.interrupt()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            head, message = receive(calls)
        except (OSError, EOFError):
            return
        try:
            answer = service.serve(head["method"], message)
        except Exception as problem:  # noqa: BLE001  whatever it is, the other process is told
            send(calls, {"problem": f"{type(problem).__name__}: {problem}"}, Message(b""))
        else:
            send(calls, {}, answer)


if __name__ == "__main__":
    serve(*(Connection(int(end)) for end in sys.argv[1:3]), Path(sys.argv[3]), sys.argv[4:])
