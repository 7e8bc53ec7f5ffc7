"""What is sent to another machine, and the calls that send it. Says nothing of how it gets there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """A description and the bytes that it describes. Both are data: nothing in them is run by the receiver."""

    header: bytes
    buffers: Sequence[Buffer] = ()

    @property
    def size(self) -> int:
        """Bytes that it takes to send it."""
        return len(self.header) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


class Link(Protocol):
    """Calls to the service of one node. Several threads may call at the same time."""

    @property
    def node(self) -> str:
        """The node's name, such as `node-b`."""
        ...

    def call(self, method: str, message: Message, *, timeout: float | None = None) -> Message:
        """The service's answer; its buffers are the caller's own, and writable.

        Raises `RemoteDeviceLost` when the node is gone or has not answered within `timeout` seconds (None: as long as
        it lives), `RemoteError` with the service's own words when it failed there.
        """
        ...

    def interrupt(self) -> None:
        """Ask the service to stop what it is computing. Returns at once; the calls under way then fail or end."""
        ...

    def close(self) -> None:
        """Let go of the node: calls under way and later ones fail. The worker itself goes on."""
        ...
