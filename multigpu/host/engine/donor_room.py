"""Room for the blocks of a plan on its donors."""

from __future__ import annotations

import logging

import torch
from comfy import model_management

from ...devices.torch_devices import torch_device
from ...plan import CPU, Plan
from ...plan.spill import relieved
from ...stream.census import bytes_by_device
from ...units import format_bytes
from ..loaded_models import entries

log = logging.getLogger("multigpu")


def make_room(model: torch.nn.Module, plan: Plan) -> Plan:
    """Unload other models from the donors as far as the plan needs, but none that is loaded along with this one.

    Those need memory to compute in, too. What then has no room on a donor goes to RAM.
    """
    resting = bytes_by_device(model)
    for home, count in plan.bytes_by_home().items():
        if home in (CPU, plan.compute):
            continue
        device = torch_device(home)
        in_use = [entry for entry in entries(device) if entry.currently_used]
        need = float(count - resting.get(device, 0))
        need += model_management.minimum_inference_memory() if in_use and need > 0 else 0
        if model_management.get_free_memory(device) >= need:
            continue
        model_management.free_memory(need, device, keep_loaded=in_use)
        short = need - model_management.get_free_memory(device)
        if short > 0:
            words = "[MultiGPU] %s has %s less free memory than the plan needs; so much of %s rests in RAM instead"
            log.warning(words, home, format_bytes(int(short)), type(model).__name__)
            plan = relieved(plan, home, short)
    return plan
