"""What happens when a network runs once: which modules are called, and what feeds or reads what."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from basisprune.errors import ModelError, pass_on
from basisprune.torchkit.running import hooked, mode, tensors_in

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
        return next(self.module.parameters(), None) is not None


@dataclass
class WatchedRun:
    """All calls in the order in which they began, and what the network returned."""

    calls: list[ModuleCall] = field(default_factory=list)
    output: object = None

    @property
    def output_nodes(self) -> tuple[Node, ...]:
        return _nodes(self.output)

    @property
    def output_shape(self) -> Shape:
        return _shape(self.output)


def features_of(model: nn.Module) -> Callable[[Tensor], object]:
    """What computes the features: the model's `forward_features` if it has one, otherwise the model."""
    return cast("Callable[[Tensor], object]", getattr(model, "forward_features", model))


def watch_run(model: nn.Module, example: Tensor, *, train: bool = False, whole: bool = False) -> WatchedRun:
    """Run the model's features, or if `whole` all of it, on `example` with gradients; return what happened.

    Neither the model nor the global random state changes. Raises ModelError if the model does not run.
    """
    run = WatchedRun()
    # The twin shares the parameters, so that its graph speaks of those of the model.
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).train(train)
    _record(model, twin, run)
    # Autograd builds its graph without keeping any activation: no gradients are needed.
    graph_only = saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))
    with graph_only, torch.enable_grad(), torch.random.fork_rng(devices=[]):
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
    """Run on 128x128 or more if the network takes it: on small images the last maps look like pooled features."""
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
    """Whether a tensor of this shape has channels at more than one position, whatever their order."""
    return sum(side > 1 for side in shape[1:]) >= 2


def upstream(nodes: Iterable[Node], without: Collection[Node] = ()) -> dict[Node, tuple[Node, ...]]:
    """Every node that feeds `nodes`, they included, with its own inputs; paths end before `without`.

    Python's node objects live only as long as they are held: compare nodes while you keep the result.
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


def _shape(value: object) -> Shape:
    return next((tuple(tensor.shape) for tensor in tensors_in(value)), ())


def _nodes(value: object) -> tuple[Node, ...]:
    return tuple(tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None)


@dataclass
class LayerCall:
    """One call of a layer: the shapes that go in and come out, and which norms (None for anything else) read that."""

    layer: str
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    extra_arguments: bool
    readers: list[str | None] = field(default_factory=list)


@dataclass
class Dataflow:
    """The calls of each layer, which layer each norm read (None: another module) at which sizes, the output."""

    calls: dict[str, list[LayerCall]] = field(default_factory=dict)
    sources: dict[str, list[str | None]] = field(default_factory=dict)
    output: object = None
    norm_sizes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def is_passage(self, layer: str, norm: str) -> bool:
        readers = {reader for call in self.calls[layer] for reader in call.readers}
        return set(self.sources[norm]) == {layer} and readers == {norm}


@torch.no_grad()
def dataflow_of(
    model: nn.Module, inputs: Sequence[object], layers: Mapping[str, nn.Module], norms: Mapping[str, nn.Module]
) -> Dataflow:
    """What the norms and everything else read of these layers of the model, in one run in eval mode."""
    watch = _Watch()
    handles = [
        layer.register_forward_hook(partial(watch.layer_done, name), with_kwargs=True) for name, layer in layers.items()
    ]
    for name, norm in norms.items():
        handles.append(norm.register_forward_pre_hook(partial(watch.norm_starts, name)))
        handles.append(norm.register_forward_hook(watch.norm_done))
    with hooked(handles), mode(model, training=False):
        with watch:
            watch.found.output = model(*inputs)
        watch.note_reader(None, watch.found.output)  # what the model returns counts as read by others
    return watch.found


class _Watch(TorchDispatchMode):
    """Every operation passes here with its tensors, so that nothing reads a layer's output unnoticed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Dataflow()
        self._norm: str | None = None
        self._made_by: MutableMapping[Tensor, LayerCall] = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.note_reader(self._norm, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def note_reader(self, reader: str | None, values: object) -> None:
        for tensor in tensors_in(values):
            if (call := self._made_by.get(tensor)) is not None:
                call.readers.append(reader)

    def layer_done(
        self, name: str, _layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        features = args[0] if args else next(iter(kwargs.values()))
        call = LayerCall(name, tuple(features.shape), tuple(output.shape), len(args) + len(kwargs) > 1)
        self.found.calls.setdefault(name, []).append(call)
        self._made_by[output] = call

    def norm_starts(self, name: str, _norm: nn.Module, args: tuple[object, ...]) -> None:
        features = args[0] if args and isinstance(args[0], Tensor) else None
        call = None if features is None else self._made_by.get(features)
        self.found.sources.setdefault(name, []).append(call.layer if call else None)
        if features is not None and features.dim() == 4:
            self.found.norm_sizes.setdefault(name, []).append((features.shape[2], features.shape[3]))
        self._norm = name

    def norm_done(self, *_: object) -> None:
        self._norm = None
