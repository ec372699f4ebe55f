"""Parameters and multiply-adds, layer by layer: numbers, no formatting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from basisprune.basis.decompose import choose_layers, full_rank
from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.errors import ConfigError, ModelError
from basisprune.torchkit.running import hooked, mode
from basisprune.torchkit.surgery import TORCH_CONVS, Layer, find_layers, has_channels_last, is_depthwise
from basisprune.transfer.model import known_spec

_LARGEST_SIDE = 1 << 14  # pixels


@dataclass(frozen=True)
class LayerReport:
    """One conv, linear layer or pair: its rank of the full rank, parameters and multiply-adds for one image.

    `rank` is None for a layer that is not decomposed, and `note` then says why it cannot be.
    """

    name: str
    kind: str
    rank: int | None
    full_rank: int
    parameters: int
    macs: int
    note: str = ""


@dataclass(frozen=True)
class ModelReport:
    """What a network costs. `macs` are multiply-adds for one image of `input_shape`.

    `parameters` and `trainable` count as PyTorch does; `paper_parameters` as Keras and the paper do, with
    the running statistics of BN.
    """

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
    counter = _count_flops(model, shape)
    counts = counter.get_flop_counts()

    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(f"{type(model).__name__}.{name}" if name else "Global")

    def macs(name: str) -> int:
        # The counter knows a module that has several names by one of them.
        known = names[model.get_submodule(name)]
        return sum(sum(counts.get(each, {}).values()) for each in known) // 2

    return ModelReport(
        layers=tuple(_layer_reports(model, macs)),
        input_shape=shape,
        parameters=_size(model.parameters()),
        trainable=_size(p for p in model.parameters() if p.requires_grad),
        paper_parameters=_size(model.parameters()) + _size(_statistics(model)),
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


def _layer_reports(model: nn.Module, macs: Callable[[str], int]) -> list[LayerReport]:
    notes = {choice.name: choice.left_alone or "" for choice in choose_layers(model, linear=True)}
    kinds: tuple[type[nn.Module], ...] = (*TORCH_CONVS, nn.Linear, BasisPair)
    reports = []
    for name, layer in find_layers(model, kinds, opaque=BasisPair):
        core: Layer = layer.basis if isinstance(layer, BasisPair) else layer  # type: ignore[assignment]
        outputs = layer.out_channels if isinstance(layer, BasisPair) else None
        reports.append(
            LayerReport(
                name=name,
                kind=_kind(core),
                rank=layer.rank if isinstance(layer, BasisPair) else None,
                full_rank=full_rank(core, outputs),
                parameters=_size(layer.parameters()),
                macs=macs(name),
                note=notes.get(name, "") or _rank_note(layer, core, outputs),
            )
        )
    return reports


def _rank_note(layer: nn.Module, core: Layer, outputs: int | None) -> str:
    """After filters went, a pair may keep more basis vectors than its smaller conv has ranks."""
    if isinstance(layer, BasisPair) and layer.rank > full_rank(core, outputs):
        return "more basis vectors than ranks: the dense conv is smaller"
    return ""


def _kind(layer: Layer) -> str:
    if isinstance(layer, nn.Linear):
        return "linear"
    name = "depthwise" if is_depthwise(layer) else "grouped conv" if layer.groups > 1 else "conv"
    return f"{'transposed ' if layer.transposed else ''}{name} {'x'.join(map(str, layer.kernel_size))}"


def _input_shape(model: nn.Module, size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    spec = known_spec(model)
    channels = 3 if spec is None else spec.channels
    sides = (size,) if isinstance(size, int) else size
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


def _count_flops(model: nn.Module, shape: tuple[int, ...]) -> FlopCounterMode:
    counter = FlopCounterMode(display=False)
    with counter:
        _run_once(model, shape)
    return counter


@torch.no_grad()
def _run_once(model: nn.Module, shape: tuple[int, ...]) -> None:
    like = next(model.parameters(), torch.zeros(()))
    with mode(model, training=False):
        model(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))


def _statistics(model: nn.Module) -> Iterable[Tensor]:
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            yield buffer


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
