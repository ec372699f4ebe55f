"""The body of a network: everything up to its last feature map, without the old head, its convs normalised."""

from __future__ import annotations

import math
from typing import Any, cast

from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.autograd.graph import Node

from basisprune.errors import ModelError
from basisprune.torchkit.surgery import TORCH_CONVS, Conv, is_norm, replace_module
from basisprune.torchkit.watching import ModuleCall, WatchedRun, is_map, parameters_of, roomy_run, upstream, watch_run

EPS = 1e-3
"""The epsilon of inserted norms, that of Keras' batch normalisation."""

_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_STANDARDISED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)
_NORM_NODES = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm")
_POOLS = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_GLOBAL_POOLS = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}
_WAY_OUT = "give the network a method forward_features(x) that returns its last feature map"


def extract_body(model: nn.Module, example: Tensor) -> nn.Module:
    """The model without its head, in place: `features_of` it gives the last map, or that map pooled.

    A model with `forward_features` only loses the pooling that ends it. Of any other model, what follows
    the last layer that gives a map is replaced by one global average pooling. Modules that are no longer
    used become `nn.Identity`. Raises ModelError if the model does not return one tensor.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    >>> extract_body(net, torch.zeros(2, 3, 8, 8))(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 8, 1, 1])
    """
    silence_auxiliary_heads(model)
    run = roomy_run(model, example)
    _check_output(model, run, "eval")
    swaps = _closing_pools(run) if hasattr(model, "forward_features") else _tail(model, run)
    for name, new in swaps.items():
        model = replace_module(model, name, new)
    return _drop_unused(model, example)


def silence_auxiliary_heads(model: nn.Module) -> None:
    """Switches torchvision's auxiliary classifiers off, which return extra outputs in train mode."""
    for module in list(model.modules()):
        if getattr(module, "aux_logits", False) is True:
            setattr(module, "aux_logits", False)  # noqa: B010 - mypy knows no such attribute
            for name, _ in list(module.named_children()):
                if "aux" in name.lower():
                    setattr(module, name, None)


def _check_output(model: nn.Module, run: WatchedRun, mode: str) -> None:
    where = type(model).__name__ + (".forward_features" if hasattr(model, "forward_features") else "")
    if not isinstance(run.output, Tensor):
        raise ModelError(
            f"{where} returns {type(run.output).__name__} in {mode} mode, one tensor is needed; "
            f"switch its extra outputs off, or {_WAY_OUT}"
        )
    if not 2 <= run.output.dim() <= 4:
        raise ModelError(
            f"{where} returns a tensor of shape {run.output_shape}; allowed are (N, C), (N, L, C), "
            f"(N, C, H, W) and (N, H, W, C); {_WAY_OUT}"
        )


def _body_and_rest(run: WatchedRun) -> tuple[list[ModuleCall], list[ModuleCall]]:
    """The leaf calls up to the last layer that gives a map, and the later ones that may be replaced."""
    leaves = [call for call in run.calls if call.is_leaf]
    last = max((i for i, call in enumerate(leaves) if call.has_parameters and _gives_map(call)), default=-1)
    body = leaves[: last + 1]
    shared = {id(call.module) for call in body}
    return body, [call for call in leaves[last + 1 :] if id(call.module) not in shared]


def _gives_map(call: ModuleCall) -> bool:
    inside = (caller for caller in call.callers if caller.name)  # the network itself has no name
    return any(is_map(part.output_shape) for part in (call, *inside))


def _closing_pools(run: WatchedRun) -> dict[str, nn.Module]:
    if not is_map(run.output_shape):
        return {}
    body, rest = _body_and_rest(run)
    return {call.name: nn.Identity() for call in rest if _is_pool(call.module) and _is_passage(call, body, run)}


def _tail(model: nn.Module, run: WatchedRun) -> dict[str, nn.Module]:
    """What to put in the place of the modules behind the last map, by name."""
    body, rest = _body_and_rest(run)
    if not body:
        raise ModelError(
            f"{type(model).__name__} has no layer that gives a feature map for an input of shape "
            f"{run.calls[0].input_shape}; pass a convolutional network, or {_WAY_OUT}"
        )
    start = next((i for i, call in enumerate(rest) if _may_start_tail(call, body, run)), len(rest))
    swaps: dict[str, nn.Module] = {call.name: nn.Identity() for call in rest[start:]}
    for first in rest[start : start + 1]:
        dim = len(first.input_shape)
        if dim == 4 or (dim in _GLOBAL_POOLS and _is_pool(first.module)):
            swaps[first.name] = _GLOBAL_POOLS[dim](1)
    return swaps


def _may_start_tail(call: ModuleCall, body: list[ModuleCall], run: WatchedRun) -> bool:
    ends_maps = isinstance(call.module, (nn.Flatten, nn.modules.dropout._DropoutNd)) or _is_pool(call.module)
    return (ends_maps or call.has_parameters) and _is_passage(call, body, run)


def _is_passage(call: ModuleCall, body: list[ModuleCall], run: WatchedRun) -> bool:
    around = parameters_of(upstream(run.output_nodes, without=call.nodes))
    return not any(id(p) in around for part in body for p in part.module.parameters())


def _is_pool(module: nn.Module) -> bool:
    return isinstance(module, _POOLS) or "pool" in type(module).__name__.lower()


def _drop_unused(model: nn.Module, example: Tensor) -> nn.Module:
    modules, parameters = _used(model, example)
    dropped: set[int] = set()
    for name, module in list(model.named_modules()):
        owned = {id(p) for p in module.parameters()}
        inside = {id(part) for part in module.modules()}
        if name and owned and id(module) not in dropped and not owned & parameters and not inside & modules:
            dropped |= inside
            model = replace_module(model, name, nn.Identity())
    return model


def _used(model: nn.Module, example: Tensor) -> tuple[set[int], set[int]]:
    modules: set[int] = set()
    parameters: set[int] = set()
    for train in (False, True):
        run = watch_run(model, example, train=train)
        _check_output(model, run, "train" if train else "eval")
        if any("Softmax" in node.name() for node in run.output_nodes):
            raise ModelError(f"{type(model).__name__} ends in a softmax inside its forward; {_WAY_OUT}")
        modules |= {id(call.module) for call in run.calls}
        parameters |= parameters_of(upstream(run.output_nodes))
    return modules, parameters


# ------------------------------------------------------------------------------------------- norms


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
