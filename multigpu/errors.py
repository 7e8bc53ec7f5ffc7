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


class RequestError(InputError):
    """A request over HTTP cannot be answered; `status` is the HTTP status of the answer.

    `field` is the widget at fault, if it is one, and `column` counts from 1 in its text.
    """

    def __init__(self, problem: str, *, status: int = 400, field: str | None = None, column: int | None = None) -> None:
        super().__init__(problem)
        self.status = status
        self.field = field
        self.column = column

    def to_json(self) -> dict[str, object]:
        return {"error": {"message": str(self), "field": self.field, "column": self.column}}


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


class ClusterUnavailable(BackendUnavailable):
    """The Ray cluster that was named cannot be used: unreachable, without a token, or with another one."""


class RemoteError(DeviceError):
    """A call failed on another machine; the message is what was said there."""


class RemoteDeviceLost(RemoteError):
    """A node of the cluster is gone, or does not answer.

    `node` and `method` say which, and during which call; `component`, whose call it was, if it was a component's.
    """

    def __init__(self, node: str, method: str, problem: str = "it is gone", *, component: str = "") -> None:
        whose = f" of {component}" if component else ""
        super().__init__(
            f"ray://{node} was lost during {method}{whose}: {problem}; start its worker again "
            "(python -m multigpu worker), or choose another device"
        )
        self.node = node
        self.method = method
        self.problem = problem
        self.component = component


class NotSendable(InputError):
    """Something in a workflow cannot be sent to another machine."""


class RemoteMismatch(HostError):
    """Another machine has other versions, nodes or model files than this one."""


class OutputError(MultiGPUError):
    """What a command has to say cannot be written: a full disk, a closed output."""
