"""What was said about one model, by which nodes, and what holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from .policy import Standing
from .prompt import Speaker

OUTSIDE = None
"""The speaker of words that come from no node: another pack, or somebody who has set the attribute."""


@dataclass(slots=True)
class Words:
    """The words about one model. The newest prompt that says keep or eject decides; in one prompt keep wins.

    `default` takes back only what the same node said before: it says nothing against others.
    """

    _said: dict[Speaker | None, tuple[int, Standing]] = field(default_factory=dict)

    def say(self, standing: Standing, speaker: Speaker | None = OUTSIDE, prompt: int = 0) -> None:
        """A node of the prompt with that number says something; a later prompt has a higher number.

        From outside, `default` takes back everything.
        """
        if speaker is OUTSIDE and standing is Standing.UNMANAGED:
            self._said.clear()
        self._said.pop(speaker, None)
        if standing is not Standing.UNMANAGED:
            self._said[speaker] = prompt, standing

    @property
    def standing(self) -> Standing:
        newest = max((prompt for prompt, _ in self._said.values()), default=0)
        said = [standing for prompt, standing in self._said.values() if prompt == newest]
        if Standing.PINNED in said:
            return Standing.PINNED
        return Standing.FLAGGED if said else Standing.UNMANAGED
