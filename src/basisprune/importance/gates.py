"""First-order Taylor importance of filters, by a gate behind each (Molchanov et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.importance.channels import Batches, filter_weights, norms_behind
from basisprune.importance.gradients import mean_square_products
from basisprune.torchkit.running import average_over_processes, hooked
from basisprune.torchkit.surgery import has_channels_last


def gate_taylor(model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int) -> dict[str, Tensor]:
    """The squared first-order effect of a gate behind each filter, averaged over batches.

    That is (g_gamma gamma + g_beta beta)^2 of the norm right behind the layer, or that of a gate on the layer's own
    output where there is none.
    """
    norms = norms_behind(model, layers, batches)
    bare = [name for name in layers if name not in norms]
    with _gates(model, bare) as gates:
        pairs = {name: [norm.weight, norm.bias] for name, norm in norms.items()}
        pairs |= {name: [gate] for name, gate in gates.items()}
        sums = mean_square_products(model, list(pairs.values()), batches, F.cross_entropy)
    values = dict(zip(pairs, sums, strict=True))
    return {name: average_over_processes(values[name]) for name in layers}


@contextmanager
def _gates(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """A gate, a vector of ones, multiplied into the output channels of each layer for a while."""
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
