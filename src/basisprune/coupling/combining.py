"""How labels pass through operations that combine or reduce values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from basisprune.coupling.labels import Labels, join, reduce, support, useful, vector
from basisprune.coupling.ledger import Ids
from basisprune.coupling.rules import Operation, RuleTable, all_dims

COMBINING = RuleTable()


@COMBINING.rule(
    "_log_softmax", "_prelu_kernel", "_safe_softmax", "_softmax", "_to_copy", "alias", "bernoulli", "clone",
    "contiguous", "cumsum", "detach", "empty_like", "fill", "full_like", "hardswish", "lift_fresh",
    "log_sigmoid_forward", "masked_fill", "native_dropout", "normal", "ones_like", "rand_like", "randn_like",
    "rrelu_with_noise", "uniform", "where", "zero", "zeros_like",
)  # fmt: skip
def elementwise(call: Operation) -> Labels:
    """Every element of the result comes from the elements at its place."""
    tensors = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Tensor)]
    return join(call.ledger, [(call.labels_of(item), tuple(item.shape)) for item in tensors], call.result.ndim)


@COMBINING.rule("glu")
def _glu(call: Operation) -> Labels:
    """The first half of the channels is gated by the second."""
    dim = call.axis(1, "dim", -1)

    def change(ids: Ids) -> Ids:
        if ids.shape[dim] == 1:
            return ids
        first, second = np.split(ids, 2, axis=dim)
        call.ledger.unite(first, second)
        return first

    return call.each(change)


@COMBINING.rule(
    "all", "amax", "amin", "any", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "norm", "prod",
    "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
def _reduction(call: Operation) -> Labels:
    """Channels that are summed up vanish; a sum over something else leaves them."""
    ndim = call.source.ndim
    place, name = {"linalg_vector_norm": (2, "dim"), "norm": (2, "dim")}.get(call.name, (1, "dim"))
    named = call.get(place, name)
    if isinstance(named, Tensor):  # max and min of two tensors
        return elementwise(call)
    dims = all_dims(named if not isinstance(named, bool) else None, ndim)
    fields = [reduce(call.ledger, ids, dims) for ids in call.labels.fields]
    kept = [ids for ids in fields if ids is not None]
    if call.result.ndim != ndim:
        kept = [np.squeeze(ids, axis=tuple(dims)) for ids in kept]
    return useful(call.ledger, kept, call.labels.active)


@COMBINING.rule(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool2d",
    "max_pool3d_with_indices", "mkldnn_max_pool2d", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact2d",
)  # fmt: skip
def _resample(call: Operation) -> Labels:
    """Maps are resampled over space; channels that lie along space would be mixed."""
    kept = []
    changed = range(_channel_axis(call) + 1, call.source.ndim)
    for ids in call.labels.fields:
        if any(ids.shape[dim] > 1 for dim in changed):
            call.ledger.freeze(ids, f"{call.name} mixes its channels")
        else:
            kept.append(ids)
    return Labels(tuple(kept), call.labels.active)


@COMBINING.rule("torchvision::roi_align", "torchvision::roi_pool")
def _regions(call: Operation) -> Labels:
    """Regions are cut out of maps: each keeps the channels of axis 1."""
    kept = []
    for ids in call.labels.fields:
        if support(ids) == (1,):
            kept.append(ids)
        else:
            call.ledger.freeze(ids, "regions are cut out of an axis that holds its channels")
    return Labels(tuple(kept), active=True)


def _channel_axis(call: Operation) -> int:
    spatial = next(int(char) for char in call.name if char.isdigit())
    return call.source.ndim - 1 - spatial


def _vectors(call: Operation, tensors: Sequence[object], ndim: int) -> list[tuple[Labels, tuple[int, ...]]]:
    """1-d tensors as operands along axis 1."""
    operands = []
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            labels = call.labels_of(tensor)
            fields = tuple(vector(ids, 1, ndim) for ids in labels.fields if ids.size > 1)
            operands.append((Labels(fields, labels.active), (tensor.shape[0], *(1,) * (ndim - 2))))
    return operands


@COMBINING.rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
      "_batch_norm_with_update", "cudnn_batch_norm", "native_group_norm", "instance_norm")  # fmt: skip
def _channel_norm(call: Operation) -> Labels:
    """Scales, shifts and statistics belong to the channels of axis 1."""
    grouped = call.name == "native_group_norm"
    shape = tuple(call.source.shape)
    tensors = call.args[1:3] if grouped else call.args[1:5]
    labels = join(call.ledger, [(call.labels, shape), *_vectors(call, tensors, len(shape))], len(shape))
    groups = call.number(6) if grouped else 1
    if 1 < groups < shape[1]:
        for ids in labels.fields:
            if support(ids) == (1,):
                call.ledger.split(ids.reshape(groups, -1), hard=True)
    return labels


@COMBINING.rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Operation) -> Labels:
    """Scales and shifts belong to the last axes; the statistics only follow."""
    tensors = [call.source, *(item for item in call.args[2:4] if isinstance(item, Tensor))]
    operands = [(call.labels_of(item), tuple(item.shape)) for item in tensors]
    labels = join(call.ledger, operands, call.source.ndim)
    for ids in labels.fields:
        call.ledger.hint(call.module, ids, ids.ndim - 1)
    return labels
