"""How a network is trained: the settings of `fit`, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from basisprune.data.transforms import Augment
from basisprune.errors import ConfigError, broken_rules

Optimizer = Literal["sgd", "adamw"]
Trained = Literal["method", "all"]
NormStatistics = Literal["batch", "fixed"]
Precision = Literal["no", "fp16", "bf16"]
Tracker = Literal["tensorboard", "mlflow", "wandb"]

LARGEST_SEED = 2**32 - 1  # the seed of an epoch is made of it, and must be one for torch
_MOST = 10**6


@dataclass(frozen=True)
class Choices:
    """What a training finds out by itself, in short runs on a part of the training images (`training/choosing.py`).

    Learning rates are tried upwards and downwards from the configured one, in steps of a factor `spread`. With
    `statistics`, statistics of the batch are tried as well as fixed ones; with `augmentation`, mirroring and crops are
    kept if they do not hurt; with `precision`, bfloat16 is used where it is faster. All of it together costs at most
    the share `cost` of the training. `held_out` is the share of the training images that judges the short runs, and
    the epochs afterwards.
    """

    spread: float = 3.0
    statistics: bool = True
    augmentation: bool = False
    precision: bool = False
    cost: float = 0.25
    held_out: float = 0.1

    def __post_init__(self) -> None:
        faults = broken_rules(
            self,
            ("spread", lambda value: value > 1, "a factor above 1 is needed"),
            ("cost", lambda value: 0 < value <= 1, "a share of the training in (0, 1] is needed"),
            ("held_out", lambda value: 0 < value <= 0.5, "a share of the training images in (0, 0.5] is needed"),
        )
        if faults:
            raise ConfigError.of("Choices", faults)


@dataclass(frozen=True)
class TrainConfig:
    """How `fit` trains; the defaults are the paper's recipe, without its augmentations.

    `norm_statistics="fixed"` keeps the running statistics of BN as they are while its scale and shift are trained;
    "batch" is ordinary BN, whose running statistics follow with `norm_momentum` (None: each norm's own).
    `dropout=False` switches off dropout and stochastic depth, which only pay in long trainings. With
    `train_scales=False` the basis scaling factors stay as they are, as in a plain truncated SVD. `distill` is the
    weight of what a teacher says, 0 to 1, at `distill_temperature` (Hinton et al., 2015); the labels have the rest.

    With `train="all"` the weights learn too that the method keeps frozen: dense convs and the factors of pairs.
    Norms, scales and classifier learn at `lr` (the classifier times `head_lr`), these weights at `weight_lr` of it,
    for adamw times the size of each (`weight_share`) if `relative`. They join after the share `head_first` of all
    steps, when the classifier is no longer random (LP-FT; Kumar et al., 2022), and warm up then. `clip_norm` bounds
    the norm of all gradients of a step.

    With `patience`, the training ends after this many epochs without a better accuracy on the validation images, and
    keeps the best weights; that accuracy was chosen for being high, so that it flatters. With `choices`, the training
    finds its own learning rate and more, holds out some of the training images to judge by, keeps the weights of its
    best epoch by them, and starts again at a third of the rate if it diverges.

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
    norm_momentum: float | None = None
    dropout: bool = True
    train_scales: bool = True
    train: Trained = "method"
    weight_lr: float = 0.3
    relative: bool = True
    head_lr: float = 1.0
    head_first: float = 0.0
    clip_norm: float | None = None
    patience: int | None = None
    augmentation: Augment = field(default_factory=Augment)
    seed: int = 0
    workers: int = 0
    mixed_precision: Precision = "no"
    channels_last: bool = True
    tracker: Tracker | None = None
    choices: Choices | None = None

    def __post_init__(self) -> None:
        positive = "lr weight_lr head_lr norm_momentum clip_norm distill_temperature"
        faults = broken_rules(
            self,
            ("epochs batch_size patience", lambda value: value >= 1, "at least 1 is needed"),
            ("seed workers weight_decay", lambda value: value >= 0, "at least 0 is needed"),
            ("epochs batch_size workers", lambda value: value <= _MOST, f"at most {_MOST:,} is allowed"),
            ("seed", lambda value: value <= LARGEST_SEED, f"at most {LARGEST_SEED:,} is allowed"),
            (positive, lambda value: 0 < value < math.inf, "it must be positive"),
            ("warmup momentum label_smoothing head_first", lambda value: 0 <= value < 1, "allowed is 0 <= value < 1"),
            ("distill", lambda value: 0 <= value <= 1, "allowed is 0 to 1"),
            ("weight_decay", lambda value: value < math.inf, "it must be finite"),
        )
        if 0 < self.lr < math.inf and not 0 <= self.min_lr <= self.lr:
            faults.append(f"min_lr: {self.min_lr} given, allowed is 0 to lr ({self.lr})")
        choices = {
            "optimizer": get_args(Optimizer),
            "norm_statistics": get_args(NormStatistics),
            "train": get_args(Trained),
            "mixed_precision": get_args(Precision),
            "tracker": (None, *get_args(Tracker)),
        }
        for name, allowed in choices.items():
            faults += broken_rules(self, (name, allowed.__contains__, f"allowed are {', '.join(map(repr, allowed))}"))
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


def weights_ramp(config: TrainConfig, done: float) -> float:
    """How much of their rate the weights have that the method alone would not train: 0 until `head_first`, then
    rising to 1 over as many steps as `warmup` is long.

    >>> config = TrainConfig(train="all", head_first=0.25, warmup=0.1)
    >>> [round(weights_ramp(config, done), 2) for done in (0, 0.24, 0.3, 0.35, 1)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if done < config.head_first:
        return 0.0
    if config.head_first == 0 or config.warmup == 0:
        return 1.0
    return min(1.0, max(done - config.head_first, 1e-3) / config.warmup)
