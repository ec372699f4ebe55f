"""The body of a network: everything up to its last feature map, without the old head."""

from __future__ import annotations

from torch import Tensor, nn

from basisprune.errors import ModelError
from basisprune.torchkit.surgery import replace_module
from basisprune.torchkit.watching import ModuleCall, WatchedRun, is_map, parameters_of, roomy_run, upstream, watch_run

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
        _check_no_softmax(model, run)
        modules |= {id(call.module) for call in run.calls}
        parameters |= parameters_of(upstream(run.output_nodes))
    return modules, parameters


def _check_no_softmax(model: nn.Module, run: WatchedRun) -> None:
    if any("Softmax" in node.name() for node in run.output_nodes):
        raise ModelError(f"{type(model).__name__} ends in a softmax inside its forward; {_WAY_OUT}")
