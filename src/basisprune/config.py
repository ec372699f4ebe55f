"""The settings of every stage and the presets, in one place for the API, the command line and experiments."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from basisprune.data.augment import Augment
from basisprune.decompose import Basis
from basisprune.errors import ConfigError
from basisprune.plan import PlanConfig
from basisprune.prune import Compensation

Optimizer = Literal["sgd", "adamw"]
NormStatistics = Literal["batch", "fixed"]
Precision = Literal["no", "fp16", "bf16"]
Tracker = Literal["tensorboard", "mlflow", "wandb"]


@dataclass(frozen=True)
class TrainConfig:
    """How `fit` trains; the defaults are the paper's recipe, without its augmentations.

    `norm_statistics="fixed"` keeps the running statistics of BN as they are while its scale and shift are
    trained; "batch" is ordinary BN. With `train_scales=False` the basis scaling factors stay as they are, as in
    a plain truncated SVD. `prepared` says that the images are normalised floats already. `distill` is the
    weight of what a teacher says, 0 to 1, at `distill_temperature` (Hinton et al., 2015); the labels have the rest.

    >>> TrainConfig(epochs=0, lr=-1)
    Traceback (most recent call last):
    basisprune.errors.ConfigError: TrainConfig: 2 faults
      - epochs: 0 given, at least 1 is needed
      - lr: -1 given, it must be positive
    """

    epochs: int = 100
    batch_size: int = 128
    optimizer: Optimizer = "sgd"
    lr: float = 1e-1
    min_lr: float = 1e-4
    warmup: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    distill: float = 0.0
    distill_temperature: float = 2.0
    norm_statistics: NormStatistics = "batch"
    train_scales: bool = True
    augmentation: Augment = field(default_factory=Augment)
    prepared: bool = False
    seed: int = 0
    workers: int = 0
    mixed_precision: Precision = "no"
    channels_last: bool = True
    tracker: Tracker | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {getattr(self, name)} given, at least 1 is needed"
            for name in ("epochs", "batch_size")
            if getattr(self, name) < 1
        ]
        if not 0 < self.lr < math.inf:
            faults.append(f"lr: {self.lr} given, it must be positive")
        elif not 0 <= self.min_lr <= self.lr:
            faults.append(f"min_lr: {self.min_lr} given, allowed is 0 to lr ({self.lr})")
        faults += [
            f"{name}: {getattr(self, name)} given, allowed is 0 <= {name} < 1"
            for name in ("warmup", "momentum", "label_smoothing")
            if not 0 <= getattr(self, name) < 1
        ]
        if not 0 <= self.distill <= 1:
            faults.append(f"distill: {self.distill} given, allowed is 0 to 1")
        if not 0 < self.distill_temperature < math.inf:
            faults.append(f"distill_temperature: {self.distill_temperature} given, it must be positive")
        if self.weight_decay < 0 or self.workers < 0:
            faults.append(f"weight_decay, workers: {self.weight_decay}, {self.workers} given; not negative")
        choices = {
            "optimizer": get_args(Optimizer),
            "norm_statistics": get_args(NormStatistics),
            "mixed_precision": get_args(Precision),
            "tracker": (None, *get_args(Tracker)),
        }
        faults += [
            f"{name}: {getattr(self, name)!r} given, allowed are {', '.join(map(repr, allowed))}"
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]
        if faults:
            raise ConfigError.of("TrainConfig", faults)


def learning_rate(config: TrainConfig, done: float) -> float:
    """The learning rate after the fraction `done` of all steps: linear warm-up, then one half cosine.

    >>> paper = TrainConfig(lr=0.1, min_lr=1e-4)
    >>> [round(learning_rate(paper, done), 4) for done in (0, 0.5, 1)]
    [0.1, 0.0501, 0.0001]
    """
    if done < config.warmup:
        return config.lr * min(1.0, max(done, 1e-3) / config.warmup)
    along = (done - config.warmup) / (1 - config.warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * along)) / 2


@dataclass(frozen=True)
class Recipe:
    """All settings of a framework: how to decompose, train, plan, prune and train again.

    `basis_images` is how many training images the basis "outputs" is found on. `score_images` sets so many
    validation images apart for the scores, at most half, so that networks are judged by images that had no say
    in them; with None all validation images do both, as in the paper. Scores are averages over batches of
    `score_batch` images: the smaller a batch, the more squares there are to average. `compensate` is what
    `prune_basis` does about the contribution of pruned basis vectors: "none", "mean" or "refit". With `rebase`,
    every pair is turned to the principal axes of its outputs before its basis vectors are scored.
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

    def __post_init__(self) -> None:
        faults = []
        if self.compensate not in get_args(Compensation):
            faults.append(f"compensate: {self.compensate!r} given; allowed are {', '.join(get_args(Compensation))}")
        for name in ("basis_images", "score_images", "score_batch"):
            count = getattr(self, name)
            if count is not None and count < 1:
                faults.append(f"{name}: {count} given; at least 1 is needed")
        if self.filter_plan.per != "vector":
            faults.append(f"filter_plan.per: {self.filter_plan.per!r} given; filters allow 'vector' alone")
        if faults:
            raise ConfigError.of("Recipe", faults)


PAPER_DATASETS = {
    "cifar10": (128, Augment(shift=0.15, flip=True)),
    "mnist": (112, Augment(shift=0.15, rotation=15.0)),
    "fashion_mnist": (112, Augment(shift=0.15, flip=True)),
}
"""For each of the paper's datasets: the side that its images are enlarged to, and how they are moved."""

_PAPER_TRAINING = TrainConfig(augmentation=Augment(shift=0.15))
_QUICK_TRAINING = TrainConfig(
    epochs=8,
    batch_size=32,
    optimizer="adamw",
    lr=3e-3,
    min_lr=3e-5,
    norm_statistics="fixed",
    augmentation=Augment(shift=0.05),
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
    ),
    "quick": Recipe(
        basis="outputs",
        scale_init=1.0,
        compensate="refit",
        train=_QUICK_TRAINING,
        finetune=_QUICK_TRAINING,
        plan=PlanConfig(round_to=8),  # runtimes compute other numbers of channels up to several times slower
        filter_plan=PlanConfig(normalise="max", round_to=8),
        score_batch=8,
    ),
}
"""The presets: the paper's protocol, and a short one found by `benchmarks/recipe.py`, `plan.py` and `scores.py`."""


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name, or the recipe itself.

    "paper" has the shifts that the paper uses for all its datasets; "paper:cifar10", "paper:mnist" and
    "paper:fashion_mnist" have the flips or rotations too that it uses for these. The side that it enlarges the
    images to is in `PAPER_DATASETS`, for `transfer_model(input_size=)`.

    >>> find_recipe("paper:mnist").train.augmentation
    Augment(shift=0.15, flip=False, rotation=15.0)

    >>> find_recipe("papr")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: recipe: 'papr' given; allowed are paper, quick. Did you mean 'paper'?
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in RECIPES:
        return RECIPES[recipe]
    name, _, dataset = recipe.partition(":")
    if name == "paper" and dataset in PAPER_DATASETS:
        training = replace(_PAPER_TRAINING, augmentation=PAPER_DATASETS[dataset][1])
        return replace(RECIPES["paper"], train=training, finetune=training)
    close = difflib.get_close_matches(recipe, RECIPES, n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"recipe: {recipe!r} given; allowed are {', '.join(RECIPES)}{hint}")
