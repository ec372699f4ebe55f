"""Scores of filters by any method, under one interface (the paper's Section 3.4 and 4.2).

A new score is a file with a function `(model, layers, batches, seed) -> {layer: scores}` and a line in `FILTER_SCORES`;
one that needs labels takes the `loss` by its name too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.errors import ConfigError, DataError, nearest
from basisprune.importance.hrank import mean_ranks
from basisprune.importance.layer_access import Batches, filter_weights, norms_behind
from basisprune.importance.loss import loss_values
from basisprune.importance.taylor import gate_behind, gate_taylor
from basisprune.torchkit.running import Loss, ReadBatches
from basisprune.types import LayerScores, Scores

FilterMethod: TypeAlias = str
"""The name of a filter score, a key of `FILTER_SCORES`."""


@dataclass(frozen=True)
class FilterScore:
    """A way to score filters: one value, not negative, per output channel of each layer, and what that takes."""

    values: Callable[..., dict[str, Tensor]]
    needs_images: bool = False
    needs_labels: bool = False


def l1(model: nn.Module, layers: Sequence[str], _batches: Batches, _seed: int) -> dict[str, Tensor]:
    """The sum of the absolute weights of each filter; of a decomposed layer, of its second half, scales included."""
    return {name: _l1(model, name) for name in layers}


def bn_scale(model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int) -> dict[str, Tensor]:
    """The absolute scale of the norm right behind the layer; the L1 norm where there is none."""
    norms = norms_behind(model, layers, batches)
    return {name: norms[name].weight.detach().abs() if name in norms else _l1(model, name) for name in layers}


def random(model: nn.Module, layers: Sequence[str], _batches: Batches, seed: int) -> dict[str, Tensor]:
    """A number from 0 to 1 for each filter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(len(filter_weights(model, name)), generator=generator) for name in layers}


def _l1(model: nn.Module, name: str) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(filter_weights(model, name), ord=1, dim=1)
    return norms


FILTER_SCORES: dict[FilterMethod, FilterScore] = {
    "l1": FilterScore(l1),
    "taylor": FilterScore(gate_taylor, needs_images=True, needs_labels=True),
    "taylor_behind": FilterScore(gate_behind, needs_images=True, needs_labels=True),
    "loss": FilterScore(loss_values, needs_images=True, needs_labels=True),
    "hrank": FilterScore(mean_ranks, needs_images=True),
    "bn_scale": FilterScore(bn_scale, needs_images=True),
    "random": FilterScore(random),
}


def score_filters(
    model: nn.Module,
    method: FilterMethod,
    layers: Sequence[str],
    batches: Batches | None = None,
    *,
    seed: int = 0,
    loss: Loss = F.cross_entropy,
) -> Scores:
    """The importance of every filter (output channel) of the layers named; the model is not changed.

    - "l1": the sum of the absolute weights of the filter; of a decomposed layer, of its second half, scales
      included.
    - "taylor": the squared first-order effect of a gate behind the filter, averaged over batches as in Molchanov
      et al. (2019): (g_gamma gamma + g_beta beta)^2 of the norm right behind the layer, or of the layer's own
      output where there is none.
    - "taylor_behind": the same with the gate behind the activation, where the channel is read.
    - "loss": what the loss is expected to rise (twice that) when the filter goes and its mean stays; see `filter_loss`,
      which tells what to compensate with too.
    - "hrank": the average rank of the filter's feature maps, behind the activation (Lin et al., 2020).
    - "bn_scale": the absolute scale of the norm right behind the layer; the L1 norm where there is none.
    - "random": the control.

    All but "l1" and "random" need `batches` of prepared images, the Taylor scores and "loss" with labels, or whatever
    the `loss` reads: a function of output and labels, or a `Task`. No layers have no scores.
    """
    score = FILTER_SCORES.get(method)
    if score is None:
        hint = nearest(str(method), FILTER_SCORES)
        raise ConfigError(f"method: {method!r} given; allowed are {', '.join(FILTER_SCORES)}.{hint}")
    if not layers:  # a network of which every filter is frozen
        return Scores(method, {})
    if batches is None and (score.needs_images or score.needs_labels):
        what = "images with labels" if score.needs_labels else "images"
        raise DataError(f"method {method!r} needs {what}; pass batches of prepared images, such as PreparedBatches")
    given: Batches = () if batches is None else batches if callable(loss) else ReadBatches(batches, loss)
    with_loss = {"loss": loss} if score.needs_labels else {}
    values = score.values(model, layers, given, seed, **with_loss)
    return Scores(method, {name: LayerScores(tuple(value.double().cpu().tolist())) for name, value in values.items()})
