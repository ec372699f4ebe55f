"""Every method of the field: how it makes a network small, at which sizes, and how it is tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import rivals
import torch
from field_bench import BASIS_IMAGES, SIDE, START_PASSES, TUNE_PASSES, Bench, split_start
from torch import nn

from basisprune import Augment, PlanConfig, PreparedBatches, TrainConfig, decompose
from basisprune.basis.decompose import Basis
from basisprune.basis.refit import basis_statistics, rebase
from basisprune.budget.planning import CostPlanner
from basisprune.coupling import trace_coupling
from basisprune.importance import basis_loss, score_filters, taylor_scores
from basisprune.importance.filters import FilterMethod
from basisprune.importance.loss import BasisLoss, filter_loss, split_by_loss
from basisprune.layer_times import TimeTable
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import Compensation, prune_basis, prune_filters
from basisprune.recipes import find_framework

DATASETS = ("cifar10", "fashion_mnist", "mnist")

Kind = Literal["unpruned", "small", "rival", "quick", "ours"]
Size = tuple[float, ...]
"""What the method is given: the fraction to remove, of basis vectors and if wanted of filters; or a side in pixels."""

NORMS = TrainConfig(
    batch_size=32,
    optimizer="adamw",
    lr=3e-3,
    min_lr=3e-5,
    norm_statistics="fixed",
    augmentation=Augment(shift=0.05),
)
"""Norms, scales and classifier alone, as the recipe `quick` had it."""

OURS = replace(NORMS, train="all", weight_lr=0.3, clip_norm=5.0)
"""How the start is trained, and the unpruned network at the best of RATES."""

TUNED = replace(OURS, weight_lr=1.0)
"""The same at rate 1, for ours, which is not swept."""

RIVAL = replace(OURS, norm_statistics="batch")
"""How rivals are tuned, at the best of RIVAL_RATES: much pruned, they need new statistics, or they diverge. Where
pruning leaves some accuracy, those that they have may be better: that is run too."""

RIVAL_NORMS = replace(RIVAL, train="method")
"""Norms, scales and classifier of rivals that need new statistics."""

RATES = (0.3, 1.0)
"""`weight_lr`: the rates of the weights, in relation to their size, that are swept with seed 0; at 3, both the
unpruned network and the factors of our pairs diverge."""

RIVAL_RATES = (1.0, 3.0, 10.0)
"""The same for networks that lose most of their accuracy when they are pruned, and need to learn more anew."""

FIXED_RATES = (0.3, 1.0, 3.0)
"""The same for rivals that keep their statistics, which are closer to the unpruned network."""


@dataclass(frozen=True)
class Method:
    """A way to a small network. `prune` tells the network to tune, and the passes that are left for that.

    Without `prune` the pretrained network is trained as it is, or at another input size. `swept` are the rates of
    which the best is taken, on all the datasets of `swept_on` together.
    With `by_time`, split layers are deployed in the form that is faster, not smaller.
    """

    name: str
    kind: Kind
    sizes: tuple[Size, ...]
    tuning: TrainConfig
    prune: Callable[[Bench, Size], tuple[nn.Module, float]] | None = None
    swept: tuple[float, ...] = ()
    swept_on: tuple[str, ...] = DATASETS[:1]
    by_time: bool = False

    @property
    def images(self) -> int:
        """How many training images it may look at."""
        return self.prune.worth.images if isinstance(self.prune, Ours) else BASIS_IMAGES

    def times(self, bench: Bench) -> TimeTable | None:
        """The times that it goes by; None if it counts parameters."""
        return bench.times() if self.by_time else None


@lru_cache(maxsize=1)
def start(bench: Bench) -> nn.Module:
    """The network trained with all weights, where pruning starts."""
    return bench.trained(bench.pretrained, OURS, START_PASSES, checkpoint="start")[0]


def _as_it_is(bench: Bench, _size: Size) -> tuple[nn.Module, float]:
    """The start itself: what the interruption alone does."""
    return start(bench), TUNE_PASSES


# Rivals


def _magnitude(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    return rivals.by_magnitude(start(bench), size[0]), TUNE_PASSES


def _magnitude_by_layer(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    return rivals.by_magnitude(start(bench), size[0], across=False), TUNE_PASSES


def _taylor(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    return rivals.by_taylor(start(bench), size[0], bench.batches()), TUNE_PASSES


def _taylor_by_layer(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    return rivals.by_taylor(start(bench), size[0], bench.batches(), across=False), TUNE_PASSES


def _group_norm(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    sparse = rivals.GroupNorm(start(bench), size[0])
    bench.sparsely(sparse.step, TUNE_PASSES / 2)
    return sparse.pruned(), TUNE_PASSES / 2


def _filters(method: str) -> Callable[[Bench, Size], tuple[nn.Module, float]]:
    def prune(bench: Bench, size: Size) -> tuple[nn.Module, float]:
        return rivals.by_filters(start(bench), method, size[0], bench.batches()), TUNE_PASSES

    return prune


def _truncated(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    return rivals.by_singular_values(start(bench), size[0]), TUNE_PASSES


# The recipe `quick` as it was, and ours


def _quick(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    model = split_start(bench, NORMS)
    scores = taylor_scores(model, bench.val_batches(8))
    statistics = basis_statistics(model, bench.batches())
    plan = plan_basis(scores, size[0], PlanConfig(round_to=8))
    return prune_basis(model, plan, compensate="refit", statistics=statistics), TUNE_PASSES


BLOCKS = PlanConfig(round_to=rivals.BLOCK)


@dataclass(frozen=True)
class Worth:
    """How vectors are chosen, what they and filters are judged by, and how filters that go are made up for.

    It is ours by default. The loss and bases are of so many training `images`; Taylor scores are of validation images
    in small batches, as this package's recipe had it before: on training images, gradients are almost zero.
    """

    images: int = BASIS_IMAGES
    basis: Basis = "loss"
    vectors: Literal["loss", "taylor"] = "loss"
    filters: FilterMethod = "loss"
    compensate: Compensation = "refit"


@lru_cache(maxsize=2)
def split(bench: Bench, filters: float, worth: Worth) -> tuple[nn.Module, BasisLoss]:
    """The start without so many filters and every conv split, and what its basis vectors are worth."""
    model, batches = start(bench), bench.batches(worth.images)
    if filters:
        model = without_filters(model, bench, filters, worth)
    if worth.basis == worth.vectors == "loss":
        return split_by_loss(model, batches)
    model = decompose(model, scale_init=1.0, basis=worth.basis, batches=batches)
    found = basis_loss(model, batches)
    return model, replace(found, scores=taylor_scores(model, _judges(bench))) if worth.vectors == "taylor" else found


def _judges(bench: Bench) -> PreparedBatches:
    """The images for Taylor scores."""
    return bench.val_batches(8, limit=1000)


def without_filters(model: nn.Module, bench: Bench, ratio: float, worth: Worth) -> nn.Module:
    """The network without the fraction `ratio` of its filters, those that are worth least."""
    coupling = trace_coupling(model, torch.zeros(2, *bench.pretrained.input_spec.shape))
    found = filter_loss(model, coupling, bench.batches(worth.images))
    scores, config = found.scores, BLOCKS
    if worth.filters != "loss":
        scores = score_filters(model, worth.filters, coupling.layers, _judges(bench))
        config = replace(BLOCKS, normalise="max")
    plan = plan_filters(model, scores, ratio, config, coupling=coupling)
    statistics = None if worth.compensate == "none" else found.statistics
    return prune_filters(model, plan, compensate=worth.compensate, statistics=statistics)


@dataclass(frozen=True)
class Ours:
    """Basis vectors go by their worth, and the others are refit. In several `steps`, the loss gives the basis anew.

    With a second number in the size, filters go too: before the network is split, or after the basis vectors.
    """

    plan: PlanConfig = BLOCKS
    steps: int = 1
    filters_first: bool = True
    worth: Worth = Worth()

    def __call__(self, bench: Bench, size: Size) -> tuple[nn.Module, float]:
        """The network to tune, and the passes that are left."""
        basis, filters = (*size, 0.0)[:2]
        model, found = split(bench, filters if self.filters_first else 0.0, self.worth)
        for step in range(self.steps if basis else 0):
            if step:
                batches = bench.batches(self.worth.images)
                model = rebase(model, batches, basis="loss")
                found = basis_loss(model, batches)
            share = (basis / self.steps) / (1 - basis * step / self.steps)
            plan = plan_basis(found.scores, share, self.plan)
            model = prune_basis(model, plan, compensate="refit", statistics=found.statistics)
        if filters and not self.filters_first:
            model = without_filters(model, bench, filters, self.worth)
        return model, TUNE_PASSES


def _by_time(bench: Bench, size: Size) -> tuple[nn.Module, float]:
    """Ours without this fraction of the time, as `compress --optimize latency` plans it."""
    return planned(bench, CostPlanner("latency", bench.times()), size[0]), TUNE_PASSES


def planned(bench: Bench, planner: CostPlanner, ratio: float) -> nn.Module:
    """The start without this fraction of what the planner counts, all ranks and widths planned together."""
    stages = Pipeline(start(bench), bench.splits, "quick", progress=False, planner=planner, trained=True)
    return stages.prune(stages.dense(), _MOVE, ratio, NOT_AT_ALL).model


_MOVE = find_framework("loss+basis").moves[0]
_WIDTHS: tuple[Size, ...] = ((0.3,), (0.5,), (0.15,))
_RANKS: tuple[Size, ...] = ((0.7,), (0.85,), (0.5,), (0.9,))
_BOTH: tuple[Size, ...] = ((0.5, 0.5), (0.3, 0.3), (0.65, 0.65), (0.75, 0.75))


_RIVALS = {
    "torch-pruning taylor": (_taylor, _WIDTHS),
    "torch-pruning taylor, by layer": (_taylor_by_layer, ((0.3,), (0.5,), (0.7,), (0.15,))),
    "torch-pruning magnitude": (_magnitude, _WIDTHS),
    "torch-pruning magnitude, by layer": (_magnitude_by_layer, ((0.15,), (0.3,))),
    "torch-pruning group norm": (_group_norm, _WIDTHS),
    "truncated svd": (_truncated, ((0.5,), (0.7,), (0.3,))),
    "l1": (_filters("l1"), _WIDTHS),
    "hrank": (_filters("hrank"), _WIDTHS),
}

_KEEPING = ("torch-pruning taylor", "hrank")
"""Those that keep enough accuracy to be tuned with the statistics that they have."""

METHODS = {
    method.name: method
    for method in (
        Method("unpruned", "unpruned", ((SIDE,),), OURS, swept=RATES, swept_on=DATASETS),
        Method("unpruned, in two goes", "unpruned", ((SIDE,),), TUNED, _as_it_is),
        Method("unpruned, batch statistics", "unpruned", ((SIDE,),), RIVAL),
        Method("unpruned, norms only", "unpruned", ((SIDE,),), NORMS),
        Method("smaller images", "small", ((48,), (32,)), OURS, swept=RATES),
        *(Method(name, "rival", sizes, RIVAL, prune, RIVAL_RATES) for name, (prune, sizes) in _RIVALS.items()),
        *(
            Method(f"{name}, fixed statistics", "rival", ((0.15,), (0.3,)), OURS, _RIVALS[name][0], FIXED_RATES)
            for name in (
                "torch-pruning taylor",
                "torch-pruning magnitude",
                "torch-pruning magnitude, by layer",
                "l1",
                "hrank",
            )
        ),
        *(
            Method(f"{name}, norms only", "rival", sizes[:2], NORMS if name in _KEEPING else RIVAL_NORMS, prune)
            for name, (prune, sizes) in _RIVALS.items()
        ),
        Method("quick", "quick", ((0.5,), (0.7,), (0.3,), (0.85,)), NORMS, _quick),
        Method("ours", "ours", _BOTH, TUNED, Ours()),
        Method(
            "ours, by time", "ours", ((0.5,), (0.7,), (0.85,), (0.92,), (0.3,), (0.4,)), TUNED, _by_time, by_time=True
        ),
        Method("ours, by time, batch statistics", "ours", ((0.85,),), RIVAL, _by_time, swept=(3.0,), by_time=True),
        Method("ours, basis alone", "ours", _RANKS, TUNED, Ours()),
        Method("ours, per parameter", "ours", _BOTH, TUNED, Ours(replace(BLOCKS, per="parameter", min_share=0.0))),
        Method("ours, per multiply-add", "ours", _BOTH, TUNED, Ours(replace(BLOCKS, per="mac", min_share=0.0))),
        Method("ours, filters second", "ours", _BOTH[:2], TUNED, Ours(filters_first=False)),
        Method("ours, distilled", "ours", _BOTH, replace(TUNED, distill=0.5), Ours()),
        Method("ours, 512 images", "ours", _BOTH[:2], TUNED, Ours(worth=Worth(images=512))),
        Method("ours, in steps", "ours", _BOTH, TUNED, Ours(steps=3)),
        Method("ours, norms only", "ours", _BOTH[:2], NORMS, Ours()),
    )
}
"""By name; the sizes that tell most come first, and rates are swept at the first."""
