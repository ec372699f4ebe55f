"""How labels pass through each operation that only moves, combines or reduces values.

`RULES` maps the name of an aten operation (without the underscore of its in-place form) to a function of
the call; `basisprune.coupling.products` adds those that contract an axis. What is in neither table and not
element-wise by torch's own tags is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from basisprune.coupling.labels import (
    Labels,
    compress,
    join,
    reduce,
    reshape,
    support,
    useful,
    vector,
)
from basisprune.coupling.ledger import Ids, Ledger


@dataclass(frozen=True)
class Call:
    """One operation while the network runs: its arguments, its result, and where it happened."""

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
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """A decorator that enters a rule for the operations of these names."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def _dims(dims: Any, ndim: int) -> list[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(ndim))
    return [dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)]


@rule(
    "_softmax", "_safe_softmax", "_log_softmax", "_to_copy", "_unsafe_masked", "alias", "bernoulli", "clone",
    "contiguous", "copy", "cumsum", "detach", "empty_like", "fill", "full_like", "lift_fresh", "masked_fill",
    "native_dropout", "ones_like", "rand_like", "randn_like", "uniform", "normal", "zero", "zeros_like", "where",
)  # fmt: skip
def elementwise(call: Call) -> Labels:
    """Every element of the result comes from the elements at its place."""
    tensors = [item for item in (*call.args, *call.kwargs.values()) if isinstance(item, Tensor)]
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    return join(call.ledger, [(call.labels_of(item), tuple(item.shape)) for item in tensors], out.ndim)


@rule("as_strided")
def _as_strided(call: Call) -> Labels:
    if call.out.shape == call.source.shape:
        return call.labels
    for ids in call.labels.fields:
        call.ledger.freeze(ids, "as_strided reads its memory directly")
    return Labels((), call.labels.active)


@rule(
    "all", "amax", "amin", "any", "linalg_vector_norm", "logsumexp", "max", "mean", "min", "norm", "prod",
    "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
def _reduction(call: Call) -> Labels:
    """Channels that are summed up vanish; a sum over something else leaves them."""
    ndim = call.source.ndim
    place, name = {"linalg_vector_norm": (2, "dim"), "norm": (2, "dim")}.get(_name(call), (1, "dim"))
    dims = call.get(place, name)
    if isinstance(dims, Tensor):  # max and min of two tensors
        return elementwise(call)
    dims = _dims(dims if not isinstance(dims, bool) else None, ndim)
    out = call.out if isinstance(call.out, Tensor) else call.out[0]
    fields = [reduce(call.ledger, ids, dims) for ids in call.labels.fields]
    kept = [ids for ids in fields if ids is not None]
    if out.ndim != ndim:
        kept = [np.squeeze(ids, axis=tuple(dims)) for ids in kept]
    return useful(call.ledger, kept, call.labels.active)


def _name(call: Call) -> str:
    name: str = getattr(call.func, "_schema").name.split("::")[1]  # noqa: B009  (a torch operator)
    return name


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "unflatten", "flatten")
def _view(call: Call) -> Labels:
    """The ids are viewed like the values; an axis of channels that falls apart must be cut evenly."""
    source, target = tuple(call.source.shape), tuple(call.out.shape)
    if call.source.numel() == 0:
        return Labels((), call.labels.active)
    fields = []
    for ids in call.labels.fields:
        shaped = reshape(ids, source, target)
        axes = support(shaped)
        if axes:
            inner = axes[-1]
            if len(axes) > len(support(ids)):
                rows = np.moveaxis(shaped, inner, -1).reshape(-1, shaped.shape[inner])
                call.ledger.split(np.unique(rows, axis=0))
            call.ledger.hint(call.module, target[inner], shaped.ravel(), shaped.size // shaped.shape[inner])
        fields.append(shaped)
    return useful(call.ledger, fields, call.labels.active)


@rule("permute")
def _permute(call: Call) -> Labels:
    return call.each(lambda ids: ids.transpose([dim % ids.ndim for dim in call.args[1]]))


@rule("transpose")
def _transpose(call: Call) -> Labels:
    return call.each(lambda ids: ids.swapaxes(call.args[1], call.args[2]) if ids.ndim else ids)


@rule("t")
def _t(call: Call) -> Labels:
    return call.each(lambda ids: ids.T)


@rule("unsqueeze")
def _unsqueeze(call: Call) -> Labels:
    return call.each(lambda ids: np.expand_dims(ids, call.args[1]))


@rule("squeeze")
def _squeeze(call: Call) -> Labels:
    ndim = call.source.ndim
    dims = tuple(dim for dim in _dims(call.get(1, "dim"), ndim) if call.source.shape[dim] == 1)
    return call.each(lambda ids: np.squeeze(ids, axis=dims))


@rule("expand")
def _expand(call: Call) -> Labels:
    return call.each(lambda ids: ids.reshape((1,) * (call.out.ndim - ids.ndim) + ids.shape))


@rule("select")
def _select(call: Call) -> Labels:
    dim, index = call.args[1] % call.source.ndim, call.args[2]
    return call.each(lambda ids: ids.take(index if ids.shape[dim] > 1 else 0, axis=dim))


@rule("slice")
def _slice(call: Call) -> Labels:
    dim, size = call.get(1, "dim", 0) % call.source.ndim, call.source.shape[call.get(1, "dim", 0)]
    start, end, step = slice(call.get(2, "start"), call.get(3, "end"), call.get(4, "step", 1)).indices(size)

    def change(ids: Ids) -> Ids:
        if ids.shape[dim] == 1:
            return ids
        for edge in {start, end, size - start} - {0, size}:
            before = ids[(slice(None),) * dim + (slice(0, edge),)]
            call.ledger.hint(call.module, edge, before.ravel(), before.size // edge)
        taken: Ids = ids[(slice(None),) * dim + (slice(start, end, step),)]
        return taken

    return call.each(change)


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def _split(call: Call) -> list[Labels]:
    """Pieces of an axis; pieces of one size must stay of one size."""
    dim = call.get(2, "dim", 0) % call.source.ndim
    sizes = [piece.shape[dim] for piece in call.out]
    edges = np.cumsum([0, *sizes]).tolist()
    for ids in call.labels.fields:
        if ids.shape[dim] > 1:
            call.ledger.hint(call.module, ids.shape[dim], ids.ravel(), ids.size // ids.shape[dim])
        if support(ids) == (dim,) and len(set(sizes)) == 1:
            call.ledger.split(ids.reshape(len(sizes), -1), hard=True)

    def piece(start: int, end: int) -> Labels:
        def change(ids: Ids) -> Ids:
            if ids.shape[dim] == 1:
                return ids
            part: Ids = ids[(slice(None),) * dim + (slice(start, end),)]
            call.ledger.hint(call.module, end - start, part.ravel(), part.size // (end - start))
            return part

        return call.each(change)

    return [piece(start, end) for start, end in zip(edges, edges[1:], strict=False)]


@rule("unbind")
def _unbind(call: Call) -> list[Labels]:
    dim = call.get(1, "dim", 0) % call.source.ndim

    def piece(place: int) -> Labels:
        return call.each(lambda ids: ids.take(place if ids.shape[dim] > 1 else 0, axis=dim))

    return [piece(place) for place in range(len(call.out))]


@rule("cat", "stack", "concatenate")
def _cat(call: Call) -> Labels:
    """Channels stand side by side along the axis; along all other axes the pieces must match."""
    dim = call.get(1, "dim", 0) % call.out.ndim
    stacked = _name(call) == "stack"
    pieces: list[tuple[Labels, tuple[int, ...]]] = []
    for item in call.args[0]:
        labels, shape = call.labels_of(item), tuple(item.shape)
        if shape == (0,):
            continue
        if stacked:
            labels = Labels(tuple(np.expand_dims(ids, dim) for ids in labels.fields), labels.active)
            shape = (*shape[:dim], 1, *shape[dim:])
        pieces.append((labels, shape))
    along = [[ids for ids in labels.fields if ids.shape[dim] > 1] for labels, _ in pieces]
    across = [
        (Labels(tuple(ids for ids in labels.fields if ids.shape[dim] == 1), labels.active), shape)
        for labels, shape in pieces
    ]
    joined = join(call.ledger, across, call.out.ndim)
    fields = [*joined.fields, *_side_by_side(call, along, [shape for _, shape in pieces], dim)]
    return useful(call.ledger, fields, joined.active)


def _side_by_side(call: Call, along: list[list[Ids]], shapes: list[tuple[int, ...]], dim: int) -> list[Ids]:
    if not any(along):
        return []
    for found in along:
        for ids in found[1:]:
            call.ledger.freeze(ids, "two kinds of channels share an axis that is concatenated")
    firsts = [
        found[0] if found else np.zeros([shape[d] if d == dim else 1 for d in range(len(shape))], np.int64)
        for found, shape in zip(along, shapes, strict=True)
    ]
    common = np.max([ids.shape for ids in firsts], axis=0)
    wide = []
    for ids in firsts:
        common[dim] = ids.shape[dim]
        wide.append(np.broadcast_to(ids, common))
    return [np.concatenate(wide, axis=dim)]


@rule("index_select")
def _index_select(call: Call) -> Labels:
    dim, index = call.args[1] % call.source.ndim, call.args[2].cpu().numpy()
    return call.each(lambda ids: ids.take(index, axis=dim) if ids.shape[dim] > 1 else ids)


@rule("roll", "flip", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip
def _spatial_move(call: Call) -> Labels:
    """Values move along some axes; channels that lie along others are not concerned."""
    touched = _touched(call)
    if all(ids.shape[dim] == 1 for ids in call.labels.fields for dim in touched):
        return call.labels
    return as_data(call)


def _touched(call: Call) -> list[int]:
    ndim = call.source.ndim
    if _name(call) in ("roll", "flip"):
        return _dims(call.get(2, "dims") if _name(call) == "roll" else call.args[1], ndim)
    pad = call.args[1]
    return [ndim - 1 - place // 2 for place, width in enumerate(pad) if width]


@rule("index", "repeat", "pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "channel_shuffle",
      "unfold", "im2col", "tril", "triu", "diagonal")  # fmt: skip
def as_data(call: Call) -> Labels:
    """The ids go through the operation as if they were the values."""
    fields = []
    for ids in call.labels.fields:
        # float64 holds every id exactly, and every operation that moves values has a kernel for it
        wide = torch.from_numpy(np.broadcast_to(ids, tuple(call.source.shape)).astype(np.float64))
        moved = call.func(wide, *call.args[1:], **call.kwargs)
        fields.append(compress(moved.numpy().astype(np.int64)))
    return useful(call.ledger, fields, call.labels.active)


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
            call.ledger.freeze(ids, f"{_name(call)} mixes its channels")
        else:
            kept.append(ids)
    return Labels(tuple(kept), call.labels.active)


def _channel_axis(call: Call) -> int:
    spatial = next(int(char) for char in _name(call) if char.isdigit())
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
    grouped = _name(call) == "native_group_norm"
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
    return join(call.ledger, operands, call.source.ndim)

