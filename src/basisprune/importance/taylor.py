"""First-order Taylor importance of basis vectors (the paper's Section 3.3, eq. 4) and filters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.coupling import Channels, trace_coupling, unit_inputs
from basisprune.errors import DataError, TrainingError
from basisprune.importance.layer_access import (
    Batches,
    filter_values,
    filter_weights,
    first_images,
    norms_behind,
)
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss, ReadBatches, cut_graphs, hooked, loss_on, mode, placed, read_batch
from basisprune.torchkit.surgery import Layer, has_channels_last, is_transposed
from basisprune.types import LayerScores, Scores


def mean_square_products(
    model: nn.Module,
    groups: Sequence[Sequence[Tensor]],
    batches: Iterable[object],
    loss: Loss,
) -> list[Tensor]:
    """For each group of tensors of one shape the mean over the batches of (sum of g * tensor)^2, in float64.

    g is the gradient of the loss in eval mode. In a distributed run, the mean is that over the batches of all
    processes.
    """
    tensors = [tensor for group in groups for tensor in group]
    totals = [torch.zeros_like(group[0], dtype=torch.float64, requires_grad=False) for group in groups]
    count = 0
    with mode(model, training=False), _requiring_grad(tensors):
        for batch in batches:
            images, labels = read_batch(batch, loss)
            value = loss_on(model, placed(images, model), labels, loss)
            if not bool(value.isfinite()):
                raise TrainingError(f"the loss of batch {count} is {value.item()}; check the model and the images")
            gradients = iter(torch.autograd.grad(value, tensors, allow_unused=True))
            for total, group in zip(totals, groups, strict=True):
                terms = [(g, tensor.detach()) for tensor in group if (g := next(gradients)) is not None]
                if terms:
                    total += sum((g * tensor).double() for g, tensor in terms).square()  # type: ignore[union-attr]
            cut_graphs(model)
            count += 1
    if count == 0:
        raise DataError("batches: no batch came; give the validation data")
    processes = Processes.here()
    batches_of_all = processes.total(count)
    return [processes.sum(total) / batches_of_all for total in totals]


@contextmanager
def _requiring_grad(tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [tensor.requires_grad for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for tensor, required in zip(tensors, before, strict=True):
            tensor.requires_grad_(required)


def taylor_scores(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> Scores:
    """Return (g s)^2 of every basis scaling factor s, with g the gradient of the loss on `batches` in eval mode.

    As in Molchanov et al. (2019) the square is taken batch by batch and averaged, so that gradients of opposite sign do
    not cancel over the data. `batches` are prepared images with labels, or whatever the `loss` reads, as a rule the
    validation data. The mean features along each basis vector are gathered in the same pass, and what a vector costs:
    the weights of its filter in the basis and of its column in the scaling, and as multiply-adds each of them times the
    positions it works at, summed over all calls: those of the output; for the filter of a transposed conv, whose
    weights meet every input once, those of the input.

    Linear layers that were never called, because the attention around them reads their dense weight, are left out.
    In a distributed run every process gets the mean over the batches of all.
    """
    pairs = basis_pairs(model)
    read = ReadBatches(batches, loss)
    with _watched(pairs, read) as watches:
        squares = mean_square_products(model, [[pair.scaling.scale] for pair in pairs.values()], read, loss)
    layers = {}
    for (name, pair), square in zip(pairs.items(), squares, strict=True):
        reads, writes = watches[name].positions.tolist()
        if writes or pair.scaling.spatial_dims:
            layers[name] = layer_scores(pair, square, watches[name].means, (reads, writes))
    return Scores("taylor", layers)


class _Watch:
    """The mean basis features of a pair, and how often a filter and a column of it are used for one image."""

    def __init__(self, pair: BasisPair) -> None:
        self.channel_axis = -1 if has_channels_last(pair.scaling) else 1
        self.means = torch.zeros_like(pair.scaling.scale, dtype=torch.float64, requires_grad=False)
        self.positions = self.means.new_zeros(2)

    @torch.no_grad()
    def hook(self, basis: Layer, args: tuple[Tensor, ...], output: Tensor) -> None:
        features = output.movedim(self.channel_axis, 0).flatten(1)
        self.means += features.sum(1, dtype=torch.float64)
        reads = args[0].numel() // args[0].shape[1] if is_transposed(basis) else features.shape[1]
        self.positions += self.positions.new_tensor([reads, features.shape[1]])


def layer_scores(pair: BasisPair, values: Tensor, means: Tensor, positions: tuple[float, float]) -> LayerScores:
    """The scores of a pair's vectors with their means and costs; `positions` as in `OutputStatistics`."""
    filters, columns = pair.basis.weight.numel() // pair.rank, pair.scaling.weight.numel() // pair.rank
    return LayerScores(
        tuple(values.tolist()),
        pair.scaling.groups,
        tuple(means.tolist()),
        parameters=filters + columns,
        macs=round(positions[0] * filters + positions[1] * columns),
    )


@contextmanager
def _watched(pairs: dict[str, BasisPair], batches: ReadBatches) -> Iterator[dict[str, _Watch]]:
    """What each layer's basis outputs while the model runs, of all processes, known at the end; zeros without a run."""
    watches = {name: _Watch(pair) for name, pair in pairs.items()}
    with hooked([pair.basis.register_forward_hook(watches[name].hook) for name, pair in pairs.items()]):
        yield watches
    processes = Processes.here()
    images = processes.total(batches.images)
    for watch in watches.values():
        watch.means, watch.positions = processes.sum(watch.means), processes.sum(watch.positions)
        watch.means /= watch.positions[1].clamp(min=1)
        watch.positions /= max(images, 1)


def gate_taylor(
    model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int, *, loss: Loss = F.cross_entropy
) -> dict[str, Tensor]:
    """The squared first-order effect of a gate behind each filter, averaged over batches.

    That is (g_gamma gamma + g_beta beta)^2 of the norm right behind the layer, or that of a gate on the layer's own
    output where there is none.
    """
    norms = norms_behind(model, layers, batches)
    bare = [name for name in layers if name not in norms]
    with _gates(model, bare) as gates:
        pairs = {name: [norm.weight, norm.bias] for name, norm in norms.items()}
        pairs |= {name: [gate] for name, gate in gates.items()}
        sums = mean_square_products(model, list(pairs.values()), batches, loss)
    values = dict(zip(pairs, sums, strict=True))
    return {name: values[name] for name in layers}


def gate_behind(
    model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int, *, loss: Loss = F.cross_entropy
) -> dict[str, Tensor]:
    """The same for gates behind norm, activation and depthwise convs, one for all filters that are coupled.

    A gate before the activation says that a channel at the ceiling of a ReLU6 can go, because no gradient passes; yet
    what it outputs matters. Here a unit of coupled filters has one gate, where convs and linear layers read
    it, and each of its filters gets its score. The coupling is traced on the first of the batches.
    """
    coupling = trace_coupling(model, first_images(model, batches)[:2])
    readers = unit_inputs(model, coupling)
    like = next(model.parameters())
    sizes = {group: len(index) for parts in readers.values() for group, index in parts.items()}
    gates = {group: torch.ones(size, device=like.device, dtype=like.dtype) for group, size in sizes.items()}
    with _read_through(model, readers, gates):
        sums = mean_square_products(model, [[gate] for gate in gates.values()], batches, loss)
    return filter_values(model, coupling, dict(zip(gates, sums, strict=True)), layers)


@contextmanager
def _read_through(
    model: nn.Module, readers: Mapping[str, Mapping[str, Channels]], gates: Mapping[str, Tensor]
) -> Iterator[None]:
    """Each unit's gate multiplied into its channels wherever a layer reads them, temporarily."""

    def hook(places: dict[str, Tensor], layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read = args[0].shape[-1 if has_channels_last(layer) else 1]
        gate = torch.ones(read, device=args[0].device, dtype=args[0].dtype)
        for group, index in places.items():
            gate = gate.index_put((index.T,), gates[group].to(gate.dtype).expand(index.shape[1], -1))
        return (_gated(layer, args[0], gate), *args[1:])

    handles = []
    for name, parts in readers.items():
        places = {group: torch.from_numpy(index).to(gates[group].device) for group, index in parts.items()}
        handles.append(model.get_submodule(name).register_forward_pre_hook(partial(hook, places)))
    with hooked(handles):
        yield


@contextmanager
def _gates(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """A gate, a vector of ones, multiplied into the output channels of each layer temporarily."""

    def hook(gate: Tensor, layer: nn.Module, _args: object, output: Tensor) -> Tensor:
        return _gated(layer, output, gate)

    gates, handles = {}, []
    for name in layers:
        layer = model.get_submodule(name)
        like = next(layer.parameters())
        gates[name] = torch.ones(len(filter_weights(model, name)), device=like.device, dtype=like.dtype)
        handles.append(layer.register_forward_hook(partial(hook, gates[name])))
    with hooked(handles):
        yield gates


def _gated(layer: nn.Module, features: Tensor, gate: Tensor) -> Tensor:
    return features * (gate if has_channels_last(layer) else gate.view(-1, *[1] * (features.dim() - 2)))
