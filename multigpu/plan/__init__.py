"""The planner: from a request, a model's blocks and the devices' budgets to a plan.

Pure: standard library only, no state, nothing measured and nothing moved here.

    request = parse_request("cuda:0,8gb;cpu,*")
    plan = make_plan(request, blocks, budgets, DeviceId.parse("cuda:0"))
    print(explain.table(plan))
"""

from . import explain
from .grammar import (
    AUTO,
    MODES,
    format_request,
    parse_devices,
    parse_request,
    read_gib,
    request_from_mode,
    request_from_widgets,
)
from .planner import RING_BYTES, SECONDS_PER_BYTE, TINY_BYTES, default_ring, make_plan, possible_donors
from .quotas import check_compute, default_reserve, disk_budget
from .request import Auto, Expert, Mode, Part, Request, VirtualVram
from .ring_model import RingModel
from .types import CPU, DISK, SCHEME, Block, DeviceBudget, DeviceId, Forecast, Placement, Plan, Reason

__all__ = [
    "AUTO", "CPU", "DISK", "MODES", "RING_BYTES", "SCHEME", "SECONDS_PER_BYTE", "TINY_BYTES", "Auto", "Block",
    "DeviceBudget", "DeviceId", "Expert", "Forecast", "Mode", "Part", "Placement", "Plan", "Reason", "Request",
    "RingModel", "VirtualVram", "check_compute", "default_reserve", "default_ring", "disk_budget", "explain",
    "format_request", "make_plan", "parse_devices", "parse_request", "possible_donors", "read_gib",
    "request_from_mode", "request_from_widgets",
]  # fmt: skip
