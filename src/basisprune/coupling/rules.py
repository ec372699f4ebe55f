"""How labels pass through operations that combine or reduce values.

`RULES` maps the name of an aten operation (without the underscore of its in-place form) to a function of
the call; `moves` enters those that only move values, `products` those that contract an axis. What has no
rule and is not element-wise by torch's own tags is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from basisprune.coupling.labels import Labels, join, reduce, support, useful, vector
from basisprune.coupling.ledger import Ids, Ledger


@dataclass(frozen=True)
class Call:
    """One operation while the network runs: its arguments, its result, and where it happened.

    `name` is that of the aten operation without the underscore of the in-place form.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    module: str
    ledger: Ledger
    labels_of: Callable[[Tensor], Labels]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at that place or of that name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def source(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.args[0]
        return tensor

    @property
    def labels(self) -> Labels:
        """The labels of the first argument."""
        return self.labels_of(self.source)

    def each(self, change: Callable[[Ids], Ids]) -> Labels:
        """Labels with every field of the first argument changed alike."""
        labels = self.labels
        return useful(self.ledger, [change(ids) for ids in labels.fields], labels.active)


Rule = Callable[[Call], Labels | list[Labels]]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[AnyRule], AnyRule]:
    """A decorator that enters a rule for the operations of these names."""

    def enter(function: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def all_dims(dims: Any, ndim: int) -> list[int]:
    """The axes that an argument names, counted from the front; none named means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(ndim))
    return [dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)]


@rule(
    "_log_softmax", "_prelu_kernel", "_safe_softmax", "_softmax", "_to_copy", "alias", "bernoulli", "clone",
    "contiguous", "cumsum", "detach", "empty_like", "fill", "full_like", "hardswish", "lift_fresh",
    "log_sigmoid_forward", "masked_fill", "native_dropout", "normal", "ones_like", "rand_like", "randn_like",
    "rrelu_with_noise", "uniform", "where", "zero", "zeros_like",
)  # fmt: skip
def elementwise(call: Call) -> Labels:
    """Every element of the result comes from the elements at its place."""
    tensors = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Tensor)]
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    return join(call.ledger, [(call.labels_of(item), tuple(item.shape)) for item in tensors], out.ndim)


@rule("glu")
def _glu(call: Call) -> Labels:
    """The first half of the channels is gated by the second."""
    dim = call.get(1, "dim", -1) % call.source.ndim

    def change(ids: Ids) -> Ids:
        if ids.shape[dim] == 1:
            return ids
        first, second = np.split(ids, 2, axis=dim)
        call.ledger.unite(first, second)
        return first

    return call.each(change)


@rule(
    "all", "amax", "amin", "any", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "norm", "prod",
    "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
def _reduction(call: Call) -> Labels:
    """Channels that are summed up vanish; a sum over something else leaves them."""
    ndim = call.source.ndim
    place, name = {"linalg_vector_norm": (2, "dim"), "norm": (2, "dim")}.get(call.name, (1, "dim"))
    dims = call.get(place, name)
    if isinstance(dims, Tensor):  # max and min of two tensors
        return elementwise(call)
    dims = all_dims(dims if not isinstance(dims, bool) else None, ndim)
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    fields = [reduce(call.ledger, ids, dims) for ids in call.labels.fields]
    kept = [ids for ids in fields if ids is not None]
    if out.ndim != ndim:
        kept = [np.squeeze(ids, axis=tuple(dims)) for ids in kept]
    return useful(call.ledger, kept, call.labels.active)


@rule(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool2d",
    "max_pool3d_with_indices", "mkldnn_max_pool2d", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact2d",
)  # fmt: skip
def _resample(call: Call) -> Labels:
    """Maps are resampled over space; channels that lie along space would be mixed."""
    kept = []
    changed = range(_channel_axis(call) + 1, call.source.ndim)
    for ids in call.labels.fields:
        if any(ids.shape[dim] > 1 for dim in changed):
            call.ledger.freeze(ids, f"{call.name} mixes its channels")
        else:
            kept.append(ids)
    return Labels(tuple(kept), call.labels.active)


def _channel_axis(call: Call) -> int:
    spatial = next(int(char) for char in call.name if char.isdigit())
    return call.source.ndim - 1 - spatial


def _vectors(call: Call, tensors: Sequence[Any], ndim: int) -> list[tuple[Labels, tuple[int, ...]]]:
    """1-d tensors as operands along axis 1."""
    operands = []
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            labels = call.labels_of(tensor)
            fields = tuple(vector(ids, 1, ndim) for ids in labels.fields if ids.size > 1)
            operands.append((Labels(fields, labels.active), (tensor.shape[0], *(1,) * (ndim - 2))))
    return operands


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
      "_batch_norm_with_update", "cudnn_batch_norm", "native_group_norm", "instance_norm")  # fmt: skip
def _channel_norm(call: Call) -> Labels:
    """Scales, shifts and statistics belong to the channels of axis 1."""
    grouped = call.name == "native_group_norm"
    shape = tuple(call.source.shape)
    tensors = call.args[1:3] if grouped else call.args[1:5]
    labels = join(call.ledger, [(call.labels, shape), *_vectors(call, tensors, len(shape))], len(shape))
    if grouped and 1 < call.args[6] < shape[1]:
        for ids in labels.fields:
            if support(ids) == (1,):
                call.ledger.split(ids.reshape(call.args[6], -1), hard=True)
    return labels


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: Call) -> Labels:
    """Scales and shifts belong to the last axes; the statistics only follow."""
    tensors = [call.source, *(item for item in call.args[2:4] if isinstance(item, Tensor))]
    operands = [(call.labels_of(item), tuple(item.shape)) for item in tensors]
    labels = join(call.ledger, operands, call.source.ndim)
    for ids in labels.fields:
        call.ledger.hint(call.module, ids, ids.ndim - 1)
    return labels
