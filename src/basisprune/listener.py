"""What a run tells while it is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TrainingStep:
    """How far a training is: in `epoch`, counted from 0, of `epochs`, with `done` of all `steps` done.

    `share` and `epochs_here` speak of what is left to do since this start alone, which took `seconds` so far; loss and
    accuracy are those of the epoch until now.
    """

    epoch: int
    epochs: int
    done: int
    steps: int
    share: float
    epochs_here: float
    seconds: float
    images: int
    loss: float
    accuracy: float


class Tried(Protocol):
    """A candidate of a search, as far as a listener needs to know it."""

    @property
    def summary(self) -> str:
        """One line on what was removed of it, and how good it is."""
        ...


class Listener(Protocol):
    """Hears what a run tells; inherit from `Silence` and override what you want to hear."""

    def say(self, line: str) -> None:
        """A line about what happens now."""

    def judged(self, candidate: Tried) -> None:
        """One more candidate of a search is tried and judged."""

    def trained(self, step: TrainingStep) -> None:
        """A training has seen one more batch."""


class Silence:
    """The listener that hears nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def judged(self, candidate: Tried) -> None:
        """Nothing."""

    def trained(self, step: TrainingStep) -> None:
        """Nothing."""
