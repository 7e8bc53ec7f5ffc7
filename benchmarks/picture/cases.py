"""What is measured: the cases by name, and the sides. Needs neither torch nor ComfyUI."""

from __future__ import annotations

from dataclasses import dataclass, replace

SIDES = {
    "ours": "Place Model in mode auto, in a ComfyUI with DynamicVRAM",
    "core": "ComfyUI with DynamicVRAM, its default",
    "static": "ComfyUI with --disable-dynamic-vram",
    "diffusers": "the library diffusers with group offloading, where it is installed",
}
FIRST_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A model, a picture and a card.

    `card` is the GB of the GPU that a ballast leaves; None: no ballast. `steps` are those of the second prompt.
    `allocation` is what the Place Model node is given instead of mode auto. With `lora` the first prompt has a LoRA.
    `kind` is how its weights are stored, one of `bench_models.KINDS`, `size` that of the file, one of its `SIZES`.
    Without `hoist` no layers are computed ahead; with it the setting is left as it is.
    `fits`: the card holds the whole model, so that no side streams anything, and they tie.
    """

    name: str
    family: str = "flux"
    card: float | None = None
    width: int = 1024
    height: int = 1024
    frames: int = 1
    steps: int = 10
    kind: str = "bf16"
    lora: bool = False
    allocation: str | None = None
    size: str = "whole"
    hoist: bool = True
    fits: bool = False

    @property
    def resident(self) -> str:
        """The case in which the same model draws the same picture with all weights on the GPU, without a LoRA."""
        return next(case.name for case in CASES.values() if case.whole and not case.lora and self._draws_as(case))

    @property
    def needs(self) -> dict[str, str]:
        """Other cases that its figures are compared with, each measured once, and by which side.

        With all weights on the GPU, ComfyUI without DynamicVRAM computes weights with a LoRA as we do: beforehand and
        in full precision. On a smaller card it patches those that it streams in their own precision.
        """
        baked = {case.name: "static" for case in CASES.values() if case.whole and case.lora and self._draws_as(case)}
        return {self.resident: "core"} | (baked if self.lora else {})

    def _draws_as(self, case: Case) -> bool:
        same = ("family", "width", "height", "frames", "kind")
        return all(getattr(self, name) == getattr(case, name) for name in same)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its processes have beside those of the call."""
        return {} if self.hoist else {"MULTIGPU_HOIST": "off"}

    @property
    def whole(self) -> bool:
        return self.card is None and self.allocation is None

    @property
    def latent(self) -> tuple[int, ...]:
        """The latent's shape, as ComfyUI's nodes for empty ones make it."""
        time = () if self.family == "flux" else ((self.frames - 1) // 4 + 1,)
        return (1, 16, *time, self.height // 8, self.width // 8)

    def shrunk(self, simulate: bool) -> Case:
        """To try the benchmark: a card for a model of a few blocks, or a tiny picture for simulated devices."""
        if not simulate:
            return replace(self, card=None if self.card is None else 1.5 + self.card / 10, size="small")
        half = None if self.card is None else "cuda:0,50%;cpu,*"
        small = {"width": 64, "height": 64, "frames": min(self.frames, 5), "steps": 3, "card": None, "size": "tiny"}
        return replace(self, **small, allocation=self.allocation or half)


_WAN = {"family": "wan", "width": 832, "height": 480}
_LIST = (
    Case("flux"),
    Case("flux-24", card=24),
    Case("flux-16", card=16),
    Case("flux-12", card=12),
    Case("flux-8", card=8),
    Case("flux-2048px", width=2048, height=2048),
    Case("flux-12-2048px", card=12, width=2048, height=2048),
    Case("flux-lora", lora=True),
    Case("flux-16-lora", card=16, lora=True),
    Case("flux-half", allocation="cuda:0,50%;cpu,*"),
    Case("flux-half-streamed", allocation="cuda:0,50%;cpu,*", hoist=False),
    *(Case(f"flux-{100 - share}-streamed", allocation=f"cuda:0,{share}%;cpu,*", hoist=False) for share in (75, 25, 0)),
    Case("flux-fp8", kind="fp8"),
    Case("flux-16-fp8", card=16, kind="fp8", fits=True),
    Case("flux-8-fp8", card=8, kind="fp8"),
    Case("flux-6-fp8", card=6, kind="fp8"),
    Case("flux-scaled-fp8", kind="scaled"),
    Case("flux-scaled-fp8-lora", kind="scaled", lora=True),
    Case("flux-8-scaled-fp8", card=8, kind="scaled"),
    Case("flux-8-scaled-fp8-lora", card=8, kind="scaled", lora=True),
    Case("wan-1", **_WAN),
    Case("wan-16-1", card=16, **_WAN),
    Case("wan-33", frames=33, steps=5, **_WAN),
    Case("wan-16-33", card=16, frames=33, steps=5, **_WAN),
    Case("qwen", family="qwen"),
    Case("qwen-16", family="qwen", card=16),
)
CASES = {case.name: case for case in _LIST}
DEFAULT = tuple(case.name for case in _LIST if not case.whole or case.name == "flux")
"""All that must hold. The other cases without ballast are measured once; see `Case.needs`."""
