"""Tasks by name: the built-in ones, and 'package.module:task' of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from basisprune.errors import ConfigError, nearest
from basisprune.tasks.base import Task
from basisprune.tasks.classification import classification
from basisprune.tasks.multilabel import multilabel
from basisprune.tasks.regression import regression
from basisprune.tasks.segmentation import segmentation
from basisprune.torchkit.imports import called, named_object


@dataclass(frozen=True)
class BuiltIn:
    """A built-in task: what makes it, and its metrics by name, the default one first."""

    make: Callable[..., Task]
    metrics: tuple[str, ...]


TASKS: Mapping[str, BuiltIn] = {
    "classification": BuiltIn(lambda _metric: classification(), ("accuracy",)),
    "segmentation": BuiltIn(segmentation, ("iou", "dice")),
    "multilabel": BuiltIn(multilabel, ("ap", "f1")),
    "regression": BuiltIn(regression, ("r2", "mae", "mse")),
}
"""The built-in tasks by name. Those of classification's metrics that are not accuracy belong to the budget."""


def find_task(task: str | Task, metric: str | None = None) -> Task:
    """The task itself, the built-in one of that name with that metric, or what 'package.module:task' refers to.

    Such a name refers to a Task, or to a function without arguments that returns one. Raises ConfigError for anything
    else.

    >>> find_task("segmentation", "dice").metric_name
    'mean Dice'
    >>> find_task("segmentaton")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: task: 'segmentaton' given; allowed are classification, segmentation, multilabel, \
regression, or 'package.module:task'. Did you mean 'segmentation'?
    """
    if isinstance(task, str) and task in TASKS:
        known = TASKS[task].metrics
        if metric is not None and metric not in known:
            raise ConfigError(
                f"metric: {metric!r} given; allowed for {task} are {', '.join(known)}.{nearest(metric, known)}"
            )
        return TASKS[task].make(metric or known[0])
    found = _referred_to(task) if isinstance(task, str) else task
    if not isinstance(found, Task):
        raise ConfigError(
            f"task: {task!r} is a {type(found).__name__}; a Task, or a function that returns one, is needed"
        )
    if metric is not None:
        raise ConfigError(
            f"metric: {metric!r} given, but the task {found.name} has its own, {found.metric_name}; omit it"
        )
    return found


def _referred_to(task: str) -> object:
    if ":" not in task:
        hint = nearest(task, TASKS)
        raise ConfigError(f"task: {task!r} given; allowed are {', '.join(TASKS)}, or 'package.module:task'.{hint}")
    found = named_object(task, "task", ConfigError)
    return found if isinstance(found, Task) else called(task, found, ConfigError)
