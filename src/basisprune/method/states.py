"""A network between the stages, and the folder that keeps them, so that a killed run resumes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from basisprune.data import LoaderPart, Splits
from basisprune.data.manifest import manifest_of
from basisprune.errors import CheckpointError, ConfigError, PlanError
from basisprune.files import Json, clear_leftovers, parse_json, read_checked, sound_or_aside, write_checked
from basisprune.layer_times import TimeTable
from basisprune.recipes import Recipe, Step, Steps, named
from basisprune.tasks import Outcomes, Predictions, Task
from basisprune.torchkit.processes import Processes
from basisprune.training.checkpoint import EpochRecord, differences
from basisprune.transfer.model import TransferModel, spec_of
from basisprune.types import BasisPlan, BlockPlan, FilterPlan, JointPlan

logger = logging.getLogger(__name__)

Plan = BasisPlan | FilterPlan | BlockPlan
Stored = TypeVar("Stored", BasisPlan, FilterPlan, JointPlan)
CLAIM, TIMES = "run.json", "times.json"
_LONGEST_NAME = 160
_CLAIMED = (
    *("basis", "scale_init", "compensate", "basis_images", "score_images", "score_batch", "rebase", "scores"),
    *("filter_compensate", "linear"),
)


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

    @property
    def ends_early(self) -> bool:
        """Whether the validation accuracy after an epoch may end it."""
        return self.enough is not None or self.hopeless is not None

    def may_end(self, epochs: int, accuracy: float) -> bool:
        if self.skip or (self.enough is not None and accuracy >= self.enough):
            return True
        return epochs >= self.grace and self.hopeless is not None and accuracy < self.hopeless


FULLY, NOT_AT_ALL = Tuning(even_unchanged=True), Tuning(skip=True)
UNSEEN = Tuning(skip=True)
"""As NOT_AT_ALL, and not judged either: the network is on its way to one that is."""


@dataclass(frozen=True)
class Stage:
    """A network at one stage: its accuracy on the validation images, or its task's metric, and what it costs."""

    name: str
    accuracy: float
    parameters: int
    trainable: int
    macs: int
    history: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """The result of a framework; `stages` has the validation accuracy and size along the way.

    `test_accuracy` is that of the final model on the test images, None if there are none. Accuracies are the `metric`
    of the task, which is shown in percent if it is a share.
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
    """A network under way: the steps that led to it, their stages and plans, and its outcomes on validation images.

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
        return any(plan.removed for plan in self.plans[self.tuned :])

    @property
    def branches(self) -> int:
        return sum(plan.removed for plan in self.plans if isinstance(plan, BlockPlan))

    @property
    def name(self) -> str:
        return named(self.steps)

    @property
    def label(self) -> str:
        """What the network lacks, in words."""
        kept = dict.fromkeys(("basis", "filters"), 1.0)
        for plan in self.plans:
            if not isinstance(plan, BlockPlan):
                kept["basis" if isinstance(plan, BasisPlan) else "filters"] *= 1 - plan.removed / max(plan.total, 1)
        lacks = [f"{1 - share:.0%} of the {axis}" for axis, share in kept.items() if share < 1]
        return f"without {', '.join(lacks)}" if lacks else self.name

    def after(self, step: Step) -> Steps:
        return (*self.steps, step)


@dataclass(frozen=True)
class StageStore:
    """Networks, plans and numbers of a run, stored by the steps that led to them; without a `root`, nothing is stored.

    Each file ends in its checksum. A damaged one is moved aside with a message to `log`, and made again.

    >>> from basisprune.recipes import DECOMPOSED, Step
    >>> StageStore(Path("run")).path((DECOMPOSED, Step("basis", 0.5)), ".pt").name
    'decomposed-basis0.5.pt'
    """

    root: Path | None
    log: Callable[[str], None] = logger.warning

    def path(self, steps: Steps, suffix: str) -> Path | None:
        """Return the file for the result of these steps; None if nothing is stored."""
        if self.root is None:
            return None
        name = "-".join(str(step).replace(" ", "") for step in steps)
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.root / (name + suffix)

    def claim(self, common: Mapping[str, object]) -> None:
        """Record what all starts of the run have in common; raise CheckpointError that lists what differs."""
        if self.root is None:
            return
        root = self.root
        Processes.here().on_main(lambda: clear_leftovers(root))
        new = json.loads(json.dumps(common))
        _refuse_differences(root / CLAIM, self._written_once(root / CLAIM, lambda: json.dumps(new, indent=1)), new)

    def check(self, common: Mapping[str, object]) -> None:
        """Raise the error that `claim` would raise for an earlier start with other settings; write nothing."""
        if self.root is None or not (self.root / CLAIM).is_file():
            return
        try:
            old = parse_json(read_checked(self.root / CLAIM))
        except (CheckpointError, ValueError):
            return  # it will be made again
        _refuse_differences(self.root / CLAIM, old, json.loads(json.dumps(common)))

    def number(self, steps: Steps, what: str, work: Callable[[], float]) -> float:
        """Measure a number only once, because it would differ the next time."""
        path = self.path(steps, f".{what}.json")
        found = self._written_once(path, lambda: json.dumps(work()))
        if isinstance(found, int | float):
            return float(found)
        raise CheckpointError(f"{path}: does not hold a number; delete it to measure again")

    def plan(self, steps: Steps, plan: Stored) -> Stored:
        """Return the plan that an earlier start of this run stored, or else this one, stored now.

        Scores can differ in the last digit on devices that do not sum in a fixed order, but the network whose
        training resumes must be the same.
        """
        path = self.path(steps, ".plan.json")
        if path is None and Processes.here().count == 1:
            return plan
        found = self._written_once(path, plan.to_json)
        try:
            old = type(plan).from_json(json.dumps(found))
        except PlanError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to plan again") from error
        if (old.pruning_ratio, old.options) == (plan.pruning_ratio, plan.options):
            return old
        raise CheckpointError(
            f"{path}: was created for ratio {old.pruning_ratio} with {dict(old.options)}, but {plan.pruning_ratio} "
            f"with {dict(plan.options)} was requested; use another folder"
        )

    def times(self, work: Callable[[], TimeTable]) -> TimeTable:
        """Measure the times that this run plans by only once: others would give other plans."""
        path = None if self.root is None else self.root / TIMES
        found = self._written_once(path, lambda: work().to_json())
        try:
            return TimeTable.from_json(json.dumps(found))
        except (PlanError, ConfigError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to measure again") from error

    def _written_once(self, path: Path | None, text: Callable[[], str]) -> Json:
        """Return the JSON in the file; if it is missing or damaged, the main process writes this text first.

        The other processes of a distributed run receive it, and need not see the file.
        """

        def content() -> bytes:
            if path is None:
                return text().encode()
            if sound_or_aside(path, self.log) is None:
                write_checked(path, text().encode())
            return read_checked(path)

        try:
            return parse_json(Processes.here().from_main(content))
        except ValueError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to make it again") from error


def _refuse_differences(path: Path, old: Json, new: Mapping[str, object]) -> None:
    if differing := differences(old, new):
        where = f"{path}: was created with other settings, weights or images; use another folder"
        raise CheckpointError.of(where, differing)


def claimed(recipe: Recipe, task: Task, model: nn.Module, splits: Splits, *, trained: bool) -> dict[str, object]:
    """Return what all starts of a run in a folder have in common; settings of a training are in its checkpoint."""
    common = {name: getattr(recipe, name) for name in _CLAIMED}
    if trained:
        common["trained"] = True
    if named_task := task.to_dict():
        common["task"] = ", ".join(named_task.values())
    return common | fingerprint(model, splits, with_head=trained)


def fingerprint(model: nn.Module, splits: Splits, *, with_head: bool = False) -> dict[str, object]:
    """Return what identifies a run's network and images: input, classes, weights and the split.

    The classifier of a transfer model counts only `with_head`: a new one is drawn at each start.
    """
    with_head, digest = with_head or not isinstance(model, TransferModel), hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if with_head or not name.startswith("classifier."):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    found: dict[str, object] = {
        "input": asdict(spec_of(model)),
        "classes": list(splits.classes),
        "weights": digest.hexdigest()[:16],
        "images": manifest_of(splits).digest,
    }
    targets = {name: part.targets_hash for name, part in splits.parts.items() if isinstance(part, LoaderPart)}
    return found | ({"targets": targets} if targets else {})
