"""The settings of a run: each option declared once, with its type, default, description, unit and place in the help.

The command line, settings in files, `compress(**options)` and the tables in docs/command-line.md are made from them.
What loads torch is imported where it is needed, so that `basisprune --help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, cast, get_type_hints

from basisprune.budget.goal import (
    AMOUNT,
    FRACTION,
    LEVEL,
    TIME,
    Budget,
    Goal,
    MetricBudget,
    Optimize,
    Ratios,
    Unit,
)
from basisprune.errors import ConfigError, nearest
from basisprune.types import (
    CONFIRM_FRACTION,
    TEST_FRACTION,
    VAL_FRACTION,
    Augmentation,
    Effort,
    FloatType,
    FrameworkName,
    Interpolation,
)

if TYPE_CHECKING:
    from pydantic import JsonValue

    from basisprune.budget.certify import Guarantee
    from basisprune.budget.metrics import Metric
    from basisprune.recipes import Framework, Recipe
    from basisprune.search import SearchConfig
    from basisprune.tasks import Task
    from basisprune.transfer.hints import Hints

Panel: TypeAlias = Literal["Budget", "Data", "Model", "Training", "Output", "Advanced"]
"""The groups of options in the help, in its order."""

RATIOS = ("basis_ratio", "filter_ratio")
BUDGETS = tuple(each.name for each in fields(Budget))
FRACTIONS = {"val_fraction": VAL_FRACTION, "test_fraction": TEST_FRACTION, "confirm_fraction": CONFIRM_FRACTION}
"""The shares of the images if one of them is fixed."""
OBJECTS = ("recipe", "search", "metric", "task")  # may be objects in Python


@dataclass(frozen=True)
class Option:
    """An option as the command line, files and docs have it."""

    panel: Panel
    help: str
    unit: Unit | None = None
    metavar: str | None = None
    hidden: bool = False
    range: tuple[int, int] | None = None
    default: object = None
    name: str = ""
    type: object = None


def _option(panel: Panel, text: str, unit: Unit | None = None, *, default: object = None, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(panel, text, unit, **more)})


_budget, _data, _model = partial(_option, "Budget"), partial(_option, "Data"), partial(_option, "Model")
_training, _output, _advanced = (partial(_option, panel) for panel in ("Training", "Output", "Advanced"))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run, with names replaced by what they stand for; raises ConfigError that lists all faults.

    `metric` is the task itself unless the task is classification. `epochs`, `augment`, `precision`, `effort` and
    `framework` change the recipe and the search, and are None afterwards.
    """

    max_drop: float | None = _budget("Accuracy you can lose (default: 1%).", FRACTION)
    min_accuracy: float | None = _budget("Minimum accuracy, such as 95%.", LEVEL)
    target_params: int | None = _budget("Maximum number of parameters, such as 1.5M.", AMOUNT)
    target_macs: int | None = _budget("Maximum number of multiply-adds, such as 200M.", AMOUNT)
    target_latency: float | None = _budget("Maximum time per image on one CPU thread, such as 5ms.", TIME)
    basis_ratio: float | None = _budget("No search: remove this share of basis vectors.", FRACTION)
    filter_ratio: float | None = _budget("No search: remove this share of filters.", FRACTION)
    optimize: Optimize = _budget("Cost to minimise: params, macs or latency (default: params; latency for its target).")
    device: str | None = _budget("Plan for the device that `basisprune profile` measured.", metavar="FILE")
    task: Task = _budget(
        "What the model is for: classification, segmentation, multilabel, regression, or package.module:task.",
        default="classification",
    )
    metric: Metric = _budget(
        "Metric of accuracy budgets: accuracy, balanced, macro-f1 or worst-class; for other tasks iou or dice, ap or "
        "f1, r2, mae or mse."
    )
    confidence: float = _budget("Confidence level at which an accuracy budget is certified.", FRACTION, default=0.95)
    require_certified: bool = _budget("Exit with code 3 if the budget is only estimated to be kept.", default=False)

    size: int | None = _data("Image height and width in pixels (default: the model's).", range=(1, 1 << 14))
    val_fraction: float | None = _data(
        "Held out for validation if the data has no val/ (default: chosen so that the budget can be certified, see "
        "docs/data.md; 20% if another fraction is given).",
        FRACTION,
    )
    test_fraction: float | None = _data(
        "Held out for the final test if the data has no test/ (default: chosen; 10% if another fraction is given).",
        FRACTION,
    )
    confirm_fraction: float | None = _data(
        "Share of the validation images held out to confirm an accuracy budget at the end (default: chosen; 50% if "
        "another fraction is given).",
        FRACTION,
    )
    unlabelled: str | None = _data(
        "Images without labels that confirm an accuracy budget: only those on which the networks differ need labels, "
        "which `basisprune certify` reads.",
        metavar="SOURCE",
    )
    limit: int | None = _data("Train on at most this many images.", range=(1, 2**63 - 1))
    groups: str | None = _data("A CSV file of file,group: images of one group stay in the same split.", metavar="FILE")
    strict: bool = _data(
        "Refuse damaged images, and images in several splits, instead of reporting them.", default=False
    )

    pretrained: bool = _model("Start from pretrained weights.", default=True)
    weights: str | None = _model(
        "The model's weights: .safetensors, .pt, .pth, .ckpt, or a folder of Hugging Face or timm.", metavar="FILE"
    )
    weights_key: str | None = _model("The entry of that file with the weights, such as state_dict_ema.", metavar="NAME")
    keep_head: bool = _model(
        "The model is trained for these classes: keep its head. compress then prunes it without training it first.",
        default=False,
    )
    tune_first: bool = _model("With --keep-head: train it on your images before it is pruned.", default=False)
    mean: Sequence[float] | None = _model("Subtracted from pixels of 0 to 1 (default: the model's).", metavar="NUMBERS")
    std: Sequence[float] | None = _model("Pixels are divided by it (default: the model's).", metavar="NUMBERS")
    interpolation: Interpolation | None = _model(
        "How images are resized: bilinear, bicubic or nearest (default: the model's)."
    )
    trust_code: bool = _model(
        "Import the code that a bundle or a file of settings names; only if you trust its author.", default=False
    )

    recipe: Recipe = _training(
        "Settings of all stages: quick, best, paper, paper:cifar10, ...", metavar="NAME", default="quick"
    )
    epochs: int | None = _training("Training epochs (default: the recipe's).")
    augment: Augmentation | None = _training(
        "How training images are changed: auto, none, light or strong (default: the recipe's)."
    )
    precision: FloatType | None = _training(
        "Numbers to train in: auto, float32, bfloat16 or float16 (default: the recipe's)."
    )
    effort: Effort | None = _training(
        "How long to search: quick (about two trainings of the unpruned network), normal or best (default: quick)."
    )
    seed: int = _training("Random seed for the split, initialisation and training.", range=(0, 2**32 - 1), default=0)

    onnx: bool | None = _output("Also write model.onnx (default: if its packages are installed).")
    int8: bool = _output("Also write model.int8.onnx, calibrated on your images.", default=False)

    framework: FrameworkName | None = _advanced(
        "Pruning method: basis, l1, taylor, hrank, loss, basis+taylor, ... (default: the recipe's)."
    )
    search: SearchConfig = _advanced("Settings of the search.", hidden=True)
    task_name: str = ""  # in config.yaml
    metric_name: str | None = None

    def __post_init__(self) -> None:
        from basisprune.runs.parsing import search_of
        from basisprune.search.stepping import with_effort
        from basisprune.tasks import CLASSIFICATION

        faults: list[str] = []
        with _collected(faults):
            self._set(**self._found_task())
        if faults:  # those of other options are found too
            self._set(task=CLASSIFICATION, metric="accuracy")
        with _collected(faults, "recipe"):
            self._set(recipe=self._found_recipe(), epochs=None, augment=None, precision=None)
        with _collected(faults, "search"):
            search = with_effort(search_of(self.search), self.effort)
            self._set(search=replace(search, framework=self.framework or search.framework), framework=None, effort=None)
        faults += self._other_faults() + ([] if faults else self._choose_cost())
        if faults:
            raise ConfigError.of("compress", faults)

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _found_task(self) -> dict[str, object]:
        from basisprune.budget.metrics import metric_name
        from basisprune.tasks import Task, find_task

        task, metric = find_task(self.task), self.metric
        name = self.task if isinstance(self.task, str) else self.task_name or in_python(task.name)
        if task.budget_metric is not task:  # budgets have metrics of their own for it
            metric = task.budget_metric if metric is None else metric
            by = metric if isinstance(metric, str) else self.metric_name or in_python(metric_name(metric))
            return {"task": task, "task_name": name, "metric": metric, "metric_name": by}
        if isinstance(metric, str):
            task = find_task(self.task, metric)
            return {"task": task, "task_name": name, "metric": task, "metric_name": metric}
        if metric is not None and not isinstance(metric, Task):
            raise ConfigError(f"metric: a function given; the task {task.name} has its own, pass a Task with another")
        return {"task": task, "task_name": name, "metric": task}

    def _found_recipe(self) -> Recipe:
        from basisprune.recipes import for_task, trained_with
        from basisprune.runs.parsing import recipe_of

        changes = {"epochs": self.epochs, "seed": self.seed or None}  # 0, the default, leaves the seeds as they are
        recipe = trained_with(recipe_of(self.recipe), augment=self.augment, precision=self.precision, **changes)
        return for_task(recipe, self.task)

    def _other_faults(self) -> list[str]:
        from basisprune.budget.certify import check_confidence
        from basisprune.budget.metrics import check_metric

        faults: list[str] = []
        with _collected(faults):
            _ = self.goal
        with _collected(faults):
            self.hints(self.size).spec(len(self.mean or self.std or (0.0,) * 3))
        faults += check_metric(self.metric) + check_confidence(self.confidence)
        if self.weights_key is not None and self.weights is None:
            faults.append(f"weights_key: {self.weights_key!r} given without weights, which it is an entry of")
        if self.unlabelled is not None and not faults:
            faults += self._faults_of_unlabelled()
        if self.tune_first and not self.keep_head:
            faults.append("tune_first: given without keep_head; a network with a new head is always trained first")
        return faults

    def _faults_of_unlabelled(self) -> list[str]:
        """Refuse what images without labels cannot confirm: they only show how often each of two networks is right."""
        guarantee, needs_labels = self.guarantee, "which needs the labels of all images"
        if guarantee is None:
            return ["unlabelled: given without a budget of accuracy to confirm; omit it"]
        if not guarantee.is_a_drop:
            return [f"unlabelled: given with min_accuracy, {needs_labels}; pass max_drop"]
        if guarantee.metric != "accuracy":
            only = "only a loss of accuracy shows on images whose answers differ"
            return [f"unlabelled: given with the metric {self.metric_name}, {needs_labels}; {only}"]
        return []

    def _choose_cost(self) -> list[str]:
        """Set the cost to minimise: latency for a budget of latency, where that can be planned."""
        from basisprune.deploy.export.onnx import has_onnx

        moves = self.method.moves
        foreseen = all(self.recipe.foresees(move) for move in moves)
        by_time = self.target_latency is not None and foreseen and has_onnx()
        optimize = self.optimize or ("latency" if by_time or self.device is not None else "params")
        self._set(optimize=optimize)
        faults = []
        if self.device is not None and optimize != "latency":
            faults.append(f"device: given with optimize {optimize!r}; its times are for 'latency'")
        if optimize != "params" and any(getattr(self, name) is not None for name in RATIOS):
            faults.append(f"optimize: {optimize!r} given; with {' and '.join(RATIOS)} nothing is left to plan, omit it")
        elif optimize != "params" and not foreseen:
            faults.append(
                f"optimize: {optimize!r} given; it needs scores in units of the loss: the recipe quick or best, and "
                "the framework loss+basis, basis+loss, loss or basis"
            )
        if optimize == "latency" and self.device is None and not has_onnx():
            faults.append("optimize: 'latency' needs onnxruntime: pip install 'basisprune[onnx]', or pass device")
        axes = {axis for move in moves for axis in move.axes}
        return faults + [
            f"{name}: {ratio} given, but the framework {self.method.name} does not prune that; omit it"
            for name, axis in zip(RATIOS, ("basis", "filters"), strict=True)
            if (ratio := getattr(self, name)) and axis not in axes
        ]

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
    def method(self) -> Framework:
        from basisprune.recipes import find_framework

        return find_framework(self.search.framework or self.recipe.framework)

    @property
    def guarantee(self) -> Guarantee | None:
        """The budget of accuracy to certify; None if the goal is not about accuracy."""
        from basisprune.budget.certify import Guarantee

        goal = self.goal
        is_about_accuracy = isinstance(goal, Budget) and goal.is_about_accuracy
        return Guarantee(goal, self.confidence, self.metric) if is_about_accuracy else None  # type: ignore[arg-type]

    @property
    def fractions(self) -> tuple[float, float, float] | None:
        """The fixed shares of the images: to validate, to test, and to confirm; None if they are chosen."""
        given = {name: value for name in FRACTIONS if (value := getattr(self, name)) is not None}
        val, test, confirm = (FRACTIONS | given).values()
        return (val, test, confirm) if given else None

    @property
    def is_trained(self) -> bool:
        return self.keep_head and not self.tune_first

    def hints(self, size: int | None) -> Hints:
        from basisprune.transfer.hints import Hints

        mean, std = (None if each is None else tuple(each) for each in (self.mean, self.std))
        return Hints(None if size is None else (size, size), mean, std, self.interpolation)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return all settings that are not None as JSON values for config.yaml; `configure` reads them back."""
        goal = self.goal
        own = {name: getattr(self, name) for name in OPTIONS if name != "trust_code"}
        if isinstance(goal, Budget):
            own[goal.kind] = vars(goal)[goal.kind]
        else:
            own |= zip(RATIOS, (goal.basis, goal.filters), strict=True)
        own |= {"task": self.task_name, "metric": self.metric_name}
        own |= {"recipe": asdict(self.recipe), "search": asdict(self.search)}
        return {name: value for name, value in own.items() if value is not None}


class Options(TypedDict, total=False):
    """The options for type checkers, which see no other declaration; a test compares the two."""

    max_drop: float | None
    min_accuracy: float | None
    target_params: int | None
    target_macs: int | None
    target_latency: float | None
    basis_ratio: float | None
    filter_ratio: float | None
    optimize: Optimize | None
    device: str | None
    task: str | Task
    metric: str | Callable[..., float] | None
    confidence: float
    require_certified: bool
    size: int | None
    val_fraction: float | None
    test_fraction: float | None
    confirm_fraction: float | None
    unlabelled: str | None
    limit: int | None
    groups: str | None
    strict: bool
    pretrained: bool
    weights: str | None
    weights_key: str | None
    keep_head: bool
    tune_first: bool
    mean: Sequence[float] | None
    std: Sequence[float] | None
    interpolation: Interpolation | None
    trust_code: bool
    recipe: str | Mapping[str, object] | Recipe
    epochs: int | None
    augment: Augmentation | None
    precision: FloatType | None
    effort: Effort | None
    seed: int
    onnx: bool | None
    int8: bool
    framework: FrameworkName | None
    search: Mapping[str, object] | SearchConfig | None


def _declared() -> dict[str, Option]:
    heavy = dict.fromkeys(("Recipe", "SearchConfig", "Task", "Metric"), object)
    types, found = get_type_hints(RunConfig, localns=heavy), {}
    for each in fields(RunConfig):
        if option := each.metadata.get("option"):
            found[each.name] = replace(option, name=each.name, type=types[each.name], default=each.default)
    return found


OPTIONS = _declared()


def names_in(*panels: Panel) -> tuple[str, ...]:
    """Return the names of the options in these panels."""
    return tuple(name for name, each in OPTIONS.items() if each.panel in panels)


TRAIN_OPTIONS = tuple(name for name in names_in("Data", "Model", "Training") if name != "tune_first")
"""The options of `basisprune train`."""


def configure(options: Options) -> RunConfig:
    """Check options by name, None standing for the default; raise ConfigError that lists all faults.

    >>> configure({"max_dorp": 0.02})
    Traceback (most recent call last):
    basisprune.errors.ConfigError: compress: max_dorp: no such setting. Did you mean 'max_drop'?
    """
    given = {name: value for name, value in options.items() if value is not None}
    faults = [fault for name, value in given.items() for fault in _faults_of(name, value)]
    if faults:
        raise ConfigError.of("compress", faults)
    return RunConfig(**given)  # type: ignore[arg-type]


def in_python(name: str) -> str:
    """Name an object that was given in Python."""
    return f"{name} given in Python"


def _faults_of(name: str, value: object) -> list[str]:
    from basisprune.runs.parsing import faults_of
    from basisprune.tasks import Task

    if name not in OPTIONS:
        return [f"{name}: no such setting.{nearest(name, OPTIONS)}"]
    if name == "task" and not isinstance(value, str | Task):
        return [f"task: {value!r} given; a name or a Task is needed"]
    found = [] if name in OBJECTS else faults_of(value, OPTIONS[name].type, name)
    if found or OPTIONS[name].range is None:
        return found
    (low, high), number = OPTIONS[name].range, cast("int", value)  # type: ignore[misc]
    wanted = f"at least {low} is needed" if number < low else f"at most {high} is allowed"
    return [] if low <= number <= high else [f"{name}: {number} given, {wanted}"]


@contextmanager
def _collected(faults: list[str], name: str = "") -> Iterator[None]:
    """Catch a ConfigError in the block and add its faults to the list, prefixed if they are about that option."""
    try:
        yield
    except ConfigError as error:
        faults += [f"{name}: {fault}" if name and error.where == name else fault for fault in error.faults]
