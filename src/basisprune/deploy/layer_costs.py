"""What each layer costs in the form that is deployed, where a pair is two layers, or one again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from safetensors.torch import save
from torch import nn

from basisprune.basis.decompose import full_rank
from basisprune.basis.layers import half_name
from basisprune.costs import LayerReport, ModelReport, measure
from basisprune.torchkit.surgery import Layer, output_channels


def layer_reports(trained: nn.Module, deployed: nn.Module) -> list[LayerReport]:
    """The layers of the network as it was trained, with what each costs in the form that is deployed."""
    costs = {layer.name: layer for layer in measure(deployed).layers}
    rows = []
    for layer in measure(trained).layers:
        parts = [costs[name] for name in (layer.name, *_halves(layer.name)) if name in costs]
        note = layer.note or ("one conv in the deployed model" if layer.rank and len(parts) == 1 else "")
        cost = sum(part.parameters for part in parts), sum(part.macs for part in parts)
        rows.append(LayerReport(layer.name, layer.kind, layer.rank, layer.full_rank, *cost, note))
    return rows


def joined_report(model: nn.Module, shape: Sequence[int]) -> ModelReport:
    """What a network costs; the two halves of a layer that was folded are one row, with their rank."""
    report = measure(model, tuple(shape))
    by_name = {layer.name: layer for layer in report.layers}
    rows = []
    for layer in report.layers:
        stem, _, half = layer.name.rpartition(".")
        halves = [by_name[name] for name in _halves(stem) if name in by_name]
        if half not in ("basis", "scaling") or len(halves) < 2:
            rows.append(layer)
        elif half == "basis":
            cost = sum(part.parameters for part in halves), sum(part.macs for part in halves)
            rows.append(LayerReport(stem, layer.kind, *_ranks(model, stem), *cost, "split into two"))
    return replace(report, layers=tuple(rows))


def _ranks(model: nn.Module, name: str) -> tuple[int, int]:
    """The number of basis vectors of a folded pair, and the full rank of the layer that it stands for."""
    first, second = (cast("Layer", model.get_submodule(half)) for half in _halves(name))
    return output_channels(first), full_rank(first, output_channels(second))


def _halves(name: str) -> tuple[str, str]:
    return half_name(name, "basis"), half_name(name, "scaling")


def weight_bytes(model: nn.Module) -> int:
    """How large a file of the model's weights is."""
    return len(save({name: value.contiguous().clone() for name, value in model.state_dict().items()}))
