"""The widgets of our nodes, and what their values mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..devices.names import DEFAULT_DEVICE
from ..errors import InputError
from ..host.node_api import io
from ..lifecycle.policy import Standing
from ..plan import AUTO, MODES, Request, request_from_widgets

CATEGORY = "multigpu"
SPREAD_CATEGORY = f"{CATEGORY}/distorch_2"
LEGACY_CATEGORY = f"{CATEGORY}/legacy"

SPREAD = ("virtual_vram_gb", "donor_device", "expert_mode_allocations")
"""The widgets of a loader that say how weights are spread, in the archived pack's order."""

COMPUTE_TIP = (
    "The device on which the model computes. 'default' is the device that ComfyUI would choose. A workflow that names "
    "a device of another machine opens, too; running it stops with an error that lists this machine's devices."
)
ELSEWHERE_TIP = " ray://node-b/cuda:0 is a device of another computer, on which a MODEL, CLIP or VAE can compute."
MODE_TIP = (
    "Where the weights rest between uses. auto: on the compute device as far as they fit, the rest on other devices. "
    "virtual VRAM: a fixed number of gigabytes rests on the donors. expert: you give the amount for each device."
)
VIRTUAL_TIP = (
    "Mode 'virtual VRAM': gigabytes of weights that rest on the donors instead of the compute device. 0: none."
)
DONOR_TIP = (
    "Mode 'virtual VRAM': the devices that hold these weights, for example cpu, or cuda:1,cpu. "
    "The first one is filled first."
)
EXPERT_TIP = (
    "Mode 'expert': amounts per device as sizes (cuda:0,2.5gb;cpu,*), shares of the model (cuda:0,25%;cpu,75%) or "
    "shares of each device's memory (cuda:0,0.8;cpu,0.5). * takes the remainder."
)
KEEP_TIP = (
    "When ComfyUI frees memory: keep: the model stays loaded. eject: it is unloaded the next time. default: ComfyUI "
    "decides. API workflows may also use true (keep) or false (eject)."
)
OTHER_VRAM_TIP = "Let the weights rest on the other accelerators first, in RAM only what does not fit there."
EJECT_TIP = "Unload other models from the compute device before this one is loaded. Models that are set to keep stay."


def keep_widget() -> Any:
    choices = [standing.value for standing in Standing]
    return io.Combo.Input("keep_loaded", options=choices, default=choices[0], optional=True, tooltip=KEEP_TIP)


def keep_problem(keep_loaded: Any) -> bool | str:
    """True, or what is wrong with the value, as the host's validation wants it. A linked value is not known yet."""
    try:
        return keep_loaded is None or bool(Standing.read(keep_loaded))
    except InputError as problem:
        return str(problem)


def place_widgets(labels: list[str], *, elsewhere: bool) -> list[Any]:
    """The widgets of a place node. `labels` are the devices, which can be `elsewhere`, too: on other machines."""
    devices, tip = [DEFAULT_DEVICE, *labels], COMPUTE_TIP + (ELSEWHERE_TIP if elsewhere else "")
    return [
        io.Combo.Input("compute_device", options=devices, default=DEFAULT_DEVICE, optional=True, tooltip=tip),
        io.Combo.Input("mode", options=[*MODES], default=AUTO, optional=True, tooltip=MODE_TIP),
        io.Float.Input(
            "virtual_vram_gb", default=4.0, min=0.0, max=1024.0, step=0.1, optional=True, tooltip=VIRTUAL_TIP
        ),
        io.String.Input("donor_device", default="cpu", optional=True, tooltip=DONOR_TIP),
        io.String.Input("expert_mode_allocations", default="", optional=True, tooltip=EXPERT_TIP),
        keep_widget(),
    ]


def read_spread(values: dict[str, Any], prefix: str = "") -> Request:
    """The request that the widgets in `SPREAD` mean."""
    return request_from_widgets(*(values[prefix + name] for name in SPREAD))


@dataclass(frozen=True, slots=True)
class LoaderWidgets:
    """Makes the widgets that the archived pack's loaders have beside those of the host, for one machine's devices."""

    labels: list[str]

    def device(self, name: str, what: str, *, optional: bool = True) -> Any:
        """The first device offered is the first accelerator, or the CPU where there is none."""
        tip = f"The device on which {what} computes."
        return io.Combo.Input(name, options=self.labels, default=self.labels[0], optional=optional, tooltip=tip)

    def virtual(self, prefix: str = "", default: float = 4.0, *, optional: bool = True) -> list[Any]:
        tip = "Gigabytes of weights that rest on the donor instead of the compute device. 0: none."
        size = io.Float.Input(
            f"{prefix}virtual_vram_gb", default=default, min=0.0, max=128.0, step=0.1, optional=optional, tooltip=tip
        )
        donor = self.holder(f"{prefix}donor_device", "The device that holds these weights.", optional=optional)
        return [size, donor]

    def holder(self, name: str, tip: str, *, optional: bool = True) -> Any:
        """A device that holds weights: the CPU unless another is chosen."""
        return io.Combo.Input(name, options=self.labels, default="cpu", optional=optional, tooltip=tip)

    def expert(self, prefix: str = "") -> Any:
        tip = EXPERT_TIP.replace("Mode 'expert': amounts", "Instead of virtual VRAM: amounts")
        return io.String.Input(f"{prefix}expert_mode_allocations", default="", optional=True, tooltip=tip)

    def switch(self, name: str, default: bool, tip: str) -> Any:
        return io.Boolean.Input(name, default=default, optional=True, tooltip=tip)
