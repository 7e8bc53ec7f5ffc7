"""What a component on another machine costs, predicted from two figures of a link: seconds per call, bytes per second.

A call takes the time of the computing there, of the bytes there and back, and of what every call costs. The bytes of a
step are those of the latents: conditioning, and the noise that comes with it, is sent once per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Road:
    """The way to a node: seconds that every call takes, and bytes per second (None: as many as you like)."""

    call: float
    speed: float | None = None

    def seconds(self, there: int, back: int) -> float:
        """What is added to the computing of one call with these bytes."""
        return self.call + (0.0 if self.speed is None else (there + back) / self.speed)

    def then(self, other: Road) -> Road:
        """One road after another: both take their time."""
        slowness = sum(1 / speed for speed in (self.speed, other.speed) if speed is not None)
        return Road(self.call + other.call, 1 / slowness if slowness else None)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one model at one size of picture: of a latent in a step, of what is sent once per prompt."""

    latent: int
    conditioning: int
    rows: int = 1
    """Latents per step: 2 with a negative prompt."""


def latent_bytes(channels: int, width: int, height: int, frames: int = 1, *, shrink: int = 8, item: int = 4) -> int:
    """Bytes of a latent: `shrink` pixels are one of its elements in each direction, `item` is the bytes of a number."""
    return channels * (width // shrink) * (height // shrink) * frames * item


def sizes(text: int, channels: int, width: int, height: int, frames: int = 1, *, rows: int = 1) -> Sizes:
    """The host converts latents to 16 bits before it gives them to a model, and texts too, but these were sent before.

    Once per prompt it sends each text, of `text` numbers, and the noise and the empty latent, all in 32 bits.
    """
    own = latent_bytes(channels, width, height, frames)
    return Sizes(own // 2, 4 * text * rows + 2 * own, rows)


MODELS = {
    "Flux 1024 x 1024": sizes(4096 * 256 + 768, 16, 1024, 1024),
    "Qwen-Image 1328 x 1328, cfg": sizes(3584 * 512, 16, 1328, 1328, rows=2),
    "Wan 2.1 1280 x 720 x 81, cfg": sizes(4096 * 512, 16, 1280, 720, 21, rows=2),
}
"""81 frames are 21 in Wan's latent."""


def step_overhead(sizes: Sizes, road: Road) -> float:
    """Seconds that one step takes longer when its model is on the other machine: the latent goes there and back."""
    return road.seconds(sizes.rows * sizes.latent, sizes.rows * sizes.latent)


def prompt_overhead(sizes: Sizes, road: Road, steps: int) -> float:
    """Seconds that the sampling of a prompt takes longer: each step, and the conditioning once, a call per text."""
    return steps * step_overhead(sizes, road) + road.seconds(sizes.conditioning, 0) + (sizes.rows - 1) * road.call


def fan_out_seconds(pictures: int, workers: int, compute: float, picture_bytes: int, road: Road) -> float:
    """Seconds for some pictures, drawn by some workers at `compute` seconds each, which come back over one road.

    The workers compute at the same time, and each gets its next picture when the last has come back; what they send
    shares the last part of the way, this machine's own.
    """
    rounds, sending = -(-pictures // workers), road.seconds(0, picture_bytes)
    return max(rounds * (compute + sending), compute + pictures * sending)


def fan_out_speed_up(pictures: int, workers: int, compute: float, picture_bytes: int, road: Road) -> float:
    """How many times as fast as one local device."""
    return pictures * compute / fan_out_seconds(pictures, workers, compute, picture_bytes, road)
