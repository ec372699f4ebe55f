"""How labels pass through operations that combine values: element-wise, reductions, norms and products."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch._ops import OpOverload

from basisprune.coupling.labels import (
    Ids,
    Labels,
    Operation,
    RuleTable,
    all_dims,
    join,
    reduce,
    squash,
    support,
    useful,
    vector,
)
from basisprune.torchkit.running import tensors_in

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
    return join(call.ledger, list(map(call.operand, tensors)), call.result.ndim)


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
    named = call.get(2 if call.name in ("linalg_vector_norm", "norm") else 1, "dim")
    if isinstance(named, Tensor):  # max and min of two tensors
        return elementwise(call)
    dims = all_dims(None if isinstance(named, bool) else named, ndim)
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
    spatial = next(int(char) for char in call.name if char.isdigit())
    changed = range(call.source.ndim - spatial, call.source.ndim)
    return call.keep(lambda ids: all(ids.shape[dim] == 1 for dim in changed), f"{call.name} mixes its channels")


@COMBINING.rule("torchvision::roi_align", "torchvision::roi_pool")
def _regions(call: Operation) -> Labels:
    """Regions are cut out of maps: each keeps the channels of axis 1."""
    kept = call.keep(lambda ids: support(ids) == (1,), "regions are cut out of an axis that holds its channels")
    return Labels(kept.fields, active=True)


@COMBINING.rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
      "_batch_norm_with_update", "cudnn_batch_norm", "native_group_norm", "instance_norm")  # fmt: skip
def _channel_norm(call: Operation) -> Labels:
    """Scales, shifts and statistics belong to the channels of axis 1."""
    grouped = call.name == "native_group_norm"
    ndim, operands = call.source.ndim, [call.operand(call.source)]
    for item in call.args[1:3] if grouped else call.args[1:5]:
        if isinstance(item, Tensor):
            labels = call.labels_of(item)
            fields = tuple(vector(ids, 1, ndim) for ids in labels.fields if ids.size > 1)
            operands.append((Labels(fields, labels.active), (item.shape[0], *(1,) * (ndim - 2))))
    joined = join(call.ledger, operands, ndim)
    groups = call.number(6) if grouped else 1
    for ids in joined.fields if 1 < groups < call.source.shape[1] else ():
        if support(ids) == (1,):
            call.ledger.split(ids.reshape(groups, -1), hard=True)
    return joined


@COMBINING.rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Operation) -> Labels:
    """Scales and shifts belong to the last axes; the statistics only follow."""
    tensors = [call.source, *(item for item in call.args[2:4] if isinstance(item, Tensor))]
    labels = join(call.ledger, list(map(call.operand, tensors)), call.source.ndim)
    for ids in labels.fields:
        call.ledger.hint(call.module, ids, ids.ndim - 1)
    return labels


PRODUCTS = RuleTable()


def _contract(call: Operation, left: Tensor, right: Tensor) -> Labels:
    """Labels of (b, n, k) @ (b, k, m), or without b; the channels along k meet and vanish."""
    lead = (1,) * (3 - left.ndim)
    a, b = call.labels_of(left), call.labels_of(right)
    rows = [ids.reshape(*lead, *ids.shape, 1) for ids in a.fields]
    columns = [ids.reshape(*lead, *ids.shape[:-2], 1, *ids.shape[-2:]) for ids in b.fields]
    inner_rows = [ids for ids in rows if ids.shape[2] > 1]
    inner_columns = [ids for ids in columns if ids.shape[2] > 1]
    for ids in inner_rows:
        for other in inner_columns:
            call.ledger.unite(squash(call.ledger, ids, (0, 2)), squash(call.ledger, other, (0, 2)))
    if not (inner_rows and inner_columns):
        for ids in (*inner_rows, *inner_columns):
            call.ledger.freeze(ids, "it is multiplied with data that is not a channel")
    outer_rows = tuple(ids[:, :, 0, :] for ids in rows if ids.shape[2] == 1 and support(ids))
    outer_columns = tuple(ids[:, :, 0, :] for ids in columns if ids.shape[2] == 1 and support(ids))
    if a.active != b.active:
        call.ledger.produced.extend(outer_columns if a.active else outer_rows)
    batch, n, m = (*lead, *left.shape[:-2])[0], left.shape[-2], right.shape[-1]
    operands = [(Labels(outer_rows, a.active), (batch, n, 1)), (Labels(outer_columns, b.active), (batch, 1, m))]
    joined = join(call.ledger, operands, 3)
    return Labels(tuple(ids[0] for ids in joined.fields), joined.active) if lead else joined


@PRODUCTS.rule("mm", "bmm")
def _mm(call: Operation) -> Labels:
    return _contract(call, call.tensor(0), call.tensor(1))


@PRODUCTS.rule("addmm", "baddbmm")
def _addmm(call: Operation) -> Labels:
    result = (_contract(call, call.tensor(1), call.tensor(2)), tuple(call.result.shape))
    return join(call.ledger, [result, call.operand(call.source)], call.result.ndim)


def _vector_along(call: Operation, labels: Labels, dim: int, size: int, *, apart_from: int = 0) -> Ids:
    """The ids of the channels along one axis (zeros where there are none); other axes are united.

    Fields that depend on the axis `apart_from`, too, belong to that one.
    """
    found = [
        squash(call.ledger, ids, (dim,)).ravel()
        for ids in labels.fields
        if ids.shape[dim] > 1 and (apart_from == 0 or ids.shape[apart_from] == 1)
    ]
    for other in found[1:]:
        call.ledger.unite(found[0], other)
    return found[0] if found else np.zeros(size, np.int64)


@PRODUCTS.rule("convolution")
def _convolution(call: Operation) -> Labels:
    """Input channels meet the weight's, filters become channels; groups must be cut evenly."""
    x, weight, bias = call.tensor(0), call.tensor(1), call.args[2]
    transposed, groups = bool(call.args[6]), call.number(8)
    labels, kernel = call.labels_of(x), call.labels_of(weight)
    channels, filters = x.shape[1], call.result.shape[1]
    inputs = _vector_along(call, labels, 1, channels).reshape(groups, -1)
    if transposed:
        consumed = _vector_along(call, kernel, 0, channels, apart_from=1).reshape(groups, -1)
        call.ledger.unite(inputs, consumed)
        outputs = np.tile(_vector_along(call, kernel, 1, filters // groups), groups)
    else:
        consumed = _vector_along(call, kernel, 1, channels // groups)
        outputs = _vector_along(call, kernel, 0, filters, apart_from=1)
    # all inputs alike: a grouped conv that was cut to one channel per group is not a depthwise one
    depthwise = groups > 1 and channels == groups and call.module not in call.ledger.mixing
    if depthwise and (inputs != inputs[0]).any():  # one group per input channel: it goes with its filters
        if transposed:
            outputs = np.repeat(inputs.ravel(), filters // groups)
        else:
            call.ledger.unite(inputs, outputs.reshape(groups, -1))
            if not inputs.all():
                call.ledger.freeze(outputs, "it reads an axis that is not a channel")
    else:
        call.ledger.unite(inputs, consumed)
        if groups > 1:
            call.ledger.split(inputs if transposed else outputs.reshape(groups, -1), hard=True)
    _fix_lonely(call, inputs, consumed)
    call.ledger.hint(call.module, inputs.ravel(), 0)
    call.ledger.hint(call.module, outputs, 0)
    call.ledger.produced.append(outputs)
    for ids in call.labels_of(bias).fields if isinstance(bias, Tensor) else ():
        call.ledger.unite(ids, outputs)
    fields = [vector(outputs, 1, x.ndim), *_along_space(call, x, labels)]
    return useful(call.ledger, fields, labels.active or kernel.active)


def _fix_lonely(call: Operation, inputs: Ids, consumed: Ids) -> None:
    if not inputs.all():
        lonely = np.where(inputs == 0, consumed, 0) if inputs.any() else consumed
        call.ledger.freeze(lonely, "it reads data that is not a channel")
    if consumed.size > 1 and not consumed.any():
        call.ledger.freeze(inputs, "it is multiplied with data that is not a channel")


def _along_space(call: Operation, x: Tensor, labels: Labels) -> list[Ids]:
    """Fields of channels that lie along a spatial axis: they stay if the conv keeps the axis as it is."""
    kept = []
    for ids in labels.fields:
        if ids.shape[1] > 1 or not support(ids):
            continue
        if all(x.shape[dim] == call.result.shape[dim] for dim in support(ids)):
            kept.append(ids)
        else:
            call.ledger.freeze(ids, "a convolution mixes its channels")
    return kept


def shape_only(func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """A tensor of zeros with the shape that the product would have; nothing is multiplied."""
    meta = [item.to("meta") if isinstance(item, Tensor) else item for item in args]
    like = next(item for item in args if isinstance(item, Tensor))
    (result,) = tensors_in(func(*meta, **kwargs))
    return like.new_zeros(result.shape)
