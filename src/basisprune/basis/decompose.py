"""conv -> basis conv + BasisScalingConv, and back again (the paper's Sections 3.1 and 3.2)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.factors import make_pair, matrix_shape, plain_layer, refuse_odd_numbers
from basisprune.basis.layers import BasisPair, dense_weight
from basisprune.basis.loss_axes import split_by_axes, that_ran, with_pairs
from basisprune.errors import ConfigError
from basisprune.torchkit.moments import OutputStatistics, output_statistics
from basisprune.torchkit.running import Loss, copied, has_computed_weights, plain_weights
from basisprune.torchkit.surgery import (
    TORCH_CONVS,
    Layer,
    LayerPatterns,
    clone_conv,
    find_layers,
    is_depthwise,
    make_linear,
    match_layers,
    model_heads,
    plain_conv,
    plain_linear,
    replace_module,
)

logger = logging.getLogger(__name__)

Basis: TypeAlias = Literal["weights", "outputs", "loss"]
LinearLayers: TypeAlias = bool | Literal["auto"]
"""Whether linear layers are split: never, always, or where they hold a notable share of the weights."""

NOTABLE_SHARE = 0.1
"""Of all weights in convs and linear layers, but for the classifier: from there on linear layers are split too."""


@dataclass(frozen=True)
class LayerChoice:
    """One conv or linear layer: its full rank over all groups, and why it is left alone, if it is."""

    name: str
    rank: int
    left_alone: str | None = None


def choose_layers(
    model: nn.Module, *, ignored_layers: LayerPatterns = (), linear: LinearLayers = "auto"
) -> tuple[LayerChoice, ...]:
    """Return what `decompose` would do with each conv and linear layer of the model that is not yet a pair.

    >>> choose_layers(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8)))[1].left_alone
    'depthwise: a split gains nothing'
    """
    ignored = match_layers(model, ignored_layers)
    kinds: tuple[type[Layer], ...] = TORCH_CONVS if linear is False else (*TORCH_CONVS, nn.Linear)
    layers = dict(find_layers(model, kinds, opaque=BasisPair))
    spared = _spared(model, layers) if linear == "auto" else {}
    choices = []
    for name, layer in layers.items():
        groups, fan_in, fan_out = matrix_shape(layer)
        rank = min(fan_in, fan_out)
        reason = spared.get(name)
        if name in ignored:
            reason = "ignored_layers"
        elif not isinstance(layer, nn.Linear) and is_depthwise(layer):
            reason = "depthwise: a split gains nothing"
        elif rank == 1:
            reason = "rank 1"
        choices.append(LayerChoice(name, groups * rank, reason))
    return tuple(choices)


def _spared(model: nn.Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """The linear layers that `linear="auto"` leaves alone, and why."""
    last = [list(find_layers(head, nn.Linear, opaque=BasisPair))[-1:] for head in model_heads(model) or [model]]
    heads = [layer for found in last for _, layer in found]
    linear = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    spared = {name: "the classifier: it is trained as it is" for name, layer in linear.items() if layer in heads}
    # Not by the weight itself: one that is computed, such as by a spectral norm, would move when it is read.
    counts = {name: math.prod(matrix_shape(layer)) for name, layer in layers.items() if name not in spared}
    linear_ones = sum(counts[name] for name in linear if name in counts)
    pairs = [pair for _, pair in find_layers(model, BasisPair)]  # what was split before counts as what it was
    all_of_them = sum(counts.values()) + sum(map(_dense_size, pairs))
    linear_ones += sum(_dense_size(pair) for pair in pairs if isinstance(pair.basis, nn.Linear))
    if linear_ones < NOTABLE_SHARE * all_of_them:
        return dict.fromkeys(linear, f"linear layers hold less than {NOTABLE_SHARE:.0%} of the weights") | spared
    return spared


def _dense_size(pair: BasisPair) -> int:
    _, fan_in, _ = matrix_shape(pair.basis)
    return fan_in * pair.out_channels


def decompose(
    model: nn.Module,
    *,
    scale_init: float = 0.5,
    basis: Basis = "weights",
    batches: Iterable[object] | None = None,
    loss: Loss = F.cross_entropy,
    ignored_layers: LayerPatterns = (),
    linear: LinearLayers = "auto",
    inplace: bool = False,
) -> nn.Module:
    """The model with every conv replaced by a `BasisPair`, all scales at `scale_init`.

    At `scale_init=1.0` the output is unchanged; the paper starts its training from 0.5. Layers that are pairs already,
    depthwise convs and `ignored_layers` (modules, names or patterns) stay as they are; `choose_layers` tells which and
    why. So do layers that never run on the `batches`, which are logged. Linear layers are split too, all but the
    classifier, if together they hold a notable share of the weights, as in transformers; `linear=True` splits every
    one, `linear=False` none.

    `basis="weights"` is the paper's: the singular vectors of the weight. `basis="outputs"` takes the
    principal axes of what the conv outputs on `batches` of prepared images (as tensors, or tuples that
    start with them; a few hundred images are enough). `basis="loss"` takes those that matter to the loss, the
    eigenvectors of G^1/2 C G^1/2 (see `loss_basis`); its batches are (images, labels) of training data, `loss`
    gives their mean loss.

    Weights that hooks of torch's old `weight_norm` or `spectral_norm` compute become plain ones everywhere. Raises
    LayerError, naming the layer, for a conv that cannot be reproduced; the model is then untouched.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> decompose(model)[0].rank
    8
    """
    faults = []
    if not 0 < scale_init < float("inf"):
        faults.append(f"scale_init: {scale_init} given; it must be a positive number, such as 1.0 or 0.5")
    if basis not in get_args(Basis):
        faults.append(f"basis: {basis!r} given; allowed are {', '.join(get_args(Basis))}")
    if (basis in ("outputs", "loss")) != (batches is not None):
        faults.append("basis='outputs' or 'loss' and batches of prepared images go together; pass both or neither")
    if linear not in (True, False, "auto"):
        faults.append(f"linear: {linear!r} given; allowed are True, False and 'auto'")
    if faults:
        raise ConfigError.of("decompose", faults)
    if has_computed_weights(model):
        model, inplace = plain_weights(model) if inplace else copied(model), True
    layers = layers_to_split(model, ignored_layers=ignored_layers, linear=linear)
    if basis == "loss" and batches is not None:
        return split_by_axes(model, layers, batches, loss, scale_init=scale_init, inplace=inplace)[0]
    names, statistics = list(layers), {}
    if batches is not None:
        statistics = output_statistics(model, names, batches, optional=names)
        names = that_ran(names, statistics)
    pairs = {name: _split(name, layers[name], scale_init, statistics.get(name)) for name in names}
    return with_pairs(model, pairs, inplace=inplace)


def layers_to_split(
    model: nn.Module, *, ignored_layers: LayerPatterns = (), linear: LinearLayers = "auto"
) -> dict[str, Layer]:
    """Return the layers that `choose_layers` does not leave alone; raise LayerError for one that cannot be split."""
    choices = choose_layers(model, ignored_layers=ignored_layers, linear=linear)
    names = [choice.name for choice in choices if choice.left_alone is None]
    check_layers(model, names)
    layers: dict[str, Layer] = dict(find_layers(model, (*TORCH_CONVS, nn.Linear)))
    return {name: layers[name] for name in names}


def check_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Raise LayerError that names the first of these layers that cannot be split, without splitting any."""
    for name in names:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            plain_linear(name, layer)
        elif isinstance(layer, TORCH_CONVS):
            plain_conv(name, layer)
        if isinstance(weight := layer._parameters.get("weight"), Tensor):
            refuse_odd_numbers(name, weight)


def recompose(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """The model with every `BasisPair` merged into the one dense layer it stands for, scales included.

    The dense layers come out frozen, as the pairs were.

    >>> recompose(decompose(nn.Conv2d(3, 8, 3), scale_init=1.0))
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    """
    result = model if inplace else copy.deepcopy(model)
    for name, pair in list(find_layers(result, BasisPair)):
        result = replace_module(result, name, merge_pair(pair))
    return result


def merge_pair(pair: BasisPair) -> Layer:
    """The dense conv or linear layer that the pair stands for, frozen."""
    with torch.no_grad():
        weight = dense_weight(pair.basis, pair.scaling)
    if isinstance(pair.basis, nn.Linear):
        return make_linear(weight, pair.bias)
    return clone_conv(pair.basis, weight, pair.bias)


@torch.no_grad()
def _split(name: str, layer: Layer, scale_init: float, statistics: OutputStatistics | None) -> BasisPair:
    plain, matrix = plain_layer(name, layer)
    first, second = weight_basis(matrix) if statistics is None else output_basis(matrix, statistics.covariance)
    return make_pair(plain, first, second, plain.bias, scale=scale_init)


def weight_basis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """U (…, k, r) with orthonormal columns and V-bar transposed (…, r, c_o), W = U V-bar transposed (eq. 1, 2).

    The compact SVD of `matrix` (…, k, c_o), in descending order of the singular values, by way of the
    smaller Gram matrix: cheaper than a direct SVD (benchmarks/step.py), and as exact in what it reproduces.
    """
    tall = matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT
    _, vectors = torch.linalg.eigh(tall.mT @ tall)
    vectors = vectors.flip(-1)
    projected = tall @ vectors  # orthogonal columns, as long as the singular values
    if tall is not matrix:
        return vectors, projected.mT
    lengths = torch.linalg.vector_norm(projected, dim=-2, keepdim=True)
    # Squaring costs small singular values digits (1e-3 of the largest: six of sixteen); below, columns need a QR.
    if bool((lengths.amin(-1) > 1e-3 * lengths.amax(-1)).all()):
        return projected / lengths, lengths.mT * vectors.mT
    orthonormal, triangle = torch.linalg.qr(projected)
    return orthonormal, triangle @ vectors.mT


def output_basis(matrix: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """W Q (…, k, r) and Q transposed (…, r, c_o), with Q the principal axes of the layer's outputs.

    Q (…, c_o, r) is taken within the row space of W, so that W = W Q Q^T holds at full rank even where
    the images do not excite all of it.
    """
    if matrix.shape[-2] < matrix.shape[-1]:
        space, _ = torch.linalg.qr(matrix.mT)  # (…, c_o, k): all that this layer can output
        _, inner = torch.linalg.eigh(space.mT @ covariance @ space)
        axes = space @ inner.flip(-1)
    else:
        _, vectors = torch.linalg.eigh(covariance)
        axes = vectors.flip(-1)
    return matrix @ axes, axes.mT
