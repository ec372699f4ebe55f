"""Every method of the field: how it makes a network small, at which sizes, and how it is tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import rivals
import torch
from field_bench import BASIS_IMAGES, SIDE, START_PASSES, TUNE_PASSES, Bench, ShortTunings
from torch import nn

from basisprune import RECIPES, PlanConfig, TrainConfig, prune_filters, trace_coupling
from basisprune.budget import Ratios
from basisprune.budget.planning import CostPlanner
from basisprune.data import Splits, take
from basisprune.frameworks import find_framework
from basisprune.importance.filter_loss import filter_loss
from basisprune.joint_plan.times import TimeTable
from basisprune.pipeline import Pipeline
from basisprune.plan import Queue, filter_plan, unit_scores
from basisprune.states import NOT_AT_ALL
from basisprune.transfer.model import spec_of

DATASETS = ("cifar10", "fashion_mnist", "mnist")

Kind = Literal["unpruned", "small", "rival", "ours"]
Size = tuple[float, ...]
"""The fraction to remove, of filters and if given of basis vectors; or the side of the images in pixels."""

TUNING = RECIPES["quick"].train
"""How everything is trained: it finds its own learning rate, statistics of norms, augmentation and precision."""

STEPS = 5
"""Steps of iterative pruning, with half of the tuning between them."""

HALF = 0.5
"""The share of its tuning that a method spends before its last cut, if it tunes before that."""


@dataclass(frozen=True)
class Method:
    """A way to a small network; without `prune`, the pretrained network is trained at an input size.

    `budget` is the tuning that is left after `prune`, in passes of the unpruned network. With `by_time`, split layers
    are deployed in the form that is faster, not smaller.
    """

    name: str
    kind: Kind
    sizes: tuple[Size, ...]
    prune: Callable[[Bench, Size], nn.Module] | None = None
    tuning: TrainConfig = TUNING
    budget: float = TUNE_PASSES
    by_time: bool = False

    def times(self, bench: Bench) -> tuple[TimeTable | None, float]:
        """The times that it goes by, and the seconds of measuring them; None if it counts parameters."""
        return bench.times if self.by_time else (None, 0.0)


@lru_cache(maxsize=1)
def start(bench: Bench) -> nn.Module:
    """Return the network trained with all weights, where pruning starts."""

    def train() -> nn.Module:
        passes = bench.pace(bench.pretrained, replace(TUNING, norm_statistics="batch")).passes(START_PASSES)
        return bench.trained(bench.pretrained, TUNING, passes).model

    return bench.kept("start", train)


# Rivals


def _magnitude(bench: Bench, size: Size) -> nn.Module:
    return rivals.by_magnitude(start(bench), size[0], across=False)


def _taylor(bench: Bench, size: Size, *, across: bool) -> nn.Module:
    return rivals.by_taylor(start(bench), size[0], bench.batches(), across=across)


def _taylor_in_steps(bench: Bench, size: Size, *, across: bool) -> nn.Module:
    tune = ShortTunings(bench, TUNING, HALF * TUNE_PASSES, STEPS - 1)
    some = bench.batches(BASIS_IMAGES // STEPS)  # in all, as many as in one step
    return rivals.by_taylor(start(bench), size[0], some, across=across, steps=STEPS, tune=tune)


def _group_norm(bench: Bench, size: Size) -> nn.Module:
    sparse = rivals.GroupNorm(start(bench), size[0])
    bench.sparsely(sparse.step, HALF * TUNE_PASSES)
    return sparse.pruned()


def _filters(bench: Bench, size: Size, *, method: str) -> nn.Module:
    return rivals.by_filters(start(bench), method, size[0], bench.batches())


def _truncated(bench: Bench, size: Size) -> nn.Module:
    return rivals.by_singular_values(start(bench), size[0])


def _fastnas(bench: Bench, size: Size) -> nn.Module:
    judges = bench.val_batches(limit=rivals.FASTNAS_JUDGES)
    return rivals.by_fastnas(start(bench), size[0], bench.batches(rivals.FASTNAS_CALIBRATES), judges)


def _half_width(bench: Bench, size: Size) -> nn.Module:
    """The start without this share of every layer's filters, those that matter least by our scores."""
    model = start(bench)
    coupling = trace_coupling(model, torch.zeros(2, *spec_of(model).shape))
    found = filter_loss(model, coupling, bench.batches(), refit=True)
    config = PlanConfig(min_share=1 - size[0], round_to=rivals.BLOCK)
    kept = {}
    for group in coupling.groups:
        values = unit_scores(model, group, found.scores, config)
        queue = Queue.of(values, np.asarray(group.parts), 1.0, config)
        kept[group.name] = queue.keep(len(queue.values))
    plan = filter_plan(model, coupling, kept, size[0], {"scores": "loss"})
    return prune_filters(model, plan, compensate="refit", statistics=found.statistics)


# Ours


def _ours(bench: Bench, size: Size) -> nn.Module:
    filters, basis = size
    stages = _stages(start(bench), bench.splits, None)
    return stages.remove(stages.dense(), _MOVE, Ratios(basis=basis, filters=filters), NOT_AT_ALL).model


def _by_time(bench: Bench, size: Size) -> nn.Module:
    """Ours without this fraction of the time, as `compress --optimize latency` plans it."""
    return planned(start(bench), bench.splits, CostPlanner("latency", bench.times[0]), size[0])


def planned(model: nn.Module, splits: Splits, planner: CostPlanner, ratio: float) -> nn.Module:
    """Return the model without this fraction of what the planner counts, all ranks and widths planned together."""
    stages = _stages(model, splits, planner)
    return stages.prune(stages.dense(), _MOVE, ratio, NOT_AT_ALL).model


def _stages(model: nn.Module, splits: Splits, planner: CostPlanner | None) -> Pipeline:
    """The stages of the recipe, with few validation images: none are needed, and judging all of them takes time."""
    assert splits.val is not None
    few = replace(splits, val=take(splits.val, range(32)))
    return Pipeline(model, few, "quick", progress=False, planner=planner, trained=True)


_MOVE = find_framework("loss+basis").moves[0]
_ACROSS: tuple[Size, ...] = ((0.3,), (0.15,), (0.5,))
_BY_LAYER: tuple[Size, ...] = ((0.3,), (0.7,), (0.5,))
_TWO: tuple[Size, ...] = ((0.15,), (0.3,))

METHODS = {
    method.name: method
    for method in (
        Method("unpruned", "unpruned", ((SIDE,),)),
        Method("ours, by time", "ours", ((0.5,), (0.7,), (0.4,), (0.85,)), _by_time, by_time=True),
        Method("ours", "ours", ((0.5, 0.5),), _ours),
        Method("smaller images", "small", ((48,), (32,))),
        Method("distilled, half the width", "rival", ((0.5,),), _half_width, tuning=replace(TUNING, distill=0.5)),
        Method("torch-pruning taylor", "rival", _ACROSS, partial(_taylor, across=True)),
        Method("torch-pruning taylor, by layer", "rival", _BY_LAYER, partial(_taylor, across=False)),
        Method(
            "torch-pruning taylor, in steps",
            "rival",
            _ACROSS,
            partial(_taylor_in_steps, across=True),
            budget=(1 - HALF) * TUNE_PASSES,
        ),
        Method(
            "torch-pruning taylor, by layer, in steps",
            "rival",
            _BY_LAYER,
            partial(_taylor_in_steps, across=False),
            budget=(1 - HALF) * TUNE_PASSES,
        ),
        Method("hrank", "rival", _TWO, partial(_filters, method="hrank")),
        Method("fastnas", "rival", ((0.4,),), _fastnas),
        Method("torch-pruning magnitude, by layer", "rival", _TWO, _magnitude),
        Method("torch-pruning group norm", "rival", ((0.3,),), _group_norm, budget=(1 - HALF) * TUNE_PASSES),
        Method("l1", "rival", _TWO, partial(_filters, method="l1")),
        Method("truncated svd", "rival", ((0.5,), (0.7,)), _truncated),
    )
}
"""By name; what tells most comes first, in methods and in sizes."""
