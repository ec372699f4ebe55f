"""What happens when a network runs once: which modules are called, and what feeds what."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from basisprune.errors import ModelError, pass_on
from basisprune.torchkit.running import tensors_in

Shape: TypeAlias = tuple[int, ...]

_ROOMY = 128  # leaves 2x2 positions behind a total stride of 64


@dataclass(eq=False)
class ModuleCall:
    """One call of a module; shapes are those of the first tensor that goes in or comes out."""

    name: str
    module: nn.Module
    callers: tuple[ModuleCall, ...]
    input_shape: Shape = ()
    output_shape: Shape = ()
    nodes: tuple[Node, ...] = ()
    is_leaf: bool = True

    @property
    def has_parameters(self) -> bool:
        """Whether the module holds parameters, its own or those of modules in it."""
        return next(self.module.parameters(), None) is not None


@dataclass
class WatchedRun:
    """All calls in the order in which they began, and what the network returned."""

    calls: list[ModuleCall] = field(default_factory=list)
    output: object = None

    @property
    def output_nodes(self) -> tuple[Node, ...]:
        """The nodes of the autograd graph at which the output leaves."""
        return _nodes(self.output)

    @property
    def output_shape(self) -> Shape:
        """The shape of the returned tensor, the first one if there are several."""
        return _shape(self.output)


def features_of(model: nn.Module) -> Callable[[Tensor], object]:
    """What computes the features: the model's `forward_features` if it has one, otherwise the model."""
    return cast("Callable[[Tensor], object]", getattr(model, "forward_features", model))


def watch_run(model: nn.Module, example: Tensor, *, train: bool = False, whole: bool = False) -> WatchedRun:
    """What happens when the model computes the features of `example`, with gradients enabled; if `whole`, its output.

    Neither the model, with its statistics and caches, nor the global random state changes. Raises
    ModelError if the model does not run.

    >>> run = watch_run(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8))
    >>> [(call.name, call.output_shape) for call in run.calls]
    [('', (1, 4, 6, 6)), ('0', (1, 4, 6, 6)), ('1', (1, 4, 6, 6))]
    """
    run = WatchedRun()
    # The twin shares the parameters, so that its graph speaks of those of the model.
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).train(train)
    _record(model, twin, run)
    with _graph_only(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            run.output = (twin if whole else features_of(twin))(example)
        except Exception as error:
            pass_on(error)
            raise ModelError(
                f"{type(model).__name__} does not run on an input of shape {tuple(example.shape)}: "
                f"{type(error).__name__}: {error}; if it wants another size or number of channels, pass "
                "input_size= or input_spec=; if it reshapes to fixed sizes, give it a method forward_features(x)"
            ) from error
    return run


def roomy_run(model: nn.Module, example: Tensor) -> WatchedRun:
    """A run on an image of at least 128x128 if the network takes it, otherwise on `example`.

    On small images the last maps of a network shrink to 1x1 and look like pooled features.
    """
    height, width = (max(side, _ROOMY) for side in example.shape[-2:])
    if (height, width) != tuple(example.shape[-2:]):
        try:
            return watch_run(model, example_input(model, (example.shape[1], height, width)))
        except ModelError:  # the network wants just its own size
            pass
    return watch_run(model, example)


def example_input(model: nn.Module, shape: Shape) -> Tensor:
    """Two random images (2, *shape) with the device and dtype of the model's parameters."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return images.to(like.device, like.dtype)


def is_map(shape: Shape) -> bool:
    """Whether a tensor of this shape has channels at more than one position, whatever their order.

    >>> is_map((2, 64, 7, 7)), is_map((2, 49, 64)), is_map((2, 64, 1, 1)), is_map((2, 64))
    (True, True, False, False)
    """
    return sum(side > 1 for side in shape[1:]) >= 2


def upstream(nodes: Iterable[Node], without: Collection[Node] = ()) -> dict[Node, tuple[Node, ...]]:
    """Every node that feeds `nodes`, they included, with its own inputs; paths end before `without`.

    Python's node objects live only as long as somebody holds them: compare nodes while you keep the result.
    """
    edges: dict[Node, tuple[Node, ...]] = {}
    pending = [node for node in nodes if node not in without]
    while pending:
        node = pending.pop()
        if node not in edges:
            edges[node] = tuple(source for source, _ in node.next_functions if source is not None)
            pending += [source for source in edges[node] if source not in without]
    return edges


def parameters_of(nodes: Iterable[Node]) -> set[int]:
    """The ids of the parameters that enter the graph at these nodes."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _record(model: nn.Module, twin: nn.Module, run: WatchedRun) -> None:
    """Hooks the twin to fill `run.calls` with the calls of the twin's modules, under the modules of the model."""
    stack: list[ModuleCall] = []

    def enter(name: str, module: nn.Module, _twin: nn.Module, args: tuple[object, ...]) -> None:
        for caller in stack[-1:]:
            caller.is_leaf = False
        stack.append(ModuleCall(name, module, tuple(stack), input_shape=_shape(args)))
        run.calls.append(stack[-1])

    def leave(_twin: nn.Module, _args: tuple[object, ...], output: object) -> None:
        call = stack.pop()
        call.output_shape, call.nodes = _shape(output), _nodes(output)

    for (name, module), part in zip(model.named_modules(), twin.modules(), strict=True):
        part.register_forward_pre_hook(partial(enter, name, module))
        part.register_forward_hook(leave)


def _graph_only() -> saved_tensors_hooks:
    """Lets autograd build its graph without keeping any activation: nobody will ask for gradients."""
    return saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))


def _shape(value: object) -> Shape:
    return next((tuple(tensor.shape) for tensor in tensors_in(value)), ())


def _nodes(value: object) -> tuple[Node, ...]:
    return tuple(tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)
