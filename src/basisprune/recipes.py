"""The paper's frameworks (Section 4.2), and the settings of every stage with their presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from basisprune.basis.decompose import Basis, LinearLayers
from basisprune.data.transforms import Augment
from basisprune.errors import ConfigError, broken_rules, nearest
from basisprune.planning import PlanConfig
from basisprune.pruning import Compensation
from basisprune.tasks import Task
from basisprune.training.config import Choices, Precision, TrainConfig
from basisprune.types import Augmentation, FloatType, FrameworkName

Axis: TypeAlias = Literal["basis", "filters"]


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
LOOKED_AT, TUNED = Step("tuned briefly"), Step("tuned")


def named(steps: Steps) -> str:
    """Describe the steps in words.

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
    """Return the framework of that name.

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


BasisScores: TypeAlias = Literal["taylor", "loss"]


@dataclass(frozen=True)
class Recipe:
    """All settings of a framework: how to decompose, train, plan, prune and train again.

    `basis_images` is the number of training images for the bases "outputs" and "loss"; `linear` says whether linear
    layers are split too, as in `decompose`. With `rebase`, every pair is rotated to the principal axes of its outputs
    (in the metric of the loss, if that is the basis) before its basis vectors are scored. `scores` ranks these:
    "taylor" is the paper's, on validation images; "loss" estimates the loss itself, on the training images of the
    basis. `score_images` holds out this many validation images for the scores, at most half, so that networks are
    judged on images that did not influence them; None: all validation images serve both purposes, as in the paper.
    Scores are averages over batches of `score_batch` images: the smaller the batch, the more squares are averaged.
    `compensate` is how `prune_basis` compensates for pruned basis vectors, `filter_compensate` how `prune_filters`
    compensates for pruned filters: "none", "mean" or "refit". `framework` is the default pruning method.
    """

    basis: Basis
    scale_init: float
    compensate: Compensation
    train: TrainConfig
    finetune: TrainConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    filter_plan: PlanConfig = field(default_factory=lambda: PlanConfig(normalise="max"))
    basis_images: int = 512
    score_images: int | None = None
    score_batch: int = 128
    rebase: bool = False
    scores: BasisScores = "taylor"
    filter_compensate: Compensation = "none"
    framework: FrameworkName = "basis+taylor"
    linear: LinearLayers = "auto"

    def __post_init__(self) -> None:
        choices = {
            "compensate filter_compensate": get_args(Compensation),
            "basis": get_args(Basis),
            "scores": get_args(BasisScores),
            "framework": get_args(FrameworkName),
            "linear": (True, False, "auto"),
        }
        faults = [
            fault
            for names, allowed in choices.items()
            for fault in broken_rules(
                self, (names, allowed.__contains__, f"allowed are {', '.join(map(str, allowed))}")
            )
        ]
        counts = "basis_images score_images score_batch"
        faults += broken_rules(self, (counts, lambda count: count >= 1, "at least 1 is needed"))
        if self.basis == "loss" and self.scale_init != 1.0:
            computed = "the basis 'loss' is computed on a trained network"
            faults.append(f"scale_init: {self.scale_init} given; {computed}; pass 1.0")
        if self.filter_plan.per != "vector":
            faults.append(f"filter_plan.per: {self.filter_plan.per!r} given; only 'vector' is allowed for filters")
        if faults:
            raise ConfigError.of("Recipe", faults)

    def with_training(self, change: Callable[[TrainConfig], TrainConfig]) -> Recipe:
        return replace(self, train=change(self.train), finetune=change(self.finetune))

    def foresees(self, move: Move) -> bool:
        """Whether the scores of all that the move prunes are in units of the loss.

        >>> RECIPES["quick"].foresees(Move("both", "loss")), RECIPES["paper"].foresees(Move("filters", "l1"))
        (True, False)
        """
        return ("filters" not in move.axes or move.scores == "loss") and (
            "basis" not in move.axes or self.scores == "loss"
        )


PAPER_DATASETS = {
    "cifar10": (128, Augment(shift=0.15, flip=True)),
    "mnist": (112, Augment(shift=0.15, rotation=15.0)),
    "fashion_mnist": (112, Augment(shift=0.15, flip=True)),
}
"""For each of the paper's datasets: the size that its images are enlarged to, and their augmentation."""

_PAPER_TRAINING = TrainConfig(augmentation=Augment(shift=0.15))
_QUICK_TRAINING = TrainConfig(
    epochs=5,
    batch_size=32,
    optimizer="adamw",
    lr=1.7e-4,  # where the search for the rate starts
    min_lr=0.0,
    head_lr=10.0,
    warmup=0.1,  # a trained network forgets in the first steps at the full rate, and a thin one may diverge
    weight_decay=0.01,
    label_smoothing=0.1,
    norm_statistics="fixed",
    dropout=False,  # in few steps it costs a point (docs/training.md)
    train="all",
    weight_lr=1.0,
    relative=False,
    clip_norm=5.0,
    augmentation=Augment(shift=0.05),
    choices=Choices(augmentation=True, precision=True),
)
_LONG_TRAINING = replace(_QUICK_TRAINING, epochs=50, patience=15, dropout=True)
_QUICK = Recipe(
    basis="loss",
    scale_init=1.0,
    compensate="refit",
    train=_QUICK_TRAINING,
    finetune=_QUICK_TRAINING,
    plan=PlanConfig(round_to=8),  # runtimes can be several times slower with other channel counts
    filter_plan=PlanConfig(normalise="max", round_to=8),
    basis_images=1024,  # with few images some directions seem free that are not (docs/loss-basis.md)
    score_batch=8,
    rebase=True,
    scores="loss",
    filter_compensate="refit",
    framework="loss+basis",
)

RECIPES = {
    "paper": Recipe(
        basis="weights",
        scale_init=0.5,
        compensate="none",
        train=_PAPER_TRAINING,
        finetune=_PAPER_TRAINING,
        plan=PlanConfig(normalise="max", min_share=0.0),
        filter_plan=PlanConfig(normalise="max", min_share=0.0),
        linear=False,
    ),
    "quick": _QUICK,
    "best": replace(
        _QUICK,
        train=_LONG_TRAINING,
        finetune=replace(_LONG_TRAINING, distill=0.5),
    ),
}
"""The presets: the paper's protocol; a short one, with scores in units of the loss and all weights trained
(docs/loss-basis.md); and one with ten times the training and the unpruned network as teacher."""


AUGMENTATIONS: dict[Augmentation, Augment] = {
    "none": Augment(),
    "light": Augment(shift=0.05),
    "strong": Augment(shift=0.1, flip=True, crop=0.5, colour=0.3),
}
_PRECISIONS: dict[FloatType, Precision] = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def trained_with(
    recipe: Recipe, *, augment: Augmentation | None = None, precision: FloatType | None = None, **changes: int | None
) -> Recipe:
    """Return the recipe with this augmentation and precision in all trainings; "auto" has each training find its own.

    >>> trained_with(RECIPES["quick"], augment="none", epochs=3).train.augmentation
    Augment(shift=0.0, flip=False, rotation=0.0)
    """
    faults = [
        f"{name}: {given!r} given; allowed are {', '.join(get_args(kind))}"
        for name, given, kind in (("augment", augment, Augmentation), ("precision", precision, FloatType))
        if given is not None and given not in get_args(kind)
    ]
    faults += [
        f"{name}: 'auto' given, but the recipe makes no choices; name one, or take another recipe"
        for name, given in (("augment", augment), ("precision", precision))
        if given == "auto" and recipe.train.choices is None
    ]
    if faults:
        raise ConfigError.of("Recipe", faults)

    others = {name: value for name, value in changes.items() if value is not None}

    def changed(config: TrainConfig) -> TrainConfig:
        chosen = {"augmentation": augment, "precision": precision}
        autos = {name: given == "auto" for name, given in chosen.items() if given is not None}
        choices = config.choices and replace(config.choices, **autos)
        fixed = AUGMENTATIONS.get(augment or "auto", config.augmentation)
        mixed = _PRECISIONS.get(precision or "auto", config.mixed_precision)
        return replace(config, choices=choices, augmentation=fixed, mixed_precision=mixed, **others)  # type: ignore[arg-type]

    return recipe.with_training(changed)


def for_task(recipe: Recipe, task: Task) -> Recipe:
    """Return the recipe without what the task has no use for: smoothing and blending of classes, or a teacher."""

    def changed(config: TrainConfig) -> TrainConfig:
        if task.distance is None:
            config = replace(config, distill=0.0)
        if task.augments:
            return config
        return replace(config, label_smoothing=0.0, augmentation=replace(config.augmentation, mixup=0.0, cutmix=0.0))

    return recipe.with_training(changed)


def for_own_inputs(recipe: Recipe) -> Recipe:
    """Return the recipe for inputs from a user's own loader: taken as they are, without augmentation."""

    def changed(config: TrainConfig) -> TrainConfig:
        blends = Augment(mixup=config.augmentation.mixup, cutmix=config.augmentation.cutmix)
        return replace(config, augmentation=blends)

    return recipe.with_training(changed)


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Return the recipe of that name, or the recipe itself.

    "paper" has the shifts that the paper uses for all its datasets; "paper:cifar10", "paper:mnist" and
    "paper:fashion_mnist" add the flips or rotations it uses for these. The size it enlarges images to is in
    `PAPER_DATASETS`, for `transfer_model(input_size=)`.

    >>> find_recipe("paper:mnist").train.augmentation
    Augment(shift=0.15, flip=False, rotation=15.0)

    >>> find_recipe("papr")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: recipe: 'papr' given; allowed are paper, quick, best, paper:cifar10, paper:mnist, \
paper:fashion_mnist. Did you mean 'paper'?
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in RECIPES:
        return RECIPES[recipe]
    name, _, dataset = recipe.partition(":")
    if name == "paper" and dataset in PAPER_DATASETS:
        training = replace(_PAPER_TRAINING, augmentation=PAPER_DATASETS[dataset][1])
        return replace(RECIPES["paper"], train=training, finetune=training)
    allowed = (*RECIPES, *(f"paper:{name}" for name in PAPER_DATASETS))
    raise ConfigError(f"recipe: {recipe!r} given; allowed are {', '.join(allowed)}.{nearest(recipe, allowed)}")
