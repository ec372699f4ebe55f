"""All settings of a run, under the same names in Python, on the command line and in config.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypedDict, cast, get_args, get_type_hints

from pydantic import JsonValue

from basisprune.arguments import LARGEST_SEED as LARGEST_LIMIT
from basisprune.arguments import LARGEST_SIDE, whole
from basisprune.budget import Budget, Goal, MetricBudget, Optimize, Ratios
from basisprune.budget.certify import Promise, check_confidence
from basisprune.budget.metrics import Metric, check_metric, metric_name
from basisprune.data.load import TEST_FRACTION, VAL_FRACTION
from basisprune.deploy.export.runtime import has_onnx
from basisprune.errors import ConfigError, nearest
from basisprune.frameworks import Axis, Framework, FrameworkName, find_framework
from basisprune.recipes import Augmentation, FloatType, Recipe, for_task, trained_with
from basisprune.runs.output import IN_PYTHON
from basisprune.runs.validating import faults_of, recipe_of, search_of
from basisprune.search import SearchConfig
from basisprune.tasks import CLASSIFICATION, Task, find_task
from basisprune.training.config import LARGEST_SEED
from basisprune.transfer.hints import Hints, Interpolation

RATIOS = ("basis_ratio", "filter_ratio")
BUDGETS = tuple(each.name for each in fields(Budget))


class Options(TypedDict, total=False):
    """The settings by name. Of the first seven, pass one budget or the two ratios; the default is `max_drop` 0.01.

    `optimize` is what the result is to have least of: "params", "macs" or "latency", the default for `target_latency`;
    `device` is a file of `basisprune profile`, with the times of the device that is planned for instead of this
    machine. `recipe` is a name, a Recipe, or a mapping of changes to the recipe named under `base`; `search` likewise.
    `epochs`, `augment` ("auto", "none", "light", "strong") and `precision` ("auto", "float32", "bfloat16", "float16")
    override the recipe's, `size` is the height and width of the images, `groups` a CSV file of image names
    and groups that are not divided, and `onnx` defaults to whether its packages are installed. With `strict`, damaged
    images and images in several parts of the data are refused. A budget of accuracy is counted in `metric` ("accuracy",
    "balanced", "macro-f1", "worst-class" or a function(labels, predictions), the more the better) and certified with
    `confidence` on images that nothing else looks at; with `require_certified` a result that is only estimated counts
    as a failure.

    `weights` is a file or folder with the network's weights, `weights_key` the entry in it. With `keep_head`, the
    network is one that was trained for these classes: it keeps its head, is the reference, and is not trained before
    it is pruned, unless with `tune_first`. `mean`, `std` (of each channel, of values from 0 to 1) and `interpolation`
    say how its images are prepared, where neither it nor its checkpoint does.
    `task` is what the network is for: "classification", "segmentation", "multilabel", "regression", a `Task` of your
    own, or "package.module:task", which refers to one. Accuracies are then those of its metric, and budgets in units of
    it; `metric` chooses among those of a built-in one: "iou" or "dice", "ap" or "f1", "r2", "mae" or "mse".
    """

    max_drop: float | None
    min_accuracy: float | None
    target_params: int | None
    target_macs: int | None
    target_latency: float | None
    basis_ratio: float | None
    filter_ratio: float | None
    optimize: Optimize | None
    device: str | None
    framework: FrameworkName | None
    recipe: str | Mapping[str, object] | Recipe
    epochs: int | None
    augment: Augmentation | None
    precision: FloatType | None
    search: Mapping[str, object] | SearchConfig | None
    size: int | None
    pretrained: bool
    weights: str | None
    weights_key: str | None
    keep_head: bool
    tune_first: bool
    mean: list[float] | None
    std: list[float] | None
    interpolation: Interpolation | None
    val_fraction: float
    test_fraction: float
    confirm_fraction: float
    limit: int | None
    groups: str | None
    strict: bool
    confidence: float
    metric: str | Callable[..., float]
    require_certified: bool
    task: str | Task
    onnx: bool | None
    int8: bool
    seed: int
    trust_code: bool


@dataclass(frozen=True)
class ImageOptions:
    """How images are read and split: their size, and what is held out if the data has no such parts.

    `confirm_fraction` is the share of the validation images that is set aside to confirm an accuracy budget.
    """

    size: int | None = None
    val_fraction: float = VAL_FRACTION
    test_fraction: float = TEST_FRACTION
    confirm_fraction: float = 0.5
    limit: int | None = None
    groups: str | None = None
    strict: bool = False


@dataclass(frozen=True)
class StartOptions:
    """What the run starts from: the network's weights, whether it keeps its head, and how its images are prepared."""

    weights: str | None = None
    weights_key: str | None = None
    keep_head: bool = False
    tune_first: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: Interpolation | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the network is taken as it is, without training it before it is pruned."""
        return self.keep_head and not self.tune_first

    def hints(self, size: int | None) -> Hints:
        """How the images are prepared, as far as the settings say."""
        return Hints(None if size is None else (size, size), self.mean, self.std, self.interpolation)

    def noted(self) -> dict[str, JsonValue]:
        """Those that are set, as in config.yaml."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if value}

    @classmethod
    def of(cls, given: Mapping[str, object], faults: list[str]) -> StartOptions:
        """Those among all settings; what is wrong with them goes to `faults`."""
        own = {each.name: given[each.name] for each in fields(cls) if each.name in given}
        start = cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})  # type: ignore[arg-type]
        if start.weights_key is not None and start.weights is None:
            faults.append(f"weights_key: {start.weights_key!r} given without weights, which it is an entry of")
        if start.tune_first and not start.keep_head:
            faults.append("tune_first: given without keep_head; a network with a new head is always trained first")
        size = given.get("size")
        try:
            start.hints(size if isinstance(size, int) else None).spec(len(start.mean or start.std or (0.0,) * 3))
        except ConfigError as error:
            faults += error.faults
        return start


@dataclass(frozen=True)
class PromiseOptions:
    """What a budget of accuracy is counted in, how surely it is to be kept, and whether that is indispensable."""

    confidence: float = 0.95
    metric: Metric = "accuracy"
    require_certified: bool = False
    chosen_metric: str | None = None  # the name of a built-in task's metric


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, checked."""

    goal: Goal = field(default_factory=lambda: Budget(max_drop=0.01))
    recipe: Recipe = field(default_factory=lambda: recipe_of("quick"))
    search: SearchConfig = field(default_factory=SearchConfig)
    images: ImageOptions = field(default_factory=ImageOptions)
    promise: PromiseOptions = field(default_factory=PromiseOptions)
    pretrained: bool = True
    onnx: bool | None = None
    int8: bool = False
    seed: int = 0
    trust_code: bool = False
    optimize: Optimize = "params"
    device: str | None = None
    start: StartOptions = field(default_factory=StartOptions)
    task: Task = CLASSIFICATION
    task_name: str = "classification"

    @property
    def framework(self) -> Framework:
        """The requested framework, or the recipe's."""
        return find_framework(self.search.framework or self.recipe.framework)

    @property
    def promised(self) -> Promise | None:
        """What the run promises; None if its goal is not about accuracy."""
        if not isinstance(self.goal, Budget) or not self.goal.is_about_accuracy:
            return None
        return Promise(self.goal, self.promise.confidence, self.promise.metric)

    def noted(self) -> dict[str, JsonValue]:
        """The settings as in config.yaml: what `configure` takes, as JSON values."""
        if isinstance(self.goal, Budget):
            goal: dict[str, JsonValue] = {self.goal.kind: vars(self.goal)[self.goal.kind]}
        else:
            goal = dict(zip(RATIOS, (self.goal.basis, self.goal.filters), strict=True))
        rest: dict[str, JsonValue] = {
            "pretrained": self.pretrained,
            "onnx": self.onnx,
            "int8": self.int8,
            "seed": self.seed,
            "optimize": self.optimize,
            "device": self.device,
        }
        metric = metric_name(self.promise.metric)
        promise: dict[str, JsonValue] = {
            "confidence": self.promise.confidence,
            "metric": metric if isinstance(self.promise.metric, str) else f"{metric}{IN_PYTHON}",
            "require_certified": self.promise.require_certified,
        }
        if not self.task.has_classes:
            promise |= {"task": self.task_name, "metric": self.promise.chosen_metric}
        stages: dict[str, JsonValue] = {"recipe": asdict(self.recipe), "search": asdict(self.search)}
        return {**goal, **asdict(self.images), **promise, **rest, **self.start.noted(), **stages}


def configure(options: Options) -> RunConfig:
    """The settings of a run; raises ConfigError that lists all faults at once.

    >>> configure({"max_dorp": 0.02})
    Traceback (most recent call last):
    basisprune.errors.ConfigError: compress: max_dorp: no such setting. Did you mean 'max_drop'?
    """
    given = cast("Options", {name: value for name, value in options.items() if value is not None})
    faults: list[str] = []
    hints = get_type_hints(Options)
    for name, value in given.items():
        if name not in hints:
            faults.append(f"{name}: no such setting.{nearest(name, hints)}")
        elif name not in ("recipe", "search", "metric", "task"):
            faults += faults_of(value, hints[name], name)
    faults += _out_of_range(given)
    if faults:
        raise ConfigError.of("compress", faults)
    task = _task_of(given, faults)
    recipe, search, goal = _recipe_of(given, task, faults), _search_of(given, faults), _goal_of(given, task, faults)
    if task.has_classes:
        faults += check_metric(given.get("metric", "accuracy"))
    faults += check_confidence(given.get("confidence", 0.95))
    optimize = _optimize_of(given, goal, recipe, search, faults)
    start = StartOptions.of(given, faults)
    if recipe is not None and search is not None and isinstance(goal, Ratios):
        faults += _without_a_move(goal, find_framework(search.framework or recipe.framework))
    if faults or recipe is None or search is None or goal is None:
        raise ConfigError.of("compress", faults)
    images = ImageOptions(**{each.name: given[each.name] for each in fields(ImageOptions) if each.name in given})  # type: ignore[literal-required]
    promise = PromiseOptions(**{each.name: given[each.name] for each in fields(PromiseOptions) if each.name in given})  # type: ignore[literal-required]
    if not task.has_classes:
        chosen = given.get("metric")
        promise = replace(promise, metric=task, chosen_metric=chosen if isinstance(chosen, str) else None)
    return RunConfig(
        goal,
        recipe,
        search,
        images,
        promise,
        pretrained=given.get("pretrained", True),
        onnx=given.get("onnx"),
        int8=given.get("int8", False),
        seed=given.get("seed", 0),
        trust_code=given.get("trust_code", False),
        optimize=optimize,
        device=given.get("device"),
        start=start,
        task=task,
        task_name=_task_name(given, task),
    )


def _task_of(given: Options, faults: list[str]) -> Task:
    """What the network is for; classification if that is wrong."""
    wanted = given.get("task", CLASSIFICATION)
    if not isinstance(wanted, str | Task):
        faults.append(f"task: {wanted!r} given; a name or a Task is needed")
        return CLASSIFICATION
    try:
        task = find_task(wanted)
        metric = given.get("metric")
        if task.has_classes or metric is None:
            return task
        if not isinstance(metric, str):
            faults.append(f"metric: a function given, but the task {task.name} has its own; pass a Task with another")
            return task
        return find_task(wanted, metric)
    except ConfigError as error:
        faults += error.faults
        return CLASSIFICATION


def _task_name(given: Options, task: Task) -> str:
    wanted = given.get("task", task.name)
    return wanted if isinstance(wanted, str) else f"{task.name}{IN_PYTHON}"


def _optimize_of(
    given: Options, goal: Goal | None, recipe: Recipe | None, search: SearchConfig | None, faults: list[str]
) -> Optimize:
    """What the result is to have least of; by time where the budget is one, if the scores allow it."""
    if recipe is None or search is None:
        return "params"
    framework = find_framework(search.framework or recipe.framework)
    foreseen = all(recipe.foresees(move) for move in framework.moves)
    asked = given.get("optimize")
    by_time = isinstance(goal, Budget) and goal.target_latency is not None and foreseen and has_onnx()
    optimize: Optimize = asked or ("latency" if by_time or "device" in given else "params")
    if "device" in given and optimize != "latency":
        faults.append(f"device: given with optimize {optimize!r}; its times are for 'latency'")
    if optimize != "params" and isinstance(goal, Ratios):
        faults.append(f"optimize: {optimize!r} given; with {' and '.join(RATIOS)} nothing is left to plan, omit it")
    elif optimize != "params" and not foreseen:
        faults.append(
            f"optimize: {optimize!r} given; it needs scores in units of the loss: the recipe quick or best, and the "
            "framework loss+basis, basis+loss, loss or basis"
        )
    if optimize == "latency" and "device" not in given and not has_onnx():
        faults.append("optimize: 'latency' needs onnxruntime: pip install 'basisprune[onnx]', or pass device")
    return optimize


def _out_of_range(given: Options) -> list[str]:
    """Faults for numbers that nothing can be done with."""
    ranges = {"seed": (0, LARGEST_SEED), "size": (1, LARGEST_SIDE), "limit": (1, LARGEST_LIMIT)}
    found = (whole(name, given[name], *limits) for name, limits in ranges.items() if isinstance(given.get(name), int))  # type: ignore[literal-required]
    return [fault for fault in found if fault is not None]


def _goal_of(given: Mapping[str, object], task: Task, faults: list[str]) -> Goal | None:
    limits = [name for name in (*BUDGETS, *RATIOS) if name in given]
    fixed = [name for name in limits if name in RATIOS]
    if len(limits) > max(len(fixed), 1):
        faults.append(f"{', '.join(limits)} given; pass one budget, or the ratios to remove")
        return None
    try:
        if fixed:
            return Ratios(*(float(str(given.get(name, 0.0))) for name in RATIOS))
        budget = Budget if task.is_share else MetricBudget
        return budget(**{name: given[name] for name in limits} or {"max_drop": 0.01})  # type: ignore[arg-type]
    except ConfigError as error:
        faults += error.faults
        return None


def _without_a_move(ratios: Ratios, framework: Framework) -> list[str]:
    """Faults for ratios that the framework does not use."""
    axes = {axis for move in framework.moves for axis in move.axes}
    return [
        f"{name}: {ratios.of(axis)} given, but the framework {framework.name} does not prune that; omit it"
        for name, axis in zip(RATIOS, get_args(Axis), strict=True)
        if ratios.of(axis) > 0 and axis not in axes
    ]


def _recipe_of(given: Options, task: Task, faults: list[str]) -> Recipe | None:
    """The recipe, with the requested epochs and seed, and without what is for classes only."""
    try:
        recipe = recipe_of(given.get("recipe", "quick"))
        # 0, the default, leaves the seeds of the recipe as they are.
        changes: dict[str, int] = {"seed": given["seed"]} if given.get("seed") else {}
        if (epochs := given.get("epochs")) is not None:
            changes["epochs"] = epochs
        recipe = trained_with(recipe, augment=given.get("augment"), precision=given.get("precision"), **changes)
        return for_task(recipe, task)
    except ConfigError as error:
        faults += [f"recipe: {fault}" if error.where == "recipe" else fault for fault in error.faults]
        return None


def _search_of(given: Options, faults: list[str]) -> SearchConfig | None:
    try:
        search = search_of(given.get("search"))
        framework = given.get("framework")
        return search if framework is None else replace(search, framework=framework)
    except ConfigError as error:
        faults += [f"search: {fault}" if error.where == "search" else fault for fault in error.faults]
        return None
