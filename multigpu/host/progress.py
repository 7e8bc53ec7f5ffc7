"""Loading and spreading weights, in the host's own progress bar on the node that runs."""

from __future__ import annotations

from comfy.utils import ProgressBar

STEPS = 100


class LoadingBar:
    """Call it with the bytes of each block that has been loaded; it moves the bar in whole percents.

    The call raises the host's exception when the user has interrupted the prompt.
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
        """Fill the bar: blocks that were already at home did not move it."""
        self._show(STEPS)

    def _show(self, step: int) -> None:
        if step > self._shown:
            self._shown = step
            self._bar.update_absolute(step)
