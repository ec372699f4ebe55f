"""What of a network is trained, and at which share of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.errors import ModelError
from basisprune.torchkit.surgery import find_layers, is_norm, model_heads
from basisprune.training.config import TrainConfig, Trained
from basisprune.transfer.model import KeptModel

_SMALLEST = 1e-3  # so that a bias that starts at zero learns
_LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, BasisPair)
_FUSED_ON = ("cpu", "cuda", "mps", "xpu")  # on some other devices PyTorch refuses a fused optimizer


def set_trainable(model: nn.Module, *, scales: bool = True, train: Trained = "method") -> list[nn.Parameter]:
    """Unfreeze norms, basis scales and classifier in place, with "all" the other weights too; freeze the rest.

    The classifier is the model's `classifier` (as in `transfer_model`), or what timm's `get_classifier` gives,
    or else its last linear layer. Without `scales`, these are frozen too. Returns what is trained.
    """
    light, heavy = _light_and_heavy(model, scales=scales)
    chosen = _by_id(light if train == "method" else light + heavy)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return list(chosen.values())


def _light_and_heavy(model: nn.Module, *, scales: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    light: dict[int, nn.Parameter] = {}
    frozen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, BasisScalingConv):
            (light if scales else frozen)[id(module.scale)] = module.scale
        elif is_norm(module):
            light.update(_by_id(module.parameters(recurse=False)))
    for head in find_classifiers(model):
        light.update(_by_id(parameter for parameter in head.parameters() if id(parameter) not in frozen))
    heavy = [each for key, each in _by_id(model.parameters()).items() if key not in light and key not in frozen]
    return list(light.values()), heavy


def _by_id(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for parameter in parameters}


def find_classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that give the classes."""
    if named := model_heads(model):
        return named
    layers = (layer for _, layer in find_layers(model, _LINEAR, opaque=BasisPair))
    return [each for each in layers if isinstance(getattr(each, "basis", each), nn.Linear)][-1:]


def classes_of(model: nn.Module) -> int:
    """Return the number of classes that the model distinguishes; raise ModelError where no linear layer ends it.

    A network that kept its head, whatever that is, knows the number.
    """
    if isinstance(model, KeptModel):
        return model.num_classes
    if isinstance(names := getattr(model, "classes", None), tuple) and names:
        return len(names)
    heads = [layer for head in find_classifiers(model) for _, layer in find_layers(head, _LINEAR, opaque=BasisPair)]
    if not heads:
        raise ModelError(f"{type(model).__name__} has no linear classifier; build it with transfer_model")
    return heads[-1].out_features  # type: ignore[return-value]


def project_scales(model: nn.Module) -> None:
    """Set negative basis scaling factors to zero, in place: the paper constrains them to be non-negative."""
    scales = [module.scale.data for module in model.modules() if isinstance(module, BasisScalingConv)]
    if scales:
        torch._foreach_clamp_min_(scales, 0.0)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of what `config` trains, all of which is unfrozen in the model, on its device.

    Each of its groups has its `share` of the learning rate, and says by `heavy` whether its parameters are
    weights that the method alone would not train.
    """
    set_trainable(model, scales=config.train_scales, train=config.train)
    light, heavy = _light_and_heavy(model, scales=config.train_scales)
    heavy = [] if config.train == "method" else heavy
    heads: dict[int, nn.Parameter] = {}
    if config.head_lr != 1:
        heads = _by_id(weight for head in find_classifiers(model) for weight in head.parameters())

    def group(weights: list[nn.Parameter], share: float, *, heavy: bool = False) -> dict[str, object]:
        return {"params": weights, "share": share, "heavy": heavy}

    groups = [group([weight for weight in light if id(weight) not in heads], 1.0)]
    if heads:
        groups.append(group(list(heads.values()), config.head_lr))
    by_share: dict[float, list[nn.Parameter]] = {}
    for weight in heavy:
        by_share.setdefault(weight_share(weight, config), []).append(weight)
    groups += [group(weights, share, heavy=True) for share, weights in by_share.items()]
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


def weight_share(weight: nn.Parameter, config: TrainConfig) -> float:
    """Return the share of the learning rate at which a weight learns that the method alone would not train.

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
