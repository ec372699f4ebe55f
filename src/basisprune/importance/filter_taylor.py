"""First-order Taylor importance of filters, by a gate behind each (Molchanov et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.coupling import Channels, trace_coupling, unit_inputs
from basisprune.importance.gradients import mean_square_products
from basisprune.importance.layer_access import (
    Batches,
    filter_values,
    filter_weights,
    first_images,
    norms_behind,
)
from basisprune.torchkit.running import Loss, hooked
from basisprune.torchkit.surgery import has_channels_last


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
    handles = []
    for name, parts in readers.items():
        places = {group: torch.from_numpy(index).to(gates[group].device) for group, index in parts.items()}

        def hook(layer: nn.Module, args: tuple[Tensor, ...], places: dict[str, Tensor] = places) -> tuple[Tensor, ...]:
            last = has_channels_last(layer)
            read = args[0].shape[-1 if last else 1]
            gate = torch.ones(read, device=args[0].device, dtype=args[0].dtype)
            for group, index in places.items():
                gate = gate.index_put((index.T,), gates[group].to(gate.dtype).expand(index.shape[1], -1))
            return (args[0] * (gate if last else gate.view(-1, *[1] * (args[0].dim() - 2))), *args[1:])

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    with hooked(handles):
        yield


@contextmanager
def _gates(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """A gate, a vector of ones, multiplied into the output channels of each layer temporarily."""
    gates = {}
    handles = []
    for name in layers:
        layer = model.get_submodule(name)
        like = next(layer.parameters())
        gate = torch.ones(len(filter_weights(model, name)), device=like.device, dtype=like.dtype)
        gates[name] = gate
        last = has_channels_last(layer)

        def hook(_module: nn.Module, _args: object, output: Tensor, gate: Tensor = gate, last: bool = last) -> Tensor:
            return output * (gate if last else gate.view(-1, *[1] * (output.dim() - 2)))

        handles.append(layer.register_forward_hook(hook))
    with hooked(handles):
        yield gates
