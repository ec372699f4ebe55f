"""Progress of a run, as reported to a callback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class TrainingStep:
    """The progress of a training: in `epoch`, counted from 0, of `epochs`, with `done` of all `steps` done.

    `share` and `epochs_here` refer only to the work since this start, which has taken `seconds` so far. Loss and
    accuracy are those of the current epoch up to now; the latter is None for tasks whose metric takes longer to tell.
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
    accuracy: float | None


@dataclass(frozen=True)
class Row:
    """A network of a search as a live table shows it; a later row of the same name replaces an earlier one."""

    name: str
    state: str
    parameters: int | None = None
    milliseconds: float | None = None
    value: str = ""


class Tried(Protocol):
    """The part of a search candidate that a callback needs."""

    @property
    def summary(self) -> str:
        """One line: what was removed, and how good it is."""
        ...


class Callback(Protocol):
    """Receives the progress of a run; inherit from `NullCallback` and override what you need."""

    def log(self, line: str) -> None:
        """Called with a message about what is happening."""

    def opened(self, done: int, total: int) -> None:
        """Called while images are opened for the first time, with how many of them are done."""

    def shown(self, row: Row) -> None:
        """Called when a network of a search gets to its next state."""

    def judged(self, candidate: Tried) -> None:
        """Called when a candidate of a search has been judged."""

    def trained(self, step: TrainingStep) -> None:
        """Called after each training batch."""


class NullCallback:
    """The callback that ignores everything."""

    def log(self, line: str) -> None:
        """Does nothing."""

    def opened(self, done: int, total: int) -> None:
        """Does nothing."""

    def shown(self, row: Row) -> None:
        """Does nothing."""

    def judged(self, candidate: Tried) -> None:
        """Does nothing."""

    def trained(self, step: TrainingStep) -> None:
        """Does nothing."""


def counted(number: int, noun: str) -> str:
    """The number with its noun, in the plural unless it is one.

    >>> counted(1, "epoch"), counted(1200, "image")
    ('1 epoch', '1,200 images')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
