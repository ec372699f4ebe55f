"""Batch normalisation for convs that have none behind them."""

from __future__ import annotations

import math
from typing import Any, cast

from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.autograd.graph import Node

from basisprune.torchkit.surgery import TORCH_CONVS, Conv, is_norm, replace_module
from basisprune.torchkit.watching import WatchedRun, is_map, roomy_run, upstream

EPS = 1e-3
"""The epsilon of inserted norms, that of Keras' batch normalisation."""

_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_STANDARDISED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)
_NORM_NODES = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm")


class NormedConv(nn.Sequential):
    """A conv with the batch norm that was inserted behind it; answers like the conv for its attributes.

    The norm starts as the identity in eval mode.

    >>> layer = NormedConv(nn.Conv2d(3, 8, 3, stride=2))
    >>> layer.stride, layer.weight.shape, [name for name, _ in layer.named_children()]
    ((2, 2), torch.Size([8, 3, 3, 3]), ['conv', 'norm'])
    """

    conv: Conv
    norm: nn.Module

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        dim = len(conv.kernel_size)
        norm = _BATCH_NORMS[dim](conv.out_channels, eps=EPS, device=conv.weight.device, dtype=conv.weight.dtype)
        # Cancels the epsilon: weight / sqrt(running_var + eps) is one.
        nn.init.constant_(norm.weight, math.sqrt(1 + EPS))
        self.conv = conv
        self.norm = norm

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "conv" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["conv"], name)


def insert_norms(model: nn.Module, example: Tensor) -> nn.Module:
    """The model with a `NormedConv` in the place of each conv without normalisation behind it; in place.

    A conv has normalisation behind it if some path from its output meets a norm before the next conv or
    linear layer. Convs on 1x1 maps, such as the gates of squeeze-and-excitation, are left as they are,
    and so are networks that normalise otherwise: by any norm but batch norm, or by their weights.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    >>> [type(module).__name__ for module in insert_norms(net, torch.zeros(2, 3, 16, 16))]
    ['Conv2d', 'BatchNorm2d', 'ReLU', 'NormedConv', 'ReLU']
    """
    if any(_normalises_otherwise(module) for module in model.modules()):
        return model
    for name in _bare_convs(roomy_run(model, example)):
        conv = cast("Conv", model.get_submodule(name))
        model = replace_module(model, name, NormedConv(conv))
    return model


def _normalises_otherwise(module: nn.Module) -> bool:
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) or "BatchNorm" in type(module).__name__
    return isinstance(module, _STANDARDISED) or (is_norm(module) and not is_batch_norm)


def _bare_convs(run: WatchedRun) -> list[str]:
    """The names of the convs that work on maps and meet no norm before the next layer."""
    edges = upstream(run.output_nodes)
    if any(name in node.name() for node in edges for name in _NORM_NODES[1:]):
        return []
    consumers: dict[Node, list[Node]] = {}
    for node, sources in edges.items():
        for source in sources:
            consumers.setdefault(source, []).append(node)
    norms = {node for call in run.calls if is_norm(call.module) for node in call.nodes}
    norms |= {node for node in edges if any(name in node.name() for name in _NORM_NODES)}
    layers = {node for call in run.calls if isinstance(call.module, nn.Linear) for node in call.nodes}
    layers |= {node for node in edges if "Convolution" in node.name()}

    bare: dict[str, bool] = {}
    for call in run.calls:
        if isinstance(call.module, TORCH_CONVS) and is_map(call.input_shape) and edges.keys() & call.nodes:
            normed = any(_meets_norm(node, consumers, norms, layers) for node in call.nodes)
            bare[call.name] = bare.get(call.name, True) and not normed
    return [name for name, is_bare in bare.items() if is_bare]


def _meets_norm(start: Node, consumers: dict[Node, list[Node]], norms: set[Node], layers: set[Node]) -> bool:
    seen: set[Node] = set()
    pending = list(consumers.get(start, []))
    while pending:
        node = pending.pop()
        if node in norms:
            return True
        if node not in seen and node not in layers:
            seen.add(node)
            pending += consumers.get(node, [])
    return False
