"""The choices (keep, eject, default) that nodes have made for one model, and which of them applies."""

from __future__ import annotations

from dataclasses import dataclass, field

from .policy import Standing
from .prompt import Speaker

OUTSIDE = None
"""The speaker of choices that come from no node: a call of our API, or code that has set the attribute."""


@dataclass(slots=True)
class Words:
    """The choices for one model. The newest prompt with a keep or eject decides; if it has both, keep wins.

    `default` withdraws the earlier choice of the same node, not those of other nodes.
    """

    _said: dict[Speaker | None, tuple[int, Standing]] = field(default_factory=dict)

    def say(self, standing: Standing, speaker: Speaker | None = OUTSIDE, prompt: int = 0) -> None:
        """Record the choice of a node. `prompt` is the number of its prompt; later prompts have higher numbers.

        `default` from outside withdraws all choices.
        """
        if speaker is OUTSIDE and standing is Standing.DEFAULT:
            self._said.clear()
        self._said.pop(speaker, None)
        if standing is not Standing.DEFAULT:
            self._said[speaker] = prompt, standing

    @property
    def standing(self) -> Standing:
        newest = max((prompt for prompt, _ in self._said.values()), default=0)
        said = [standing for prompt, standing in self._said.values() if prompt == newest]
        if Standing.KEEP in said:
            return Standing.KEEP
        return Standing.EJECT if said else Standing.DEFAULT
