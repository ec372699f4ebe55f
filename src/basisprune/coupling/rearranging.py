"""How labels pass through operations that only move values: views, slices, concatenations, writes."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from basisprune.coupling.combining import elementwise
from basisprune.coupling.labels import (
    CONSTANT,
    Ids,
    Labels,
    Operation,
    RuleTable,
    all_dims,
    attach,
    join,
    listed,
    narrow,
    part,
    reshape,
    support,
    useful,
)

REARRANGING = RuleTable()


@REARRANGING.rule("view", "reshape", "_unsafe_view", "_reshape_alias", "unflatten", "flatten")
def _view(call: Operation) -> Labels:
    """The ids are viewed like the values; an axis of channels that falls apart must be cut evenly."""
    source, target = tuple(call.source.shape), tuple(call.result.shape)
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
            call.ledger.hint(call.module, shaped, inner)
        fields.append(shaped)
    return useful(call.ledger, fields, call.labels.active)


@REARRANGING.rule("permute")
def _permute(call: Operation) -> Labels:
    dims = all_dims(call.args[1], call.source.ndim)
    return call.each(lambda ids: ids.transpose(dims))


@REARRANGING.rule("transpose")
def _transpose(call: Operation) -> Labels:
    return call.each(lambda ids: ids.swapaxes(call.number(1), call.number(2)) if ids.ndim else ids)


@REARRANGING.rule("t")
def _t(call: Operation) -> Labels:
    return call.each(lambda ids: ids.T)


@REARRANGING.rule("unsqueeze")
def _unsqueeze(call: Operation) -> Labels:
    return call.each(lambda ids: np.expand_dims(ids, call.number(1)))


@REARRANGING.rule("squeeze")
def _squeeze(call: Operation) -> Labels:
    ndim = call.source.ndim
    dims = tuple(dim for dim in all_dims(call.get(1, "dim"), ndim) if call.source.shape[dim] == 1)
    return call.each(lambda ids: np.squeeze(ids, axis=dims))


@REARRANGING.rule("expand")
def _expand(call: Operation) -> Labels:
    return call.each(lambda ids: ids.reshape((1,) * (call.result.ndim - ids.ndim) + ids.shape))


@REARRANGING.rule("select")
def _select(call: Operation) -> Labels:
    dim, index = call.number(1) % call.source.ndim, call.number(2)
    return call.each(lambda ids: part(ids, dim, index))


@REARRANGING.rule("slice")
def _slice(call: Operation) -> Labels:
    dim = call.axis(1, "dim", 0)
    size = call.source.shape[dim]
    start, end, step = slice(call.get(2, "start"), call.get(3, "end"), call.get(4, "step", 1)).indices(size)

    def change(ids: Ids) -> Ids:
        for edge in {start, end, size - start} - {0, size}:
            call.ledger.hint(call.module, part(ids, dim, slice(0, edge)), dim)
        return part(ids, dim, slice(start, end, step))

    return call.each(change)


@REARRANGING.rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def _split(call: Operation) -> list[Labels]:
    """Pieces of an axis; pieces of one size must stay of one size."""
    dim = call.axis(2, "dim", 0)
    sizes = [piece.shape[dim] for piece in call.results]
    for ids in call.labels.fields:
        call.ledger.hint(call.module, ids, dim)
        if support(ids) == (dim,) and len(set(sizes)) == 1:
            call.ledger.split(ids.reshape(len(sizes), -1), hard=True)
    pieces = []
    for start, end in pairwise(np.cumsum([0, *sizes]).tolist()):
        pieces.append(call.each(partial(part, dim=dim, places=slice(start, end))))
        for ids in call.labels.fields:
            call.ledger.hint(call.module, part(ids, dim, slice(start, end)), dim)
    return pieces


@REARRANGING.rule("unbind")
def _unbind(call: Operation) -> list[Labels]:
    dim = call.axis(1, "dim", 0)
    return [call.each(partial(part, dim=dim, places=place)) for place in range(len(call.results))]


@REARRANGING.rule("cat", "stack", "concatenate")
def _cat(call: Operation) -> Labels:
    """Channels stand side by side along the axis; along all other axes the pieces must match."""
    (dim,) = all_dims(call.get(1, "dim", 0), call.result.ndim)
    pieces: list[tuple[Labels, tuple[int, ...]]] = []
    for item in listed(call.args[0]):
        if not isinstance(item, Tensor) or item.shape == (0,):
            continue
        labels, shape = call.operand(item)
        if call.name == "stack":
            labels = Labels(tuple(np.expand_dims(ids, dim) for ids in labels.fields), labels.active)
            shape = (*shape[:dim], 1, *shape[dim:])
        pieces.append((labels, shape))
    along = [[ids for ids in labels.fields if ids.shape[dim] > 1] for labels, _ in pieces]
    across = [
        (Labels(tuple(ids for ids in labels.fields if ids.shape[dim] == 1), labels.active), shape)
        for labels, shape in pieces
    ]
    joined = join(call.ledger, across, call.result.ndim)
    beside = _side_by_side(call, along, [shape for _, shape in pieces], dim) if any(along) else []
    return useful(call.ledger, [*joined.fields, *beside], joined.active)


def _side_by_side(call: Operation, along: list[list[Ids]], shapes: list[tuple[int, ...]], dim: int) -> list[Ids]:
    for found in along:
        for ids in found[1:]:
            call.ledger.freeze(ids, "two kinds of channels share an axis that is concatenated")
    firsts = [
        found[0] if found else np.zeros([size if d == dim else 1 for d, size in enumerate(shape)], np.int64)
        for found, shape in zip(along, shapes, strict=True)
    ]
    common = np.max([ids.shape for ids in firsts], axis=0)
    wide = [np.broadcast_to(ids, [*common[:dim], ids.shape[dim], *common[dim + 1 :]]) for ids in firsts]
    return [np.concatenate(wide, axis=dim)]


@REARRANGING.rule("index_select")
def _index_select(call: Operation) -> Labels:
    dim, index = call.number(1) % call.source.ndim, call.tensor(2).cpu().numpy()
    return call.each(lambda ids: ids.take(index, axis=dim) if ids.shape[dim] > 1 else ids)


@REARRANGING.rule("roll", "flip", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip
def _spatial_move(call: Operation) -> Labels:
    """Values move along some axes; channels that lie along others are not concerned."""
    ndim = call.source.ndim
    if call.name in ("roll", "flip"):
        touched = all_dims(call.get(2, "dims") if call.name == "roll" else call.args[1], ndim)
    else:
        touched = [ndim - 1 - place // 2 for place, width in enumerate(listed(call.args[1])) if width]
    if all(ids.shape[dim] == 1 for ids in call.labels.fields for dim in touched):
        return call.labels
    return as_data(call)


@REARRANGING.rule("index", "repeat", "pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "channel_shuffle",
      "unfold", "im2col", "tril", "triu", "diagonal")  # fmt: skip
def as_data(call: Operation) -> Labels:
    """The ids go through the operation as if they were the values."""
    args = tree_map_only(Tensor, Tensor.cpu, call.args[1:])
    fields = []
    for ids in call.labels.fields:
        # float64 holds every id exactly, and every operation that moves values has a kernel for it
        wide = torch.from_numpy(np.broadcast_to(ids, tuple(call.source.shape)).astype(np.float64))
        moved = call.func(wide, *args, **call.kwargs)
        if not isinstance(moved, Tensor):
            raise TypeError(f"{call.func} gives {type(moved).__name__}, not a tensor")
        fields.append(narrow(moved.numpy().astype(np.int64)))
    return useful(call.ledger, fields, call.labels.active)


@REARRANGING.rule("new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
def _new(_: Operation) -> Labels:
    return CONSTANT


@REARRANGING.rule("copy")
def _copy(call: Operation) -> Labels:
    """What is written into a part of a tensor labels the whole, if its channels lie along whole axes."""
    target, source = call.tensor(0), call.tensor(1)
    written, whole = call.labels_of(source), target._base
    result = elementwise(call)
    if whole is not None and written.fields:
        lead = (1,) * (target.ndim - source.ndim)
        fields = tuple(ids.reshape(lead + ids.shape) for ids in written.fields)
        fits = whole.ndim == target.ndim and all(
            whole.shape[dim] == target.shape[dim] for ids in fields for dim in support(ids)
        )
        if fits:
            operands = [call.operand(whole), (Labels(fields, written.active), ())]
            attach(whole, join(call.ledger, operands, whole.ndim))
        else:
            for ids in fields:
                call.ledger.freeze(ids, "it is written into a part of another tensor")
    return result


@REARRANGING.rule("as_strided")
def _as_strided(call: Operation) -> Labels:
    same = call.result.shape == call.source.shape
    return call.keep(lambda _: same, "as_strided reads its memory directly")
