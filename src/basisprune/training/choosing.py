"""What a training finds out by itself: its learning rate, statistics, augmentation and precision.

No rate suits all networks: 1e-3 trains one and ruins the next. So a few short runs from the same start are compared on
some training images that none of them learns from. Validation and confirming images choose nothing.

`divide` holds these images out; `choose` then makes the choices in this order: the precision, the rate (walking
from the configured one to the least loss), statistics of the batch, crops, and mirroring, which needs no run.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from basisprune.data import (
    Augment,
    LabelledImages,
    LoaderPart,
    WrappedDataset,
    hold_out,
    make_loader,
    own_part,
    prepare,
    take,
)
from basisprune.torchkit.processes import Processes
from basisprune.training.config import Choices, NormStatistics, TrainConfig
from basisprune.training.evaluation import Data, Evaluation
from basisprune.training.lessons import Feed, Session
from basisprune.training.trainer import Images, Trainer, make_accelerator
from basisprune.transfer.model import spec_of
from basisprune.types import InputSpec

_FEWEST_STEPS, _MOST_STEPS = 8, 100
"""The length of a short run: shorter ones tell nothing, longer ones not more."""
_FEWEST_IMAGES, _MOST_IMAGES = 20, 1000
"""How many images can judge epochs, and how many are enough to."""
_EVALUATION = 1 / 3
"""What judging an image costs, of what learning from it costs."""
_LONGER = 1.5
"""A full training bears a rate higher than short runs by this factor: it has time to settle (docs/method.md)."""
_CLEARLY = 0.7
"""Statistics of the batch must leave at most this share of the loss: they learn faster at first, and end worse."""
_LEARNT, _DIVERGED = 0.95, 2.0
"""Shares of the loss at the start: below the one, a short run has learnt; above the other, it has diverged."""
_RENEWALS, _USUAL_MOMENTUM = 5, 0.1
"""How often a run with statistics of the batch renews them: some norms follow so slowly that they would lag behind."""
_TIMED_STEPS = 3
_FASTER, _AS_GOOD = 0.8, 1.05
"""bfloat16 is taken from this share of the time on, at no more than this share of the loss."""
_MANY_EPOCHS, _CROP = 10, 0.6
"""Crops pay from this many epochs on; they cut out at least this part of the area."""
_SIDE, _FOLDS = 16, 5
_RIDGE = 1.0
"""Of the mean variance of the images, so that the classifier of mirrored images does not follow single ones."""
_DEVIATIONS, _DROP = 2.5, 0.1
"""Mirrored images are others where so many standard errors, and this share of what beats chance, are lost."""


CHOSEN = ("lr", "min_lr", "norm_statistics", "norm_momentum", "mixed_precision", "augmentation")
"""The settings that are chosen."""


@dataclass(frozen=True)
class Short:
    """A short run: its settings, and what it reached on the images held out."""

    lr: float
    statistics: NormStatistics
    found: Evaluation | None

    @property
    def loss(self) -> float:
        return self.found.loss if self.found is not None and math.isfinite(self.found.loss) else math.inf


@dataclass(frozen=True)
class Halves:
    """Training images for the short runs, and for the training proper."""

    short: Images
    proper: Images


def divide(model: nn.Module, images: Images, config: TrainConfig, session: Session) -> Halves:
    """Hold out some of the training images to judge by.

    They stay out of the training proper, and judge its epochs, unless they are too few or come from a loader, whose
    batches cannot be told apart from pass to pass.
    """
    assert config.choices is not None
    data: Any = images.train
    rest: Data
    part: Data
    is_own = own_part(data, session.task, config.batch_size) is not None or isinstance(data, DataLoader)
    if is_own and (not isinstance(data, Dataset) or isinstance(data, IterableDataset | LoaderPart)):
        return Halves(_first_batches(data, session), images)
    if is_own:
        wanted = _wanted(len(data), config.choices.held_out)
        order = np.random.default_rng(config.seed).permutation(len(data)).tolist()
        part, rest = Subset(data, sorted(order[:wanted])), Subset(data, sorted(order[wanted:]))
    else:
        known = data if isinstance(data, LabelledImages) else WrappedDataset(data, size=spec_of(model).image_size)
        share = _wanted(len(known), config.choices.held_out) / max(len(known), 1)
        rest, part = hold_out(known, share, config.seed)
    short = Images(rest, held_out=part)
    return Halves(short, images if _count(part) < _FEWEST_IMAGES else replace(images, train=rest, held_out=part))


def _wanted(count: int, share: float) -> int:
    """Return how many images judge; a quarter of few, where they are not lost to the training."""
    wanted = min(round(share * count), _MOST_IMAGES)
    return wanted if wanted >= _FEWEST_IMAGES else round(count / 4)


def _first_batches(data: Data, session: Session) -> Images:
    """Return the first batches of a loader, kept: most to learn from, the last ones to judge by."""
    batches = list(islice(cast("Iterable[object]", data.loader if isinstance(data, LoaderPart) else data), _MOST_STEPS))
    learn = len(batches) - max(1, len(batches) // 5)

    def kept(some: list[object]) -> Data:
        if isinstance(data, DataLoader):
            return DataLoader(cast("Dataset[object]", some), batch_size=None, collate_fn=_as_it_is)
        return LoaderPart(some, session.task)

    return Images(kept(batches[:learn]), held_out=kept(batches[learn:]))


def _as_it_is(batch: object) -> object:
    return batch


def choose(model: nn.Module, halves: Halves, config: TrainConfig, session: Session) -> TrainConfig:
    """Return the configuration with all choices made; the model is not changed.

    If the training is too short for short runs to tell anything, the configuration stays as it is.
    """
    assert config.choices is not None
    return _Chooser(model, halves, config, config.choices, session).chosen()


class _Chooser:
    def __init__(
        self, model: nn.Module, halves: Halves, config: TrainConfig, choices: Choices, session: Session
    ) -> None:
        self.model, self.images, self.choices, self.session = model, halves.short, choices, session
        self.asked, self.config = config, replace(config, choices=None, tracker=None)
        self.runs: list[Short] = []
        self.start = math.inf
        self.last: tuple[TrainConfig, Evaluation | None] | None = None
        # How many runs the budget affords, and of how many steps.
        accelerator = session.accelerator or make_accelerator(config)
        self.total = config.epochs * Feed(halves.proper.train, session.task, model, config, accelerator).steps
        judging = _count(self.images.held_out) / config.batch_size * _EVALUATION
        budget = choices.cost * self.total - judging
        affordable = int(budget / (_FEWEST_STEPS + judging))
        statistics = choices.statistics and _has_statistics(model) and config.norm_statistics == "fixed"
        crops = choices.augmentation and self._sees_images and config.epochs >= _MANY_EPOCHS
        self.crops = crops and affordable >= 3 + statistics + crops
        self.statistics = statistics and affordable > 3
        runs = min(3 + self.statistics + self.crops, affordable)
        self.steps = min(int(budget / max(runs, 1) - judging), _MOST_STEPS)
        self.most = runs - self.crops

    def chosen(self) -> TrainConfig:
        plain = replace(self.asked, choices=None)
        if self.most < 2:
            return plain
        if self.choices.precision and self.session.accelerator is None:
            self._choose_precision()
        start = self._trainer(self.config).evaluated(self.images.held_out)
        self.start = start.loss if start is not None and start.loss > 0 else math.inf
        lr, statistics = self._choose_rate()
        chosen = replace(plain, mixed_precision=self.config.mixed_precision)
        chosen = _at(chosen, lr * _LONGER, statistics, self.total)
        if self.choices.augmentation and self._sees_images:
            chosen = replace(chosen, augmentation=self._choose_augmentation())
        share = (len(self.runs) + self.crops) * self.steps / self.total
        kind = "statistics of the batch" if statistics == "batch" else "fixed statistics"
        cost = f"{len(self.runs)} short runs ({share:.0%} of a training)"
        self.session.log(f"learning rate {chosen.lr:.2g}, {kind}: the best of {cost}")
        return chosen

    def _choose_precision(self) -> None:
        """Take bfloat16 if a few steps are clearly faster in it, and a short run is as good."""
        if self.config.mixed_precision != "no" or not _has_bfloat16(make_accelerator(self.config).device):
            return
        half = replace(self.config, mixed_precision="bf16")
        times = [(self._seconds(half), self._seconds(self.config)) for _ in range(2)]
        fast, slow = (min(each) for each in zip(*times, strict=True))
        is_faster = fast < _FASTER * slow  # which the main process finds for all
        if Processes.here().from_main(lambda: b"1" if is_faster else b"0") != b"1":
            return
        full, rough = self._reached(self.config), self._reached(half)
        if full is not None and rough is not None and rough.loss <= full.loss * _AS_GOOD:
            self.config = half

    def _choose_rate(self) -> tuple[float, NormStatistics]:
        """Walk towards the rate of least loss, then try statistics of the batch at the next higher one."""
        spread, first, kept = self.choices.spread, self.config.lr, self.config.norm_statistics
        low, high = self._run(first, kept), self._run(first * spread, kept)
        last, factor = (high, spread) if high.loss < low.loss else (low, 1 / spread)
        while len(self.runs) < self.most - self.statistics:
            following = self._run(last.lr * factor, kept)
            if not following.loss < last.loss:
                break
            last = following
        best = min(self.runs, key=lambda run: run.loss)
        if self.statistics and len(self.runs) < self.most:
            other = self._run(best.lr * spread, "batch")
            has_learnt = best.loss < _LEARNT * self.start
            if other.loss < (_CLEARLY * best.loss if has_learnt else _LEARNT * self.start):
                return other.lr, "batch"
        if best.loss > _DIVERGED * self.start or math.isinf(best.loss):
            return first / spread**2, kept
        return _least(self.runs, kept), kept

    def _choose_augmentation(self) -> Augment:
        """Add mirroring where mirrored images are like the others, and crops in long trainings if they do not hurt."""
        settings = self.config.augmentation
        if self.crops:
            best, cropped = min(self.runs, key=lambda run: run.loss), replace(settings, crop=_CROP)
            config = _at(replace(self.config, augmentation=cropped), best.lr, best.statistics, self.steps)
            found = self._reached(config)
            settings = cropped if found is not None and found.loss <= best.loss else settings
        images = cast("LabelledImages", self.images.train)
        mirrors = may_be_mirrored(images, spec_of(self.model), seed=self.config.seed)
        return replace(settings, flip=True) if mirrors else settings

    @property
    def _sees_images(self) -> bool:
        """Whether there are pixels and classes to try augmentations on."""
        return self.session.task.augments and all(
            isinstance(part, LabelledImages) and not isinstance(part, LoaderPart)
            for part in (self.images.train, self.images.held_out)
        )

    def _run(self, lr: float, statistics: NormStatistics) -> Short:
        self.runs.append(Short(lr, statistics, self._reached(_at(self.config, lr, statistics, self.steps))))
        return self.runs[-1]

    def _reached(self, config: TrainConfig) -> Evaluation | None:
        """Return what a copy reached in a short run; None if it diverged."""
        if self.last is None or self.last[0] != config:
            trainer = self._trainer(config)
            self.last = config, trainer.evaluated(self.images.held_out) if trainer.sprint(self.steps) else None
        return self.last[1]

    def _seconds(self, config: TrainConfig) -> float:
        """Return how long a few steps take; the first ones, in which kernels are chosen, do not count."""
        trainer = self._trainer(config)
        trainer.sprint(1)
        start = time.perf_counter()
        trainer.sprint(_TIMED_STEPS)
        return time.perf_counter() - start

    def _trainer(self, config: TrainConfig) -> Trainer:
        accelerator = self.session.accelerator or make_accelerator(config)
        return Trainer(copy.deepcopy(self.model), self.images, config, accelerator, self.session)


def _at(config: TrainConfig, lr: float, statistics: NormStatistics, steps: int) -> TrainConfig:
    momentum = config.norm_momentum
    if statistics != config.norm_statistics:
        momentum = min(max(_RENEWALS / steps, _USUAL_MOMENTUM), 0.5)
    lowest = config.min_lr * lr / config.lr
    return replace(config, lr=lr, min_lr=lowest, norm_statistics=statistics, norm_momentum=momentum)


def _least(runs: list[Short], statistics: NormStatistics) -> float:
    """Return the rate of least loss: the vertex of the parabola through the best run and its neighbours.

    Losses of runs that diverged count as twice the best, which is bad enough.
    """
    tried = sorted((run for run in runs if run.statistics == statistics), key=lambda run: run.lr)
    best = min(range(len(tried)), key=lambda place: tried[place].loss)
    if not 0 < best < len(tried) - 1:
        return tried[best].lr
    low, middle, high = (min(run.loss, 2 * tried[best].loss) for run in tried[best - 1 : best + 2])
    bend = low - 2 * middle + high
    offset = (low - high) / (2 * bend) if bend > 0 else 0.0
    return float(tried[best].lr * (tried[best + 1].lr / tried[best].lr) ** offset)


def _has_statistics(model: nn.Module) -> bool:
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return any(norm.running_mean is not None for norm in norms)


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16, rather than pretending to."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _count(data: object) -> int:
    return len(data) if isinstance(data, LabelledImages | Subset) else 0


def may_be_mirrored(images: LabelledImages, spec: InputSpec, *, seed: int = 0) -> bool:
    """Whether mirrored images are like the images themselves, as far as a simple classifier can tell.

    A linear classifier of small copies learns four fifths of the images, and is asked for the others, upright and
    mirrored. Where the one is as likely as the other, it is right as often; it needs no network, and takes a second.
    """
    chosen = np.random.default_rng(seed).permutation(len(images))[:_MOST_IMAGES]
    seen, labels = [], []
    for pixels, truth in make_loader(take(images, chosen), 100, size=spec.image_size):
        seen.append(F.adaptive_avg_pool2d(prepare(pixels, spec, prepared=images.prepared), _SIDE))
        labels.append(truth)
    small, classes = torch.cat(seen), torch.cat(labels)
    upright, mirrored = _recognised(small, classes)
    lost = upright - mirrored
    deviations = lost.sum() / lost.square().sum().clamp_min(1).sqrt()
    chance = F.one_hot(classes).float().mean(0).max()
    return bool(deviations <= _DEVIATIONS or lost.mean() <= _DROP * (upright.mean() - chance))


def _recognised(small: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 for each image that is recognised by what was learnt from other images: upright, and mirrored."""
    upright, mirrored = small.flatten(1).double(), small.flip(-1).flatten(1).double()
    wanted, fold = F.one_hot(labels).double(), torch.arange(len(labels)) % _FOLDS
    found = torch.zeros(2, len(labels))
    for number in range(min(_FOLDS, len(labels))):
        known, asked = fold != number, fold == number
        middle, usual = upright[known].mean(0), wanted[known].mean(0)
        learnt = upright[known] - middle
        products = learnt @ learnt.T
        ridge = _RIDGE * products.diagonal().mean().clamp_min(1e-9)
        weights = learnt.T @ torch.linalg.solve(products + ridge * torch.eye(len(products)), wanted[known] - usual)
        for row, given in zip(found, (upright, mirrored), strict=True):
            row[asked] = (((given[asked] - middle) @ weights + usual).argmax(1) == labels[asked]).float()
    return found[0], found[1]
