"""A network under way: how it came about, how good it is on the way, and how long it is tuned."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import nn

from basisprune.frameworks import Step, Steps, named
from basisprune.tasks import Outcomes, Predictions
from basisprune.training.history import EpochRecord
from basisprune.types import BasisPlan, BlockPlan, FilterPlan

Plan = BasisPlan | FilterPlan | BlockPlan


@dataclass(frozen=True)
class Tuning:
    """How long a pruned network is tuned: for all epochs of the recipe, or fewer.

    Tuning ends as soon as the validation accuracy is `enough`, or is below `hopeless` after `grace` epochs or more.
    With `skip` it does not start at all. One from which nothing was removed is tuned only if `even_unchanged`.
    """

    enough: float | None = None
    hopeless: float | None = None
    grace: int = 1
    skip: bool = False
    even_unchanged: bool = False

    def may_end(self, epochs: int, accuracy: float) -> bool:
        """Whether tuning may end after this many epochs with this validation accuracy."""
        if self.skip or (self.enough is not None and accuracy >= self.enough):
            return True
        return epochs >= self.grace and self.hopeless is not None and accuracy < self.hopeless


FULLY, NOT_AT_ALL = Tuning(even_unchanged=True), Tuning(skip=True)


@dataclass(frozen=True)
class Stage:
    """A network at one stage: its accuracy on held-out images, or the metric of its task, and what it costs."""

    name: str
    accuracy: float
    parameters: int
    trainable: int
    macs: int
    history: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """The result of a framework, with its plans; `stages` has the validation accuracy and size along the way.

    `test_accuracy` is that of the final model on the test images, None if there are none. For another task than
    classification, accuracies are its `metric`, which is shown in percent if it is a share.
    """

    framework: str
    model: nn.Module
    stages: tuple[Stage, ...]
    plans: tuple[Plan, ...]
    test_accuracy: float | None
    metric: str = "accuracy"
    is_share: bool = True


@dataclass(frozen=True)
class State:
    """A network under way: the steps that led to it, their stages and plans, and what it says of the validation images.

    `tuned` counts the plans after which it was trained.
    """

    steps: Steps
    model: nn.Module
    stages: tuple[Stage, ...] = ()
    plans: tuple[Plan, ...] = ()
    outcomes: Outcomes = field(default_factory=lambda: Predictions.of_hits(np.zeros(0, dtype=np.bool_)))
    tuned: int = 0

    @property
    def has_to_recover(self) -> bool:
        """Whether anything was removed since it was last trained."""
        return any(plan.removed for plan in self.plans[self.tuned :])

    @property
    def branches(self) -> int:
        """How many branches of blocks went as a whole."""
        return sum(plan.removed for plan in self.plans if isinstance(plan, BlockPlan))

    @property
    def name(self) -> str:
        """The steps in words."""
        return named(self.steps)

    def after(self, step: Step) -> Steps:
        """The steps of the network after this further step."""
        return (*self.steps, step)
