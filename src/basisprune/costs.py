"""Parameters and multiply-adds, layer by layer: numbers, no formatting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from basisprune.basis.decompose import choose_layers
from basisprune.basis.factors import full_rank
from basisprune.basis.layers import BasisPair, BasisScalingConv, half_name
from basisprune.errors import ConfigError, ModelError
from basisprune.torchkit.running import hooked, mode
from basisprune.torchkit.surgery import (
    TORCH_CONVS,
    Layer,
    find_layers,
    has_channels_last,
    is_depthwise,
    output_channels,
)
from basisprune.transfer.model import known_spec

_LARGEST_SIDE = 1 << 14  # pixels


@dataclass(frozen=True)
class LayerReport:
    """What a layer or pair costs for one image; `rank` is None if it is not decomposed, and `note` says why.

    `channels` are its output channels, of `full_channels` in the unpruned network if that is known.
    """

    name: str
    kind: str
    rank: int | None
    full_rank: int
    parameters: int
    macs: int
    note: str = ""
    channels: int | None = None
    full_channels: int | None = None


@dataclass(frozen=True)
class ModelReport:
    """What a network costs for one input; `paper_parameters` counts the running statistics of BN, as Keras does."""

    layers: tuple[LayerReport, ...]
    input_shape: tuple[int, ...]
    parameters: int
    trainable: int
    paper_parameters: int
    macs: int


def measure(model: nn.Module, input_size: int | tuple[int, ...] | None = None) -> ModelReport:
    """The parameters and multiply-adds of the model, in total and layer by layer.

    `input_size` is one side in pixels, (height, width), or the shape of one input without the batch, which
    for a network of 1d convs is (channels, length); by default what the model's `input_spec` says.
    Multiply-adds are those of convs, linear layers and matrix products, counted by torch's own flop counter
    while the model runs once; the model is not changed.

    >>> report = measure(nn.Conv2d(3, 8, 3, padding=1), (3, 4, 4))
    >>> report.parameters, report.macs == 8 * 3 * 9 * 16
    (224, True)
    """
    shape = _input_shape(model, input_size)
    with FlopCounterMode(display=False) as counter:
        _run_once(model, shape)
    counts = counter.get_flop_counts()

    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(f"{type(model).__name__}.{name}" if name else "Global")

    def macs(name: str) -> int:
        # The counter knows a module that has several names by one of them.
        known = names[model.get_submodule(name)]
        return sum(sum(counts.get(each, {}).values()) for each in known) // 2

    running = ("running_mean", "running_var")
    statistics = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in running]
    return ModelReport(
        layers=tuple(_layer_reports(model, macs)),
        input_shape=shape,
        parameters=_size(model.parameters()),
        trainable=_size(p for p in model.parameters() if p.requires_grad),
        paper_parameters=_size(model.parameters()) + _size(statistics),
        macs=counter.get_total_flops() // 2,
    )


def weight_uses(model: nn.Module, input_size: int | tuple[int, ...] | None = None) -> dict[str, int]:
    """How many multiply-adds each number of each conv's and linear layer's weight does for one image.

    The weights are named as in the model's parameters; `input_size` is as in `measure`.

    >>> weight_uses(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2)), (3, 4, 4))
    {'0.weight': 4}
    """
    kinds: tuple[type[Layer | BasisScalingConv], ...] = (*TORCH_CONVS, nn.Linear, BasisScalingConv)
    uses: dict[str, int] = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen = args[0] if getattr(layer, "transposed", False) else output
        places = seen.numel() // seen.shape[-1 if has_channels_last(layer) else 1]
        weight = f"{name}.weight" if name else "weight"
        uses[weight] = uses.get(weight, 0) + places

    layers = find_layers(model, kinds)
    with hooked([layer.register_forward_hook(partial(note, name)) for name, layer in layers]):
        _run_once(model, _input_shape(model, input_size))
    return uses


def layer_reports(trained: nn.Module, deployed: nn.Module, unpruned: nn.Module | None = None) -> list[LayerReport]:
    """Report the layers of the trained network, with what each costs in deployed form, as one layer or two."""
    costs = {layer.name: layer for layer in measure(deployed).layers}
    full = {} if unpruned is None else {layer.name: layer.channels for layer in measure(unpruned).layers}
    rows = []
    for layer in measure(trained).layers:
        parts = [costs[name] for name in (layer.name, *_halves(layer.name)) if name in costs]
        note = layer.note or ("one conv in the deployed model" if layer.rank and len(parts) == 1 else "")
        channels = full.get(layer.name, full.get(half_name(layer.name, "scaling")))
        rows.append(replace(_with_costs(layer, parts), note=note, full_channels=channels))
    return rows


def joined_report(model: nn.Module, shape: Sequence[int]) -> ModelReport:
    """Measure a network; the two halves of a layer that was folded are one row, with their rank."""
    report = measure(model, tuple(shape))
    by_name = {layer.name: layer for layer in report.layers}
    rows = []
    for layer in report.layers:
        stem, _, half = layer.name.rpartition(".")
        halves = [by_name[name] for name in _halves(stem) if name in by_name]
        if half not in ("basis", "scaling") or len(halves) < 2:
            rows.append(layer)
        elif half == "basis":
            first, second = (cast("Layer", model.get_submodule(each.name)) for each in halves)
            rank, channels = output_channels(first), output_channels(second)
            full = full_rank(first, channels)
            whole = replace(layer, name=stem, rank=rank, full_rank=full, note="split into two", channels=channels)
            rows.append(_with_costs(whole, halves))
    return replace(report, layers=tuple(rows))


def _with_costs(layer: LayerReport, parts: Sequence[LayerReport]) -> LayerReport:
    return replace(layer, parameters=sum(part.parameters for part in parts), macs=sum(part.macs for part in parts))


def _halves(name: str) -> tuple[str, str]:
    return half_name(name, "basis"), half_name(name, "scaling")


def weight_bytes(model: nn.Module) -> int:
    """The size of a file of the model's weights."""
    return len(save({name: value.contiguous().clone() for name, value in model.state_dict().items()}))


def _layer_reports(model: nn.Module, macs: Callable[[str], int]) -> Iterator[LayerReport]:
    notes = {choice.name: choice.left_alone or "" for choice in choose_layers(model, linear=True)}
    kinds: tuple[type[nn.Module], ...] = (*TORCH_CONVS, nn.Linear, BasisPair)
    for name, layer in find_layers(model, kinds, opaque=BasisPair):
        pair = layer if isinstance(layer, BasisPair) else None
        core = cast("Layer", layer if pair is None else pair.basis)
        full = full_rank(core, None if pair is None else pair.out_channels)
        note = notes.get(name, "")
        if not note and pair is not None and pair.rank > full:  # as when filters went
            note = "more basis vectors than ranks: the dense conv is smaller"
        rank = None if pair is None else pair.rank
        channels = output_channels(core) if pair is None else pair.out_channels
        yield LayerReport(name, _kind(core), rank, full, _size(layer.parameters()), macs(name), note, channels)


def _kind(layer: Layer) -> str:
    if isinstance(layer, nn.Linear):
        return "linear"
    name = "depthwise" if is_depthwise(layer) else "grouped conv" if layer.groups > 1 else "conv"
    return f"{'transposed ' if layer.transposed else ''}{name} {'x'.join(map(str, layer.kernel_size))}"


def _input_shape(model: nn.Module, size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    spec = known_spec(model)
    channels = 3 if spec is None else spec.channels
    sides = (size,) if isinstance(size, int) else size
    if spec is not None and sides == spec.shape:
        return spec.shape
    if sides is not None and (not sides or not all(0 < side <= _LARGEST_SIDE for side in sides)):
        raise ConfigError.of("measure", [f"input_size: {size} given; sides of 1 to {_LARGEST_SIDE} are needed"])
    if size is None:
        if spec is None:
            raise ModelError(f"{type(model).__name__} does not know its input size; pass input_size=")
        return spec.shape
    if isinstance(size, int):
        return (channels, size, size)
    first = next((conv for _, conv in find_layers(model, TORCH_CONVS)), None)
    one_dimensional = first is not None and len(first.kernel_size) == 1
    return (channels, *size) if len(size) == 2 and not one_dimensional else tuple(size)


@torch.no_grad()
def _run_once(model: nn.Module, shape: tuple[int, ...]) -> None:
    like = next(model.parameters(), torch.zeros(()))
    with mode(model, training=False):
        model(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
