"""What of a network is trained, and at which share of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.errors import ModelError
from basisprune.torchkit.surgery import find_layers, is_norm, model_heads
from basisprune.training.config import TrainConfig, Trained
from basisprune.transfer.kept import KeptModel

_SMALLEST = 1e-3  # so that a bias that starts at zero learns
_FUSED_ON = ("cpu", "cuda", "mps", "xpu")  # on some other devices PyTorch refuses a fused optimizer


def set_trainable(model: nn.Module, *, scales: bool = True, train: Trained = "method") -> list[nn.Parameter]:
    """The parameters that are trained: norm layers, basis scales and classifier, or with "all" the others too.

    The classifier is the model's `classifier` (as in `transfer_model`), or what timm's `get_classifier` gives,
    or else its last linear layer. Without `scales`, these are frozen too. Changes `requires_grad` in place.
    """
    light, heavy = split_parameters(model, scales=scales)
    chosen = light if train == "method" else light + heavy
    known = {id(parameter) for parameter in chosen}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in known)
    return chosen


def split_parameters(model: nn.Module, *, scales: bool = True) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What the method trains, and all other weights: dense convs and the factors of the pairs.

    Without `scales`, the basis scaling factors are in neither.
    """
    light: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, BasisScalingConv):
            light[id(module.scale)] = module.scale
        elif is_norm(module):
            light.update(_by_id(module.parameters(recurse=False)))
    for head in find_classifiers(model):
        light.update(_by_id(head.parameters()))
    heavy = {key: parameter for key, parameter in _by_id(model.parameters()).items() if key not in light}
    if not scales:
        for _, scaling in find_layers(model, BasisScalingConv):
            light.pop(id(scaling.scale))
    return list(light.values()), list(heavy.values())


def _by_id(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for parameter in parameters}


def find_classifiers(model: nn.Module) -> list[nn.Module]:
    """The module that gives the classes."""
    if named := model_heads(model):
        return named
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, BasisPair)
    found = [layer for _, layer in find_layers(model, kinds, opaque=BasisPair) if _is_linear(layer)]
    return found[-1:]


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer.basis if isinstance(layer, BasisPair) else layer, nn.Linear)


def classes_of(model: nn.Module) -> int:
    """The number of classes that the model distinguishes; raises ModelError where no linear layer ends it.

    A network that kept its head, whatever that is, knows the number.
    """
    if isinstance(model, KeptModel):
        return model.num_classes
    if isinstance(names := getattr(model, "classes", None), tuple) and names:
        return len(names)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, BasisPair)
    heads = [layer for head in find_classifiers(model) for _, layer in find_layers(head, kinds, opaque=BasisPair)]
    if not heads:
        raise ModelError(f"{type(model).__name__} has no linear classifier; build it with transfer_model")
    return heads[-1].out_features  # type: ignore[return-value]


def project_scales(model: nn.Module) -> None:
    """Sets negative basis scaling factors to zero, in place: the paper constrains them to be non-negative."""
    scales = [module.scale.data for module in model.modules() if isinstance(module, BasisScalingConv)]
    if scales:
        torch._foreach_clamp_min_(scales, 0.0)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of what `config` trains, all of which is unfrozen in the model, on the device it will stay on.

    Each of its groups has its `share` of the learning rate, and says by `heavy` whether its parameters are
    weights that the method alone would not train.
    """
    set_trainable(model, scales=config.train_scales, train=config.train)
    light, heavy = split_parameters(model, scales=config.train_scales)
    heads = _by_id(weight for head in find_classifiers(model) for weight in head.parameters())
    if config.head_lr == 1:
        heads = {}
    if config.train == "method":
        heavy = []
    by_share: dict[float, list[nn.Parameter]] = {}
    for weight in heavy:
        by_share.setdefault(weight_share(weight, config), []).append(weight)
    rest = (_group(weights, share, heavy=True) for share, weights in by_share.items())
    groups = [_group([weight for weight in light if id(weight) not in heads], 1.0, heavy=False), *rest]
    if heads:
        groups.insert(1, _group(list(heads.values()), config.head_lr, heavy=False))
    if config.optimizer == "adamw":
        # On a CPU, without the fused kernel the optimizer takes a good part of the training.
        fused = all(_can_be_fused(parameter) for parameter in (*light, *heavy))
        return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _can_be_fused(parameter: nn.Parameter) -> bool:
    """Whether the device has a fused kernel and the numbers lie in memory without gaps, in the usual order or with the
    channels last: the kernel goes through memory without regard to strides, and would write into the gaps.
    """
    packed = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    return packed and parameter.device.type in _FUSED_ON


def _group(parameters: Sequence[nn.Parameter], share: float, *, heavy: bool) -> dict[str, object]:
    return {"params": list(parameters), "share": share, "heavy": heavy}


def weight_share(weight: nn.Parameter, config: TrainConfig) -> float:
    """The share of the learning rate at which a weight learns that the method alone would not train.

    It is `weight_lr`, or with `relative` in proportion to the size of the weight. A step of Adam moves every number of
    a tensor by about the rate, however small these are. So that a step changes all weights by the same part of them,
    the share is in proportion to the weight's root mean square (as in Adafactor; Shazeer and Stern, 2018): the convs of
    ResNet-50 are five times as small as those of EfficientNet-Lite0, and a rate that helps the one ruins the other.
    Steps of SGD follow the gradient, so that there the share is always `weight_lr` itself.

    >>> weight_share(nn.Parameter(torch.full((8, 8), 0.02)), TrainConfig(optimizer="adamw", weight_lr=0.5))
    0.01
    """
    if config.optimizer == "sgd" or not config.relative:
        return config.weight_lr
    size = weight.detach().double().square().mean().sqrt().item()
    return config.weight_lr * max(float(f"{size:.2g}"), _SMALLEST)  # two digits: fewer groups
