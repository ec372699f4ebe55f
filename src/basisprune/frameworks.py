"""The paper's frameworks as values: where each starts, and what it prunes, in order (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from basisprune.errors import ConfigError, nearest

Axis: TypeAlias = Literal["basis", "filters"]
Start: TypeAlias = Literal["dense", "decomposed"]
FrameworkName: TypeAlias = Literal[
    "baseline",
    "l1",
    "taylor",
    "hrank",
    "loss",
    "basis",
    "basis+taylor",
    "basis+hrank",
    "basis+l1",
    "basis+loss",
    "loss+basis",
]


@dataclass(frozen=True)
class Step:
    """One operation on a network; `ratio` is the fraction that pruning removed of what remained.

    >>> str(Step("basis", 0.5)), str(Step("dense"))
    ('basis 0.5', 'dense')
    """

    name: str
    ratio: float | None = None

    def __str__(self) -> str:
        return self.name if self.ratio is None else f"{self.name} {self.ratio!r}"


Steps: TypeAlias = tuple[Step, ...]
"""All operations on a network from its start on: its identity within a run."""

GIVEN, DENSE, DECOMPOSED, POLISHED = Step("given"), Step("dense"), Step("decomposed"), Step("polished")


def named(steps: Steps) -> str:
    """The steps in words.

    >>> named((DECOMPOSED, Step("basis", 0.5), POLISHED))
    'decomposed, basis 0.5, polished'
    """
    return ", ".join(map(str, steps))


@dataclass(frozen=True)
class Move:
    """One way to make a network smaller: what is removed, and the name of the scores that rank it.

    "both" removes the same share of the filters and then of the basis vectors; the scores are those of the filters.
    """

    axis: Axis | Literal["both"]
    scores: str

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What is removed, in order.

        >>> Move("both", "loss").axes
        ('filters', 'basis')
        """
        return ("filters", "basis") if self.axis == "both" else (self.axis,)


@dataclass(frozen=True)
class Framework:
    """A pruning method: the network it starts from, and the moves that follow."""

    name: str
    start: str
    moves: tuple[Move, ...] = ()


BASIS = Move("basis", "basis")
"""Prunes basis vectors by the scores set in the recipe."""

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("baseline", "dense"),
        *(Framework(scores, "dense", (Move("filters", scores),)) for scores in ("l1", "taylor", "hrank", "loss")),
        Framework("basis", "decomposed", (BASIS,)),
        *(
            Framework(f"basis+{scores}", "decomposed", (BASIS, Move("filters", scores)))
            for scores in ("taylor", "hrank", "l1", "loss")
        ),
        Framework("loss+basis", "dense", (Move("both", "loss"),)),
    )
}
"""By name, as in the paper's tables; those with "loss" are not in the paper. "loss+basis" removes filters first, and
splits what remains."""

assert tuple(FRAMEWORKS) == get_args(FrameworkName)


def find_framework(name: str) -> Framework:
    """The framework of that name.

    >>> find_framework("basis+tylor")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: framework: 'basis+tylor' given; allowed are baseline, l1, taylor, hrank, loss, \
basis, basis+taylor, basis+hrank, basis+l1, basis+loss, loss+basis. Did you mean 'basis+taylor'?
    """
    if name in FRAMEWORKS:
        return FRAMEWORKS[name]
    raise ConfigError(
        f"framework: {name!r} given; allowed are {', '.join(FRAMEWORKS)}.{nearest(str(name), FRAMEWORKS)}"
    )
