"""Loading and spreading weights, in the host's own progress bar on the node that runs."""

from __future__ import annotations

from comfy.utils import ProgressBar

STEPS = 100


class LoadingBar:
    """Called with the bytes of each block that is dealt with; moves the bar in whole percents.

    The host may raise out of it when the user has interrupted the prompt.
    """

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._shown = 0
        self._bar = ProgressBar(STEPS)

    def __call__(self, count: int) -> None:
        self._done += count
        self._show(min(STEPS, STEPS * self._done // self._total))

    def finish(self) -> None:
        """Blocks that were at home already are not told of: what is left of the bar is theirs."""
        self._show(STEPS)

    def _show(self, step: int) -> None:
        if step > self._shown:
            self._shown = step
            self._bar.update_absolute(step)
