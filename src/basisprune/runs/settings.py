"""The options of a run, each declared once: its type, default, description, unit and place in the help.

The command line, settings in files, `compress(**options)` and the table in docs/command-line.md are made from them.
This file imports nothing heavy, so that `basisprune --help` is quick; `runs/options.py` checks values and turns them
into a `RunConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, TypeVar, get_type_hints

from basisprune.budget.goal import Budget, Optimize
from basisprune.errors import ConfigError
from basisprune.recipes import FrameworkName
from basisprune.types import TEST_FRACTION, VAL_FRACTION, Augmentation, FloatType, Interpolation

if TYPE_CHECKING:
    from basisprune.recipes import Recipe
    from basisprune.search import SearchConfig
    from basisprune.tasks import Task

T = TypeVar("T")
Panel: TypeAlias = Literal["Budget", "Data", "Model", "Training", "Output", "Advanced"]
"""The groups of options in the help, in its order."""

RATIOS = ("basis_ratio", "filter_ratio")
BUDGETS = tuple(each.name for each in fields(Budget))
OBJECTS = ("recipe", "search", "metric", "task")
"""The options that may be objects in Python."""


@dataclass(frozen=True)
class Unit:
    """The units of a kind of number, with what each stands for, and what such a number looks like."""

    units: Mapping[str, float]
    wanted: str
    metavar: str
    whole: bool = False
    signed: bool = False

    def parse(self, text: object) -> float:
        """Return the number; raise ConfigError if the text is not one.

        >>> FRACTION.parse("1%"), LEVEL.parse("-3.2"), AMOUNT.parse("1.5M"), TIME.parse("0.2s")
        (0.01, -3.2, 1500000, 200.0)
        >>> AMOUNT.parse("many")
        Traceback (most recent call last):
        basisprune.errors.ConfigError: 'many' given; expected a number such as 250000, 300k or 1.5M
        """
        sign = "-?" if self.signed else ""
        match = re.fullmatch(rf"\s*({sign}[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z%]*)\s*", str(text))
        try:
            value = float(match[1]) * self.units[match[2]]  # type: ignore[index]
            if not math.isfinite(value):
                raise ValueError(text)
        except (TypeError, ValueError, KeyError):
            raise ConfigError(f"{text!r} given; expected {self.wanted}") from None
        return round(value) if self.whole else round(value, 12)


FRACTION = Unit({"": 1, "%": 0.01}, "a percentage such as 1% or a fraction such as 0.01", "PERCENT")
LEVEL = Unit({"": 1, "%": 0.01}, "a percentage such as 90% or a number such as 0.9 or -3.2", "PERCENT", signed=True)
AMOUNT = Unit(
    {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}, "a number such as 250000, 300k or 1.5M", metavar="NUMBER", whole=True
)
TIME = Unit({"": 1, "ms": 1, "s": 1000}, "a time such as 5ms or 0.1s", "TIME")


def numbers(text: object) -> list[float]:
    """Return numbers with commas between them, one for each channel or one for all; in a file, they may be a list.

    >>> numbers("0.485,0.456,0.406"), numbers([0.5])
    ([0.485, 0.456, 0.406], [0.5])
    """
    parts = text if isinstance(text, list) else str(text).split(",")
    try:
        return [float(str(part)) for part in parts]
    except ValueError:
        raise ConfigError(f"{text!r} given; expected numbers such as 0.485,0.456,0.406") from None


@dataclass(frozen=True)
class Option:
    """How an option is described in the help, and how its value is written on the command line and in files."""

    panel: Panel
    help: str
    unit: Unit | None = None
    metavar: str | None = None
    hidden: bool = False


def _option(default: T, panel: Panel, text: str, unit: Unit | None = None, **more: str | bool) -> T:
    """Declare an option as a field of a dataclass."""
    return field(default=default, metadata={"option": Option(panel, text, unit, **more)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that a `RunConfig` has as they are given."""

    max_drop: float | None = _option(None, "Budget", "Accuracy you can lose (default: 1%).", FRACTION)
    min_accuracy: float | None = _option(None, "Budget", "Minimum accuracy, such as 95%.", LEVEL)
    target_params: int | None = _option(None, "Budget", "Maximum number of parameters, such as 1.5M.", AMOUNT)
    target_macs: int | None = _option(None, "Budget", "Maximum number of multiply-adds, such as 200M.", AMOUNT)
    target_latency: float | None = _option(
        None, "Budget", "Maximum time per image on one CPU thread, such as 5ms.", TIME
    )
    basis_ratio: float | None = _option(None, "Budget", "No search: remove this share of basis vectors.", FRACTION)
    filter_ratio: float | None = _option(None, "Budget", "No search: remove this share of filters.", FRACTION)
    device: str | None = _option(
        None, "Budget", "Plan for the device that `basisprune profile` measured.", metavar="FILE"
    )
    confidence: float = _option(0.95, "Budget", "Confidence level at which an accuracy budget is certified.", FRACTION)
    require_certified: bool = _option(False, "Budget", "Exit with code 3 if the budget is only estimated to be kept.")

    size: int | None = _option(None, "Data", "Image height and width in pixels (default: the model's).")
    val_fraction: float = _option(VAL_FRACTION, "Data", "Held out for validation if the data has no val/.", FRACTION)
    test_fraction: float = _option(
        TEST_FRACTION, "Data", "Held out for the final test if the data has no test/.", FRACTION
    )
    confirm_fraction: float = _option(
        0.5, "Data", "Share of the validation images held out to confirm an accuracy budget at the end.", FRACTION
    )
    limit: int | None = _option(None, "Data", "Train on at most this many images.")
    groups: str | None = _option(
        None, "Data", "A CSV file of file,group: images of one group stay in the same split.", metavar="FILE"
    )
    strict: bool = _option(
        False, "Data", "Refuse damaged images, and images in several splits, instead of reporting them."
    )

    pretrained: bool = _option(True, "Model", "Start from pretrained weights.")
    weights: str | None = _option(
        None,
        "Model",
        "The model's weights: .safetensors, .pt, .pth, .ckpt, or a folder of Hugging Face or timm.",
        metavar="FILE",
    )
    weights_key: str | None = _option(
        None, "Model", "The entry of that file with the weights, such as state_dict_ema.", metavar="NAME"
    )
    keep_head: bool = _option(
        False, "Model", "The model is trained for these classes: keep its head, and do not train it before pruning."
    )
    tune_first: bool = _option(False, "Model", "With --keep-head: train it on your images before it is pruned.")
    mean: Sequence[float] | None = _option(
        None, "Model", "Subtracted from pixels of 0 to 1 (default: the model's).", metavar="NUMBERS"
    )
    std: Sequence[float] | None = _option(
        None, "Model", "Pixels are divided by it (default: the model's).", metavar="NUMBERS"
    )
    interpolation: Interpolation | None = _option(
        None, "Model", "How images are resized: bilinear, bicubic or nearest (default: the model's)."
    )
    trust_code: bool = _option(
        False, "Model", "Import the code that a bundle or a file of settings names; only if you trust its author."
    )

    seed: int = _option(0, "Training", "Random seed for the split, initialisation and training.")
    onnx: bool | None = _option(None, "Output", "Also write model.onnx (default: if its packages are installed).")
    int8: bool = _option(False, "Output", "Also write model.int8.onnx, calibrated on your images.")


@dataclass(frozen=True, kw_only=True)
class GivenOptions(RunOptions):
    """All options: also those that `configure` resolves, such as the name of a recipe."""

    optimize: Optimize | None = _option(
        None, "Budget", "Cost to minimise: params, macs or latency (default: params; latency for its target)."
    )
    metric: str | Callable[..., float] | None = _option(
        None,
        "Budget",
        "Metric of accuracy budgets: accuracy, balanced, macro-f1 or worst-class; for other tasks iou or dice, ap or "
        "f1, r2, mae or mse.",
    )
    task: str | Task = _option(
        "classification",
        "Budget",
        "What the model is for: classification, segmentation, multilabel, regression, or package.module:task.",
    )
    recipe: str | Mapping[str, object] | Recipe = _option(
        "quick", "Training", "Settings of all stages: quick, best, paper, paper:cifar10, ...", metavar="NAME"
    )
    epochs: int | None = _option(None, "Training", "Training epochs (default: the recipe's).")
    augment: Augmentation | None = _option(
        None, "Training", "How training images are changed: auto, none, light or strong (default: the recipe's)."
    )
    precision: FloatType | None = _option(
        None, "Training", "Numbers to train in: auto, float32, bfloat16 or float16 (default: the recipe's)."
    )
    framework: FrameworkName | None = _option(
        None, "Advanced", "Pruning method: basis, l1, taylor, hrank, loss, basis+taylor, ... (default: the recipe's)."
    )
    search: Mapping[str, object] | SearchConfig | None = _option(
        None, "Advanced", "Settings of the search.", hidden=True
    )


class Options(TypedDict, total=False):
    """The names and types of `GivenOptions` for type checkers, in the order of the help; a test compares the two."""

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
    val_fraction: float
    test_fraction: float
    confirm_fraction: float
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
    seed: int
    onnx: bool | None
    int8: bool
    framework: FrameworkName | None
    search: Mapping[str, object] | SearchConfig | None


@dataclass(frozen=True)
class Declared:
    """An option with its name, type and default."""

    name: str
    type: object
    default: object
    option: Option


def _declared() -> dict[str, Declared]:
    elsewhere = dict.fromkeys(("Recipe", "SearchConfig", "Task"), object)  # classes of modules that load torch
    types, every = get_type_hints(GivenOptions, localns=elsewhere), {each.name: each for each in fields(GivenOptions)}
    return {
        name: Declared(name, types[name], every[name].default, **every[name].metadata)
        for name in Options.__annotations__
    }


OPTIONS = _declared()
"""All options by name, in the order of the help."""


def names_in(*panels: Panel) -> tuple[str, ...]:
    """Return the names of the options in these panels.

    >>> names_in("Output")
    ('onnx', 'int8')
    """
    return tuple(name for name, each in OPTIONS.items() if each.option.panel in panels)


TRAIN_OPTIONS = tuple(name for name in names_in("Data", "Model", "Training") if name != "tune_first")
"""The options of `basisprune train`."""
