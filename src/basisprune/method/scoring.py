"""What basis vectors and filters are worth by a recipe, and how much the loss is expected to rise without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from basisprune.basis.decompose import choose_layers, decompose
from basisprune.basis.layers import BasisPair
from basisprune.basis.refit import Axes, basis_statistics, rebase
from basisprune.data import LabelledImages, LoaderPart, PreparedBatches, take
from basisprune.errors import DataError, TooMuchError
from basisprune.importance import score_filters, taylor_scores
from basisprune.importance.layer_access import first_images
from basisprune.importance.loss import BasisLoss, basis_loss, filter_loss, filter_statistics, split_by_loss
from basisprune.planning import PlanConfig, largest_ratio, traced, unit_scores
from basisprune.recipes import Recipe
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import idle_modules
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers
from basisprune.types import BasisPlan, Coupling, FilterPlan, InputSpec, Scores

_BATCH = 32
_STEP = 0.9
"""The ratio of one share of an outlook to the next."""

Statistics: TypeAlias = Mapping[str, OutputStatistics] | None
"""What refitting needs to know of the outputs; None if the recipe does not compensate."""
ScoredFilters: TypeAlias = tuple[Coupling, Scores, Statistics]
"""Which filters go together, and what they are worth."""
ScoredBasis: TypeAlias = tuple[nn.Module, Scores, Statistics]
"""A network in the basis that is scored, and what its vectors are worth."""


@dataclass(frozen=True)
class Scoring:
    """Scores by a recipe: Taylor scores on `images`, basis and loss on training images."""

    recipe: Recipe
    spec: InputSpec
    train: LabelledImages
    images: LabelledImages
    log: Callable[[str], None]
    task: Task = CLASSIFICATION

    def split(self, model: nn.Module) -> nn.Module:
        """Return the model with every conv as a pair that takes part, and linear layers too if the recipe says so.

        Where some are pairs already, the network was trained as it is, and the others are split at scale 1.
        """
        recipe, idle = self.recipe, self._idle(model)
        split = decompose(
            model,
            scale_init=1.0 if _is_split(model) else recipe.scale_init,
            basis=recipe.basis,
            batches=None if recipe.basis == "weights" else self.basis_batches(),
            loss=self.task,
            ignored_layers=idle,
            linear=recipe.linear,
        )
        return Processes.here().agree(split)

    def _idle(self, model: nn.Module) -> list[str]:
        self.log("decomposing every conv")
        idle = idle_convs(model, first_images(model, self.basis_batches()))
        if idle:
            self.log(f"  left as they are, because they take no part in what the network computes: {', '.join(idle)}")
        return idle

    def in_basis(self, model: nn.Module) -> nn.Module:
        """Return the model in the basis that is scored; layers that were tuned as one are split again."""
        recipe = self.recipe
        if _is_split(model):
            if recipe.rebase:
                axes: Axes = "loss" if recipe.basis == "loss" else "outputs"
                model = Processes.here().agree(rebase(model, self.basis_batches(), basis=axes, loss=self.task))
            if recipe.finetune.train == "method" or not self._can_be_split(model):
                return model
        return _surely_split(self.split(model))

    def _can_be_split(self, model: nn.Module) -> bool:
        choices = choose_layers(model, linear=self.recipe.linear)
        names = {choice.name for choice in choices if choice.left_alone is None}
        return bool(names and names - idle_modules(model, first_images(model, self.basis_batches())))

    def basis_loss(self, model: nn.Module) -> tuple[nn.Module, BasisLoss]:
        """Return the model in the basis that is scored, and what its vectors are worth to the loss."""
        recipe, doing = self.recipe, "scoring the basis vectors on the training images"
        if recipe.basis == "loss" and (recipe.rebase or not _is_split(model)):
            idle = self._idle(model)
            self.log(doing)
            split, found = split_by_loss(
                model, self.basis_batches(), loss=self.task, ignored_layers=idle, linear=recipe.linear
            )
            return _surely_split(split), found
        model = self.in_basis(model)
        self.log(doing)
        return model, basis_loss(model, self.basis_batches(), loss=self.task)

    def basis(self, model: nn.Module) -> ScoredBasis:
        """Return the model in the basis that is scored, its scores, and statistics if the recipe refits."""
        refits = self.recipe.compensate == "refit"
        if self.recipe.scores == "loss":
            model, found = self.basis_loss(model)
            return model, found.scores, found.statistics if refits else None
        model = self.in_basis(model)
        self.log("scoring the basis vectors on the validation images")
        with precision(model, self.recipe):
            scores = taylor_scores(model, self.batches(), loss=self.task)
        return model, scores, basis_statistics(model, self.basis_batches()) if refits else None

    def filters(self, model: nn.Module, method: str) -> ScoredFilters:
        """Return the coupling and the scores of all filters, and statistics if the recipe compensates."""
        self.log(f"scoring the filters by {method}")
        coupling, compensates = traced(model), self.recipe.filter_compensate != "none"
        if method == "loss":
            found = filter_loss(model, coupling, self.basis_batches(), loss=self.task)
            return coupling, found.scores, found.statistics if compensates else None
        # Only Taylor scores depend on the batch size; for the others, large batches are faster.
        batches = self.batches() if method in ("taylor", "taylor_behind") else self._shuffled(self.images)
        with precision(model, self.recipe):
            scores = score_filters(model, method, coupling.layers, batches, loss=self.task)
        return coupling, scores, filter_statistics(model, coupling, self.basis_batches()) if compensates else None

    def filter_plan(self, method: str) -> PlanConfig:
        """Return the settings for filter plans; scores in units of the loss compare across layers as they are."""
        plan = self.recipe.filter_plan
        return replace(plan, normalise="none") if method == "loss" else plan

    def basis_batches(self, share: float = 1.0) -> PreparedBatches:
        """Return the images of the bases, in batches that fit into a processor's cache."""
        limit = max(math.ceil(share * self.recipe.basis_images), 1)
        return self._shuffled(self.train, limit=limit, batch_size=_BATCH)

    def batches(self) -> PreparedBatches:
        return self._shuffled(self.images, batch_size=self.recipe.score_batch)

    def _shuffled(self, data: LabelledImages, **options: Any) -> PreparedBatches:
        return PreparedBatches(data, self.spec, shuffle=True, shared=True, **options)


def judging_and_scoring(
    val: LabelledImages, train: LabelledImages, recipe: Recipe
) -> tuple[LabelledImages, LabelledImages]:
    """Return the images that judge, and those for scores: training images if the recipe ranks by the loss."""
    by_loss = recipe.scores == "loss"
    if isinstance(val, LoaderPart) or isinstance(train, LoaderPart):  # which are not divided
        return val, train if by_loss else val
    order = np.random.default_rng(0).permutation
    if recipe.score_images is None:
        return val, take(train, order(len(train))[: recipe.basis_images]) if by_loss else val
    count = min(recipe.score_images, len(val) // 2)
    if count == 0:
        raise DataError(f"{len(val)} validation image; score_images needs another one to set aside for the scores")
    places = order(len(val))
    return take(val, np.sort(places[count:])), take(val, places[:count])


@contextmanager
def precision(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Run forward and backward passes outside `fit` in bfloat16 if training does."""
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=recipe.train.mixed_precision == "bf16"):
        yield


def idle_convs(model: nn.Module, images: Tensor) -> list[str]:
    """Return the names of the convs that are not called when the model runs on these images."""
    convs = dict(find_layers(model, TORCH_CONVS, opaque=BasisPair))
    idle = idle_modules(model, images) if convs else set()
    return [name for name in convs if name in idle]


def _is_split(model: nn.Module) -> bool:
    return next(find_layers(model, BasisPair), None) is not None


def _surely_split(model: nn.Module) -> nn.Module:
    if not _is_split(model):
        raise TooMuchError("basis: no conv is left that is large enough to be split; remove fewer filters")
    return model


@dataclass(frozen=True)
class Outlook:
    """By how much the loss is expected to rise when only a share is kept, for shares from 1 downward.

    The true rise may be several times larger or, after tuning, smaller; their order is what counts (not in the paper).

    >>> outlook = Outlook((1.0, 0.5, 0.25), (0.0, 0.1, 0.4))
    >>> outlook.share(0.1), outlook.loss(0.375)
    (0.5, 0.25)
    """

    shares: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, rise: Callable[[float], float], smallest: float) -> Outlook:
        """Return the outlook down to the smallest share, or to the last for which `rise` finds enough to remove."""
        shares, losses = [1.0], [0.0]
        while shares[-1] > smallest:
            share = max(shares[-1] * _STEP, smallest)
            try:
                losses.append(max(rise(share), losses[-1]))
            except TooMuchError:
                break
            shares.append(share)
        return cls(tuple(shares), tuple(losses))

    def loss(self, share: float) -> float:
        """Return the expected rise if this share is kept; below the smallest known share, that of the smallest."""
        return float(np.interp(share, self.shares[::-1], self.losses[::-1]))

    def share(self, loss: float) -> float:
        """Return the share whose expected rise is this one; the smallest known if all are expected to lose less."""
        return float(np.interp(loss, self.losses, self.shares))


def expected_of_all(rises: Sequence[Callable[[float], float]], share: float) -> float:
    """Add up what is expected of all that is pruned, each as far as it goes; raise TooMuchError if none does."""
    ratio = 1 - share
    most = [largest_ratio(ratio, rise) for rise in rises]
    if max(most) < ratio:
        raise TooMuchError(f"pruning_ratio: {ratio} cannot be removed; pass at most {max(most)}")
    return sum(rise(possible) for rise, possible in zip(rises, most, strict=True))


def expected_of_basis(plan: BasisPlan, scores: Scores) -> float:
    """Return the expected rise of the loss from a plan made by `loss_scores`: half the sum of all that go."""
    lost = (_lost(np.asarray(scores.layers[name].values), layer.keep) for name, layer in plan.layers.items())
    return sum(lost) / 2


def expected_of_filters(model: nn.Module, plan: FilterPlan, scores: Scores, config: PlanConfig) -> float:
    """Return the same for a plan of filters; the scores of the filters of a unit agree, and count once."""
    groups = plan.coupling.groups
    lost = (_lost(unit_scores(model, group, scores, config), plan.groups[group.name].keep) for group in groups)
    return sum(lost) / 2


def _lost(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], keep: tuple[int, ...]) -> float:
    return float(values.sum() - values[list(keep)].sum())
