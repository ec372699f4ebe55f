"""What a run tells while it is under way."""

from __future__ import annotations

from typing import Protocol


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

    def trained(self, epochs: float, share: float, seconds: float) -> None:
        """A training of this many epochs has done this share of them, in this many seconds."""


class Silence:
    """The listener that hears nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def judged(self, candidate: Tried) -> None:
        """Nothing."""

    def trained(self, epochs: float, share: float, seconds: float) -> None:
        """Nothing."""
