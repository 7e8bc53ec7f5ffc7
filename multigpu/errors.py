"""Every error this project raises on purpose: what the user gave (`InputError`), the host (`HostError`), or a device.

A message says what was given, what is true, and what to type or do instead.
"""

from __future__ import annotations


class MultiGPUError(Exception):
    """Base of all errors of this project.

    ComfyUI shows people an error's module and class. It imports the pack under the path of its folder, so the module is
    named here.
    """

    __module__ = "multigpu.errors"

    def __init_subclass__(cls) -> None:
        cls.__module__ = MultiGPUError.__module__


class InputError(MultiGPUError, ValueError):
    """Something the user gave cannot be used."""


class AllocationError(InputError):
    """An allocation that cannot be used."""


class AllocationSyntaxError(AllocationError):
    """The text of an allocation does not parse.

    `column` counts from 1 in `text`, `piece` is the part at fault and `example` is a text that works.
    """

    def __init__(self, problem: str, *, text: str, column: int, piece: str, example: str) -> None:
        shown = text if len(text) <= 120 else f"{text[:117]}..."
        super().__init__(f"{problem} (column {column} of {shown!r}); for example {example!r}")
        self.column = column
        self.piece = piece
        self.example = example


class UnknownDevice(AllocationError):
    """A device is named that this machine does not have."""


class DoesNotFit(AllocationError):
    """The request needs more bytes than the devices can hold."""


class ModelFileError(InputError):
    """A file is not a model that can be read."""


class HostError(MultiGPUError):
    """ComfyUI is not as this project expects it."""


class HostIncompatible(HostError):
    """A host symbol is missing or has another signature."""


class PlacementNotApplied(HostError):
    """After loading, the bytes do not rest where the plan says."""


class DeviceError(MultiGPUError):
    """A device or a transfer failed."""


class BackendUnavailable(DeviceError):
    """A device's backend is present but cannot be used."""


class OutputError(MultiGPUError):
    """What a command has to say cannot be written: a full disk, a closed output."""
