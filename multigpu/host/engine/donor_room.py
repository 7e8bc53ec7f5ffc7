"""Room for the blocks of a plan on its donors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch
from comfy import model_management

from ...devices.backends import free_bytes
from ...devices.ram import ram
from ...devices.torch_devices import torch_device
from ...plan import CPU, DISK, Plan
from ...plan.quotas import ram_reserve
from ...plan.spill import relieved
from ...stream.census import bytes_by_device, bytes_by_home
from ...units import format_bytes
from ..loaded_models import entries
from .file_pages import in_file

log = logging.getLogger("multigpu")

Filed = Callable[[], Collection[str]]
"""The blocks that can rest in the model file."""


def make_room(model: torch.nn.Module, plan: Plan, filed: Filed) -> Plan:
    """Unload other models from the donors as far as the plan needs, but none that is loaded along with this one.

    Those need memory to compute in, too. What then has no room on a donor goes to RAM, unless the donor does not tell
    how much it has; and what has no room there stays in the model file, if it can.
    """
    resting = bytes_by_device(model)
    for home, count in plan.bytes_by_home().items():
        if home in (CPU, DISK, plan.compute):
            continue
        device = torch_device(home)
        in_use = [entry for entry in entries(device) if entry.currently_used]
        need = float(count - resting.get(device, 0))
        need += model_management.minimum_inference_memory() if in_use and need > 0 else 0
        if model_management.get_free_memory(device) >= need:
            continue
        model_management.free_memory(need, device, keep_loaded=in_use)
        short = need - model_management.get_free_memory(device)
        if short > 0 and free_bytes(home) is not None:
            words = "[MultiGPU] %s has %s less free memory than the plan needs; so much of %s rests in RAM instead"
            log.warning(words, home, format_bytes(int(short)), type(model).__name__)
            plan = relieved(plan, home, short)
    return _relieve_ram(model, plan, filed)


def _relieve_ram(model: torch.nn.Module, plan: Plan, filed: Filed) -> Plan:
    """Half of the reserve that plans count with has to stay free, so that small changes move nothing."""
    need = plan.bytes_on(CPU) - bytes_by_home(model, in_file).get(str(CPU), 0)
    if plan.compute == CPU or need <= 0:
        return plan
    total, free = ram()
    short = need - (free - ram_reserve(total) // 2)
    less = relieved(plan, CPU, short, filed()) if short > 0 else plan
    if less is not plan:
        words = "[MultiGPU] RAM has %s less free memory than the plan needs; so much of %s stays in its file instead"
        log.warning(words, format_bytes(short), type(model).__name__)
    return less
