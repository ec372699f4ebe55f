"""Constants that are left of dropped branches, in plain modules: in the norm before them, or on their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from basisprune.basis.layers import Shift
from basisprune.deploy.forms import BatchNorm, affine
from basisprune.torchkit.running import hooked, relative_difference, tensors_in
from basisprune.torchkit.surgery import find_layers, replace_module

_SAME = {torch.float64: 1e-12, torch.float32: 1e-5}


@torch.no_grad()
def merge_shifts(model: nn.Module, inputs: tuple[object, ...]) -> nn.Module:
    """The model in eval mode without shifts, in place: each is in the bias of the norm before it where that is exact.

    A shift behind a sum goes into the norm whose output is the last term of it. Whether that is so is tried out. Where
    it is not, a depthwise 1x1 conv takes the shift's place.
    """
    for name, shift in list(find_layers(model, Shift)):
        before = _norm_before(model, name, inputs)
        if before is not None and _agrees(model, _without(copy.deepcopy(model), name, before), inputs):
            model = _without(model, name, before)
        else:
            model = replace_module(model, name, _plain(shift.bias))
    return model


def _without(model: nn.Module, name: str, norm: str) -> nn.Module:
    model.get_parameter(f"{norm}.bias").add_(model.get_parameter(f"{name}.bias" if name else "bias"))
    return replace_module(model, name, nn.Identity())


def _agrees(one: nn.Module, other: nn.Module, inputs: tuple[object, ...]) -> bool:
    pairs = zip(tensors_in(one(*inputs)), tensors_in(other(*inputs)), strict=True)
    return all(relative_difference(a, b) <= _SAME.get(a.dtype, 1e-3) for a, b in pairs)


def _plain(bias: Tensor) -> nn.Conv2d:
    width = len(bias)
    conv: nn.Conv2d = nn.utils.skip_init(nn.Conv2d, width, width, 1, groups=width, device=bias.device, dtype=bias.dtype)
    conv.weight.fill_(1.0)
    assert conv.bias is not None
    conv.bias.copy_(bias)
    return conv


def _norm_before(model: nn.Module, shift: str, inputs: tuple[object, ...]) -> str | None:
    """The norm of the shift's width that runs last before it, if each runs once."""
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    norms = {name: norm for name, norm in find_layers(model, BatchNorm) if affine(norm) is not None}
    known: dict[str, nn.Module] = {**norms, shift: model.get_submodule(shift)}
    with hooked([module.register_forward_hook(note(name)) for name, module in known.items()]):
        model(*inputs)
    width = len(known[shift].bias)  # type: ignore[arg-type]
    if order.count(shift) != 1:
        return None
    earlier = [name for name in order[: order.index(shift)] if norms[name].num_features == width]
    fits = earlier and order.count(earlier[-1]) == 1 and norms[earlier[-1]].bias is not None
    return earlier[-1] if fits else None
