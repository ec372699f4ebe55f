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


@torch.no_grad()
def _l1(model: nn.Module, layers: Sequence[str], _batches: Batches = (), _seed: int = 0) -> dict[str, Tensor]:
    return {name: torch.linalg.vector_norm(filter_weights(model, name), ord=1, dim=1) for name in layers}


def _bn_scale(model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int) -> dict[str, Tensor]:
    norms = norms_behind(model, layers, batches)
    bare = _l1(model, [name for name in layers if name not in norms])
    return {name: bare[name] if name in bare else norms[name].weight.detach().abs() for name in layers}


def _random(model: nn.Module, layers: Sequence[str], _batches: Batches, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(len(filter_weights(model, name)), generator=generator) for name in layers}


FILTER_SCORES: dict[FilterMethod, FilterScore] = {
    "l1": FilterScore(_l1),
    "taylor": FilterScore(gate_taylor, needs_images=True, needs_labels=True),
    "taylor_behind": FilterScore(gate_behind, needs_images=True, needs_labels=True),
    "loss": FilterScore(loss_values, needs_images=True, needs_labels=True),
    "hrank": FilterScore(mean_ranks, needs_images=True),
    "bn_scale": FilterScore(_bn_scale, needs_images=True),
    "random": FilterScore(_random),
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
    """Return the importance of every filter (output channel) of the layers named.

    - "l1": the sum of the absolute weights of the filter; of a decomposed layer, of its second half, scales included.
    - "taylor": the squared first-order effect of a gate behind the filter, averaged over batches as in Molchanov
      et al. (2019): (g_gamma gamma + g_beta beta)^2 of the norm right behind the layer, or of the layer's own
      output where there is none.
    - "taylor_behind": the same with the gate behind the activation, where the channel is read.
    - "loss": what the loss is expected to rise (twice that) when the filter goes and its mean stays; see `filter_loss`.
    - "hrank": the average rank of the filter's feature maps, behind the activation (Lin et al., 2020).
    - "bn_scale": the absolute scale of the norm right behind the layer; the L1 norm where there is none.
    - "random": the control.

    All but "l1" and "random" need `batches` of prepared images, the Taylor scores and "loss" with labels.
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
