"""What tests ask of the simulated machine and set on it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

HOST = -1


class Copy(NamedTuple):
    """One counted copy. `src` and `dst` are device names; `bytes` is what crossed the link."""

    src: str
    dst: str
    bytes: int
    stream: int
    non_blocking: bool


class World:
    """The simulated machine of this process: devices named `kind:0`, `kind:1`, ... (or `mps`) and the host, `cpu`.

    Sizes are bytes, times virtual seconds, rates per second. A device is given by name, `torch.device` or number.
    """

    def __init__(self, native: types.ModuleType, kind: str, capacities: Sequence[int]) -> None:
        self.native: Any = native
        self.kind = kind
        self._capacities = list(capacities)
        self.reset()

    def device(self, index: int) -> str:
        """The name of device `index`, for tests that run for every kind."""
        return self._name(self._number(index))

    @property
    def devices(self) -> list[str]:
        return [self._name(index) for index in range(len(self._capacities))]

    # ------------------------------------------------------------ memory
    def allocated(self, device: str | int | torch.device) -> int:
        return int(self._memory(device)["allocated"])

    def peak(self, device: str | int | torch.device) -> int:
        """The most bytes allocated at once since the last reset (or `reset_peak_memory_stats`)."""
        return int(self._memory(device)["peak"])

    def reserved(self, device: str | int | torch.device) -> int:
        return int(self._memory(device)["reserved"])

    def limit(self, device: str | int | torch.device, capacity: int) -> None:
        """Set the device's memory. What is allocated stays, even beyond the new limit."""
        self.native.set_capacity(self._number(device), int(capacity))

    def occupy(self, device: str | int | torch.device, size: int) -> None:
        """Let another process hold `size` bytes of the device."""
        self.native.set_foreign(self._number(device), int(size))

    def has_context(self, device: str | int | torch.device) -> bool:
        """Whether this process has used the device, or asked how much of it is free, since the last reset."""
        return bool(self.native.has_context(self._number(device)))

    def pinned_bytes(self) -> int:
        """Host bytes that are page-locked now: pinned tensors (rounded up to powers of two) and registered ranges."""
        return int(self.native.pinned_bytes())

    def register_host(self, tensor: torch.Tensor) -> int:
        """Pin the bytes of a CPU tensor where they are; 0 or CUDA's error number. `cudaHostRegister` comes here too."""
        return int(self.native.register_host(tensor.data_ptr(), tensor.nbytes))

    def unregister_host(self, tensor: torch.Tensor) -> int:
        return int(self.native.unregister_host(tensor.data_ptr()))

    # ------------------------------------------------------------ links
    def moved(self, src: str | int | torch.device, dst: str | int | torch.device) -> int:
        """Bytes copied from `src` to `dst` since the last reset; either may be "cpu"."""
        return self._link(src, dst)[0]

    def copies(self, src: str | int | torch.device, dst: str | int | torch.device) -> int:
        """Number of copies from `src` to `dst` since the last reset."""
        return self._link(src, dst)[1]

    def links(self) -> dict[tuple[str, str], int]:
        """Bytes per link, for the links that were used."""
        used = self.native.links()
        return {(self._name(a), self._name(b)): size for (a, b), (size, count) in used.items() if count}

    def copy_log(self) -> list[Copy]:
        """Every counted copy in the order of issue."""
        return [Copy(self._name(a), self._name(b), *rest) for a, b, *rest in self.native.copy_log()]

    def peer_access(self, a: str | int | torch.device, b: str | int | torch.device, allowed: bool) -> None:
        """Allow or forbid direct access between two devices, in both directions."""
        for src, dst in ((a, b), (b, a)):
            self.native.set_peer(self._number(src), self._number(dst), allowed)

    # ------------------------------------------------------------ virtual time
    def set_bandwidth(
        self,
        src: str | int | torch.device,
        dst: str | int | torch.device,
        bytes_per_s: float,
        pageable: float | None = None,
    ) -> None:
        """Bandwidth of the link from `src` to `dst`; `pageable` for copies whose host side is not pinned."""
        numbers = self._number(src, host=True), self._number(dst, host=True)
        self.native.set_bandwidth(*numbers, bytes_per_s, pageable or bytes_per_s)

    def set_compute_rate(
        self,
        device: str | int | torch.device,
        *,
        flops: float | None = None,
        bytes_per_s: float | None = None,
        per_op: float = 0.0,
    ) -> None:
        """An operation takes `per_op` seconds plus the longer of its bytes and its floating point operations.

        Matrix products, convolutions and attention count floating point operations; a rate of None costs nothing.
        """
        self.native.set_compute_rate(self._number(device), flops or 0.0, bytes_per_s or 0.0, per_op)

    def clock(self) -> float:
        """Virtual seconds that the host has seen pass: what it synchronised with, or spent in blocking copies."""
        return float(self.native.host_time())

    # ------------------------------------------------------------ races and lateness
    def races(self) -> list[Any]:
        """Races seen since the last reset: objects with kind, op, other_op, device, lo, hi, stream, other_stream."""
        return list(self.native.races())

    def take_races(self) -> list[Any]:
        """The races, which are then forgotten: for tests that expect them."""
        found = self.races()
        self.native.clear_races()
        return found

    def strict(self, on: bool) -> None:
        """Raise RuntimeError in the operation that races, besides noting it."""
        self.native.set_strict(on)

    def late(self, on: bool) -> None:
        """True (the default): a queued copy runs when something waits for it. False: at once."""
        self.native.set_late(on)

    def track(self, on: bool) -> None:
        """Turn the race tracker off to save time, or on again."""
        self.native.set_track(on)

    def operations(self) -> dict[str, int]:
        """How often each operator ran on a device since the last reset (copies excluded)."""
        return dict(self.native.op_counts())

    def reset(self) -> None:
        """Run everything queued, then zero all counters, peaks, races, rates and times and restore the capacities.

        Memory in use, on the devices and pinned on the host, stays as it is. Devices without any have no context.
        """
        self.native.reset()
        for index, capacity in enumerate(self._capacities):
            self.native.set_capacity(index, capacity)

    # ------------------------------------------------------------ names
    def _number(self, device: str | int | torch.device, host: bool = False) -> int:
        if isinstance(device, int):
            index = device
        else:
            parsed = torch.device(device)
            if host and parsed.type == "cpu":
                return HOST
            index = 0 if parsed.index is None and self.kind == "mps" else parsed.index
            index = index if parsed.type == self.kind and index is not None else -1
        if not 0 <= index < len(self._capacities):
            valid = ", ".join(self.devices + (["cpu"] if host else []))
            raise ValueError(f"{device!r} is not a device of this simulation: use one of {valid}")
        return index

    def _name(self, number: int) -> str:
        if number == HOST:
            return "cpu"
        return self.kind if self.kind == "mps" else f"{self.kind}:{number}"

    def _memory(self, device: str | int | torch.device) -> dict[str, int]:
        return dict(self.native.memory(self._number(device)))

    def _link(self, src: str | int | torch.device, dst: str | int | torch.device) -> tuple[int, int]:
        numbers = self._number(src, host=True), self._number(dst, host=True)
        size, count = self.native.links().get(numbers, (0, 0))
        return int(size), int(count)
