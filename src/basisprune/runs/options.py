"""Check the options of a run, and resolve those that are names: `configure` returns a `RunConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import cast, get_args

from pydantic import JsonValue

from basisprune.arguments import LARGEST_SEED as LARGEST_LIMIT
from basisprune.arguments import LARGEST_SIDE, whole
from basisprune.budget import Budget, Goal, MetricBudget, Optimize, Ratios
from basisprune.budget.certify import Guarantee, check_confidence
from basisprune.budget.metrics import Metric, check_metric, metric_name
from basisprune.deploy.export.runtime import has_onnx
from basisprune.errors import ConfigError, nearest
from basisprune.recipes import Axis, Framework, Recipe, find_framework, find_recipe, for_task, trained_with
from basisprune.runs.output import IN_PYTHON
from basisprune.runs.settings import BUDGETS, OBJECTS, OPTIONS, RATIOS, GivenOptions, Options, RunOptions
from basisprune.runs.validating import faults_of, recipe_of, search_of
from basisprune.search import SearchConfig
from basisprune.tasks import CLASSIFICATION, Task, find_task
from basisprune.training.config import LARGEST_SEED
from basisprune.transfer.hints import Hints

__all__ = ["BUDGETS", "RATIOS", "Options", "RunConfig", "configure"]

_RANGES = {"seed": (0, LARGEST_SEED), "size": (1, LARGEST_SIDE), "limit": (1, LARGEST_LIMIT)}


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """The settings of a run: its options, with names replaced by what they stand for.

    `metric` is the task itself unless the task is classification. `task_name` and `metric_name` are the names of the
    two in config.yaml.
    """

    recipe: Recipe = field(default_factory=lambda: find_recipe("quick"))
    search: SearchConfig = field(default_factory=SearchConfig)
    optimize: Optimize = "params"
    task: Task = CLASSIFICATION
    metric: Metric = "accuracy"
    task_name: str = CLASSIFICATION.name
    metric_name: str | None = "accuracy"

    @property
    def goal(self) -> Goal:
        """The budget (by default, 1% accuracy may be lost) or the ratios; raises ConfigError if several are given."""
        limits = {name: value for name in (*BUDGETS, *RATIOS) if (value := getattr(self, name)) is not None}
        fixed = limits.keys() & set(RATIOS)
        if len(limits) > max(len(fixed), 1):
            raise ConfigError(f"{', '.join(limits)} given; pass one budget, or the ratios to remove")
        if fixed:
            return Ratios(self.basis_ratio or 0.0, self.filter_ratio or 0.0)
        return (Budget if self.task.is_share else MetricBudget)(**limits or {"max_drop": 0.01})

    @property
    def framework(self) -> Framework:
        """The framework of the search, or else of the recipe."""
        return find_framework(self.search.framework or self.recipe.framework)

    @property
    def promised(self) -> Guarantee | None:
        """The budget of accuracy to certify; None if the goal is not about accuracy."""
        goal = self.goal
        is_promise = isinstance(goal, Budget) and goal.is_about_accuracy
        return Guarantee(cast("Budget", goal), self.confidence, self.metric) if is_promise else None

    @property
    def is_trained(self) -> bool:
        """Whether the network is pruned as it is, without training it first."""
        return self.keep_head and not self.tune_first

    def hints(self, size: int | None) -> Hints:
        """Return what the settings say about the preparation of images."""
        mean, std = (None if each is None else tuple(each) for each in (self.mean, self.std))
        return Hints(None if size is None else (size, size), mean, std, self.interpolation)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return all settings that are not None as JSON values for config.yaml; `configure` reads them back."""
        goal = self.goal
        own = {each.name: getattr(self, each.name) for each in fields(RunOptions) if each.name != "trust_code"}
        if isinstance(goal, Budget):
            own[goal.kind] = vars(goal)[goal.kind]
        else:
            own |= zip(RATIOS, (goal.basis, goal.filters), strict=True)
        own |= {"optimize": self.optimize, "task": self.task_name, "metric": self.metric_name}
        own |= {"recipe": asdict(self.recipe), "search": asdict(self.search)}
        return {name: value for name, value in own.items() if value is not None}


def configure(options: Options) -> RunConfig:
    """Check the options of a run and resolve their names.

    Args:
        options: Values by name, see `GivenOptions`; None stands for the default.

    Returns:
        The settings of the run.

    Raises:
        ConfigError: Names, types, ranges or combinations are wrong; it lists all faults.

    >>> configure({"max_dorp": 0.02})
    Traceback (most recent call last):
    basisprune.errors.ConfigError: compress: max_dorp: no such setting. Did you mean 'max_drop'?
    """
    given = {name: value for name, value in options.items() if value is not None}
    faults = [fault for name, value in given.items() for fault in _faults_of(name, value)]
    if faults:
        raise ConfigError.of("compress", faults)
    asked = GivenOptions(**given)  # type: ignore[arg-type]
    config = RunConfig(**{each.name: getattr(asked, each.name) for each in fields(RunOptions)})
    with _collected(faults):
        config = replace(config, **_task_of(asked))  # type: ignore[arg-type]
    with _collected(faults, "recipe"):
        config = replace(config, recipe=_recipe_of(asked, config.task))
    with _collected(faults, "search"):
        search = search_of(asked.search)
        config = replace(config, search=replace(search, framework=asked.framework or search.framework))
    are_names_known = not faults
    with _collected(faults):
        _ = config.goal
    with _collected(faults):
        config.hints(config.size).spec(len(config.mean or config.std or (0.0,) * 3))
    faults += check_metric(config.metric)
    faults += check_confidence(config.confidence)
    if config.weights_key is not None and config.weights is None:
        faults.append(f"weights_key: {config.weights_key!r} given without weights, which it is an entry of")
    if config.tune_first and not config.keep_head:
        faults.append("tune_first: given without keep_head; a network with a new head is always trained first")
    if are_names_known:
        config, found = _planned(config, asked.optimize)
        faults += found
    if faults:
        raise ConfigError.of("compress", faults)
    return config


@contextmanager
def _collected(faults: list[str], name: str = "") -> Iterator[None]:
    """Catch a ConfigError in the block and add its faults to the list, prefixed if they are about that option."""
    try:
        yield
    except ConfigError as error:
        faults += [f"{name}: {fault}" if name and error.where == name else fault for fault in error.faults]


def _faults_of(name: str, value: object) -> list[str]:
    """List what is wrong with the name, type or range of an option."""
    if name not in OPTIONS:
        return [f"{name}: no such setting.{nearest(name, OPTIONS)}"]
    if name == "task" and not isinstance(value, str | Task):
        return [f"task: {value!r} given; a name or a Task is needed"]
    found = [] if name in OBJECTS else faults_of(value, OPTIONS[name].type, name)
    if name in _RANGES and not found:
        found += filter(None, [whole(name, value, *_RANGES[name])])
    return found


def _task_of(asked: GivenOptions) -> dict[str, object]:
    """Return the task and the metric, with their names in config.yaml."""
    task, metric = find_task(asked.task), asked.metric
    name = asked.task if isinstance(asked.task, str) else f"{task.name}{IN_PYTHON}"
    if task.budget_metric is not task:  # budgets have metrics of their own for it
        by = task.budget_metric if metric is None else metric
        called = by if isinstance(by, str) else f"{metric_name(cast('Metric', by))}{IN_PYTHON}"
        return {"task": task, "task_name": name, "metric": by, "metric_name": called}
    if metric is not None and not isinstance(metric, str):
        raise ConfigError(f"metric: a function given, but the task {task.name} has its own; pass a Task with another")
    task = task if metric is None else find_task(asked.task, metric)
    return {"task": task, "task_name": name, "metric": task, "metric_name": metric}


def _recipe_of(asked: GivenOptions, task: Task) -> Recipe:
    """Return the recipe with the requested changes, and without what is for classes only."""
    # A seed of 0, the default, leaves the seeds of the recipe as they are.
    changes = {"epochs": asked.epochs, "seed": asked.seed or None}
    numbers = {name: value for name, value in changes.items() if value is not None}
    recipe = trained_with(recipe_of(asked.recipe), augment=asked.augment, precision=asked.precision, **numbers)
    return for_task(recipe, task)


def _planned(config: RunConfig, asked: Optimize | None) -> tuple[RunConfig, list[str]]:
    """Choose the cost to minimise: latency for a budget of latency, if scores and packages allow it."""
    foreseen = all(config.recipe.foresees(move) for move in config.framework.moves)
    by_time = config.target_latency is not None and foreseen and has_onnx()
    optimize: Optimize = asked or ("latency" if by_time or config.device is not None else "params")
    fixed = [name for name in RATIOS if getattr(config, name) is not None]
    faults = []
    if config.device is not None and optimize != "latency":
        faults.append(f"device: given with optimize {optimize!r}; its times are for 'latency'")
    if optimize != "params" and fixed:
        faults.append(f"optimize: {optimize!r} given; with {' and '.join(RATIOS)} nothing is left to plan, omit it")
    elif optimize != "params" and not foreseen:
        faults.append(
            f"optimize: {optimize!r} given; it needs scores in units of the loss: the recipe quick or best, and the "
            "framework loss+basis, basis+loss, loss or basis"
        )
    if optimize == "latency" and config.device is None and not has_onnx():
        faults.append("optimize: 'latency' needs onnxruntime: pip install 'basisprune[onnx]', or pass device")
    axes = {axis for move in config.framework.moves for axis in move.axes}
    faults += [
        f"{name}: {ratio} given, but the framework {config.framework.name} does not prune that; omit it"
        for name, axis in zip(RATIOS, get_args(Axis), strict=True)
        if (ratio := getattr(config, name)) and axis not in axes
    ]
    return replace(config, optimize=optimize), faults
