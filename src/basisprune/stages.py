"""Each stage of pruning as one function: score a network, plan what to remove, remove it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch.nn.functional as F
from torch import nn

from basisprune.basis.layers import BasisPair
from basisprune.basis.refit import basis_statistics
from basisprune.costs import weight_uses
from basisprune.coupling import trace_coupling
from basisprune.data import PreparedBatches
from basisprune.errors import ConfigError, PlanError
from basisprune.importance.filters import FilterMethod, score_filters
from basisprune.importance.layer_access import first_images
from basisprune.importance.loss import basis_loss, filter_loss, filter_statistics, joint_loss, split_by_loss
from basisprune.importance.taylor import taylor_scores
from basisprune.joint_plan import plan_together
from basisprune.planning import PlanConfig, plan_basis, plan_filters
from basisprune.pruning import Compensation, prune_basis, prune_filters, prune_together
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.running import Loss, ReadBatches
from basisprune.torchkit.surgery import find_layers
from basisprune.types import BasisPlan, Coupling, FilterPlan, JointPlan, Scores

Plan: TypeAlias = BasisPlan | FilterPlan | JointPlan
BasisMethod: TypeAlias = Literal["loss", "taylor"]
Removed: TypeAlias = Literal["both", "basis", "filters"]

_Known: TypeAlias = tuple[Scores, Mapping[str, OutputStatistics]]
"""Scores, and the statistics that compensation needs."""
_NONE = Scores("loss", {})


@dataclass(frozen=True)
class Importance:
    """What each basis vector and filter of a network is worth, as returned by `score`.

    Scores have no layers where none were asked for or nothing is decomposed. `coupling` tells which filters must be
    removed together (None without filter scores), `example_shape` the shape of a batch that the network ran on; the
    statistics, by layer, are what compensating for removed basis vectors and filters needs.
    """

    basis: Scores
    filters: Scores
    coupling: Coupling | None
    example_shape: tuple[int, ...]
    basis_statistics: Mapping[str, OutputStatistics]
    filter_statistics: Mapping[str, OutputStatistics]


def score(
    model: nn.Module,
    batches: Iterable[object],
    *,
    basis: BasisMethod | None = "loss",
    filters: FilterMethod | None = "loss",
    loss: Loss = F.cross_entropy,
) -> Importance:
    """Score the basis vectors and the filters of a network.

    Scores by "loss" estimate how much the loss rises, so those of basis vectors and filters compare with each other;
    both come from one pass over the images.

    Args:
        model: A network of any kind. Basis vectors are scored where `decompose` made some. It is not changed.
        batches: Prepared images with labels, such as `PreparedBatches`, or whatever `loss` reads. They are iterated
            several times.
        basis: The score of basis vectors: "loss", "taylor" (the paper's), or None for none.
        filters: The score of filters: "loss", "l1", "taylor", "hrank", ..., or None for none.
        loss: A function of the output and the labels, or a `Task`.

    Returns:
        The scores, with everything that planning and compensation need.

    Raises:
        ConfigError: for a score that does not exist.
        DataError: if there are no batches.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(2)).eval()
    >>> batches = [(torch.rand(6, 3, 8, 8), torch.tensor([0, 1] * 3))]
    >>> with torch.no_grad(): _ = model(batches[0][0])
    >>> {name: len(layer.values) for name, layer in score(model, batches).filters.layers.items()}
    {'0': 8, '2': 4}
    """
    if basis not in (None, *get_args(BasisMethod)):
        raise ConfigError(f"score: basis {basis!r} given; allowed are {', '.join(get_args(BasisMethod))}, or None")
    if not callable(loss) and not isinstance(batches, PreparedBatches):
        batches = ReadBatches(batches, loss)  # whatever they are, a task reads them
    images = first_images(model, batches)
    if next(find_layers(model, BasisPair), None) is None:
        basis = None
    coupling = None if filters is None else trace_coupling(model, images[:2])
    of_basis: _Known = _NONE, {}
    of_filters: _Known = _NONE, {}
    if coupling is not None and basis == filters == "loss":  # from one pass
        vectors, channels = joint_loss(model, coupling, batches, loss=loss, refit=True)
        of_basis, of_filters = (vectors.scores, vectors.statistics), (channels.scores, channels.statistics)
    else:
        if basis == "loss":
            vectors = basis_loss(model, batches, loss=loss)
            of_basis = vectors.scores, vectors.statistics
        elif basis is not None:
            of_basis = taylor_scores(model, batches, loss=loss), basis_statistics(model, batches)
        if coupling is not None and filters == "loss":
            channels = filter_loss(model, coupling, batches, loss=loss, refit=True)
            of_filters = channels.scores, channels.statistics
        elif coupling is not None and filters is not None:
            scores = score_filters(model, filters, coupling.layers, batches, loss=loss)
            of_filters = scores, filter_statistics(model, coupling, batches)
    return Importance(of_basis[0], of_filters[0], coupling, tuple(images.shape), of_basis[1], of_filters[1])


def plan(model: nn.Module, importance: Importance, pruning_ratio: float, config: PlanConfig | None = None) -> Plan:
    """Plan what to remove from a network, the least important first.

    Args:
        model: The network that was scored. It is only counted.
        importance: Its scores, from `score`.
        pruning_ratio: The fraction to remove: of the basis vectors or of the filters, if only these were scored; if
            both were, of all parameters, or of the multiply-adds with `PlanConfig(per="mac")`.
        config: How scores compare, and what each layer keeps.

    Returns:
        A `BasisPlan`, a `FilterPlan` or, for both, a `JointPlan`: plain data that survives JSON.

    Raises:
        PlanError: if there is not that much to remove, or if basis vectors and filters were scored otherwise than by
            "loss", so that they do not compare.
    """
    if importance.filters.layers and importance.basis.layers:
        config = config or PlanConfig(per="parameter")
        costs = weight_uses(model, importance.example_shape[1:]) if config.per == "mac" else None
        scores = importance.basis, importance.filters
        return plan_together(model, *scores, pruning_ratio, config, coupling=importance.coupling, costs=costs)
    if importance.coupling is not None:
        return plan_filters(model, importance.filters, pruning_ratio, config, coupling=importance.coupling)
    if not importance.basis.layers:
        raise PlanError("plan: nothing was scored; decompose the model first, or score its filters")
    return plan_basis(importance.basis, pruning_ratio, config)


def prune(
    model: nn.Module,
    what: float | Plan,
    batches: Iterable[object] | None = None,
    *,
    remove: Removed = "both",
    importance: Importance | None = None,
    config: PlanConfig | None = None,
    compensate: Compensation | None = None,
    loss: Loss = F.cross_entropy,
) -> nn.Module:
    """Remove basis vectors, filters or both from a network, and make up for what they contributed.

    Args:
        model: The network. One that is not decomposed is split by the loss basis, if basis vectors are to go; `fold`
            makes the result plain again. It is not changed.
        what: The fraction to remove, as in `plan`, or a plan to carry out.
        batches: Prepared training images with labels, such as `PreparedBatches`; needed with a fraction. About two
            thousand images are better than two hundred.
        remove: "basis", "filters" or "both", with a fraction.
        importance: With a plan: the scores that it was made from, which know how to compensate.
        config: How scores compare, and what each layer keeps.
        compensate: "refit" moves what the removed parts contributed into those that stay, by least squares, "mean"
            moves its mean, "none" drops it. By default "refit" if the statistics are known, "mean" for a `BasisPlan`
            that knows the means, otherwise "none".
        loss: A function of the output and the labels, or a `Task`.

    Returns:
        The smaller network.

    Raises:
        ConfigError: if batches are missing or `remove` is misspelt.
        PlanError: if there is not that much to remove, or the plan is for another network.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2)).eval()
    >>> batches = [(torch.rand(16, 3, 8, 8), torch.tensor([0, 1] * 8))]
    >>> smaller = prune(model, 0.25, batches, remove="filters")
    >>> smaller[0].out_channels + smaller[2].out_channels
    9
    """
    if isinstance(what, BasisPlan | FilterPlan | JointPlan):
        return _carry_out(model, what, importance, compensate)
    if remove not in get_args(Removed):
        raise ConfigError(f"prune: remove {remove!r} given; allowed are {', '.join(get_args(Removed))}")
    if batches is None:
        raise ConfigError("prune: a fraction given without batches; pass prepared training images with labels")
    if remove != "filters" and next(find_layers(model, BasisPair), None) is None:
        model, _ = split_by_loss(model, batches, loss=loss)
    basis: BasisMethod | None = None if remove == "filters" else "loss"
    scored = score(model, batches, basis=basis, filters=None if remove == "basis" else "loss", loss=loss)
    return _carry_out(model, plan(model, scored, what, config), scored, compensate)


def _carry_out(
    model: nn.Module, plan: Plan, importance: Importance | None, compensate: Compensation | None
) -> nn.Module:
    if importance is None:
        if compensate == "refit":
            raise ConfigError("prune: compensate='refit' needs the importance that the plan was made from; pass it")
        how: Compensation = compensate or ("mean" if isinstance(plan, BasisPlan) else "none")
        basis = filters = None
    else:
        how, basis, filters = compensate or "refit", importance.basis_statistics, importance.filter_statistics
    if isinstance(plan, BasisPlan):
        return prune_basis(model, plan, compensate=how, statistics=basis if how == "refit" else None)
    if isinstance(plan, FilterPlan):
        return prune_filters(model, plan, compensate=how, statistics=None if how == "none" else filters)
    return prune_together(model, plan, compensate=how, basis=basis, filters=filters)
