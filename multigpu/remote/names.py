"""The names of devices on other machines: `ray://node-b/cuda:0` is the device `cuda:0` of the node `node-b`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import AllocationError
from ..plan import SCHEME, DeviceId

EXAMPLE = f"{SCHEME}node-b/cuda:0"
DEFAULT = "default"
_NODE = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A device of another machine; None as the device is the one that ComfyUI chooses there. `str()` gives its name."""

    node: str
    device: DeviceId | None

    def __str__(self) -> str:
        return f"{SCHEME}{self.node}/{self.there}"

    @property
    def there(self) -> str:
        """The device as it is named on its own machine."""
        return DEFAULT if self.device is None else str(self.device)


def is_remote(text: str) -> bool:
    """Whether a text names a device of another machine, rightly or not."""
    return text.strip().lower().startswith(SCHEME)


def parse_remote(text: str) -> RemoteDevice:
    """Read `ray://node-b/cuda:0` or `ray://node-b/default`. Raises `AllocationError` with an example that works."""
    if not is_remote(text):
        raise AllocationError(f"{text!r} is no device of another machine; write {EXAMPLE}")
    node, slash, device = text.strip().lower()[len(SCHEME) :].partition("/")
    check_node(node, text)
    if not slash or not device.strip():
        raise AllocationError(f"{text!r} names no device; write {SCHEME}{node}/cuda:0, or {SCHEME}{node}/{DEFAULT}")
    if device.strip() == DEFAULT:
        return RemoteDevice(node, None)
    try:
        named = DeviceId.parse(device)
    except AllocationError as problem:
        raise AllocationError(f"in {text!r}: {problem}") from None
    if named.is_disk:
        raise AllocationError(f"{text!r} is a model file, on which nothing computes; write {EXAMPLE}")
    return RemoteDevice(node, named)


def check_node(node: str, text: str | None = None) -> str:
    """The name of a node, if it can be one. Raises `AllocationError`; `text` is what the user typed it in."""
    if _NODE.fullmatch(node) is None:
        raise AllocationError(
            f"{text or node!r} names no node: {node!r} is not made of 1 to 63 letters a-z, digits, dots, dashes and "
            f"underscores, with a letter or digit at both ends; write for example {EXAMPLE}"
        )
    return node
