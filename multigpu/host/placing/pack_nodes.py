"""Running a node of another pack on a chosen device, also if the pack manages the devices of its models itself.

Many packs ask ComfyUI for the device when they are imported, and keep it in globals of their modules, `device` and
`offload_device`. While a node of ours runs one of theirs, all of these globals in the pack are the chosen devices; then
they are what they were before, whatever happened.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy import model_management

from ..replacements import set_until_closed
from .device_scope import DeviceScope
from .loader_nodes import call, host_node, inputs_of

BLOCK_SWAP, SWAP_DEVICE = "block_swap_args", "swap_device"
"""The dictionary of block swap arguments, and its entry that names the device to which blocks are swapped."""
_ON_CPU, _ELSEWHERE = ("cpu", "offload_device"), ("gpu", "main_device")


@dataclass(frozen=True, slots=True)
class PackCall:
    """A node of another pack, with its inputs. `offload` is the device for what does not compute; None: the host's.

    `usual` is the compute device outside of any scope, which the pack has seen when it was imported.
    """

    target: str
    arguments: Mapping[str, Any]
    scope: DeviceScope
    offload: torch.device | None = None
    usual: torch.device = field(default_factory=model_management.get_torch_device)

    @property
    def single(self) -> bool:
        return len(host_node(self.target).RETURN_TYPES) == 1

    def run(self, device: torch.device | None) -> tuple[Any, ...]:
        node = host_node(self.target)
        with ExitStack() as restored:
            if device is not None:
                _rebind(restored, node, "device", self.usual, device)
            if self.offload is not None:
                _rebind(restored, node, "offload_device", model_management.unet_offload_device(), self.offload)
                transformer = getattr(getattr(self.arguments.get("model"), "model", None), "diffusion_model", None)
                for name in ("offload_device", "cache_device"):
                    if hasattr(transformer, name):
                        set_until_closed(restored, transformer, name, self.offload)
                restored.enter_context(self.scope.offloading_to(self.offload))
            return call(node, self.arguments)


def own_choice(target: str, name: str, device: torch.device | None) -> str | None:
    """The value of a node's own choice between the CPU and an accelerator that means this device, if it has one."""
    found = next((given for given in inputs_of(target) if given.id == name), None)
    options = getattr(found, "options", None) or ()
    wanted = _ON_CPU if device is not None and device.type == "cpu" else _ELSEWHERE
    return next((value for value in wanted if value in options), None)


def swap_device_of(model: Any) -> str | None:
    """The device that the model's block swap arguments name; None if they name none.

    They are among the options of its patcher, or, in older versions of such a pack, in a dictionary of the inner model.
    """
    options = getattr(model, "model_options", {}).get("transformer_options", {})
    older = getattr(getattr(model, "model", None), "pipeline", {})
    arguments = options.get(BLOCK_SWAP) or older.get(BLOCK_SWAP) or {}
    found: str | None = arguments.get(SWAP_DEVICE)
    return found


def _rebind(restored: ExitStack, node: Any, name: str, known: torch.device, device: torch.device) -> None:
    """Until `restored` is closed: the globals of that name in the node's pack are `device`, if they are `known` now.

    One with another value, say `torch.device("cpu")` in a pack that computes on the CPU on purpose, is not touched.
    """
    pack, _, _ = node.__module__.partition(".")  # ComfyUI imports a pack by its path, without dots
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == pack and vars(module).get(name) == known:
            set_until_closed(restored, module, name, device)
