"""A folded network: the graph of its plain parts, and the TransferModel or KeptModel of the same parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Protocol, TypedDict, cast

import torch
from torch import Tensor, fx, nn

from basisprune.deploy.operations import METHODS, READINGS
from basisprune.deploy.tracing import ValuedTracer
from basisprune.errors import LayerError
from basisprune.torchkit.surgery import module_at, tensor_at
from basisprune.torchkit.watching import example_input
from basisprune.transfer.kept import KeptModel
from basisprune.transfer.model import GlobalPool, Layout, ModelSource, TransferModel
from basisprune.types import InputSpec

LAYER_ATTRIBUTES = (
    *("in_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    *("transposed", "output_padding", "in_features"),
)
"""What the code around a layer may read of it, and a container in its place has too."""
_PARTS = ("call_module", "get_attr")


class _Spec(TypedDict):
    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    white: int | None


class _Source(TypedDict):
    backbone: str | None
    insert_norm: bool | None
    is_trusted: bool


class _Pool(TypedDict):
    layout: Layout
    prefix_tokens: int


class About(TypedDict):
    """What a folded model knows of itself, as plain data; `pool` is None where it is in the graph alone."""

    input_spec: _Spec | None
    source: _Source
    pool: _Pool | None
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class _Slot:
    """The value that the step of this number gave."""

    number: int


@dataclass(frozen=True)
class _Step:
    """One node of a graph: `path` leads to the part that it names, `function` is what it calls instead.

    `done` are the steps whose values nobody reads any more.
    """

    op: str
    path: tuple[str, ...]
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    done: tuple[int, ...]


class Guard(Protocol):
    """What watches over a graph that came out of a file."""

    def watch(self, images: Tensor) -> AbstractContextManager[object]:
        """The context in which the graph runs on these images."""

    def check(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raises an error before a step does what a file may not ask for."""


class FoldedModel(fx.GraphModule):
    """What `fold` makes of a TransferModel or KeptModel: a graph of calls of its parts, which keep their names.

    The graph is walked when it runs, step by step; no source is generated and compiled, as torch's own GraphModule
    does, so that nothing in a file can become code. What a step names was found before it runs: a module, parameter
    or buffer by the modules that hold it, a method of tensors in a table. A `guard` watches over each run of a graph
    that came out of a file. What it knows of itself lies in `about` as plain data. Pickled, it
    becomes torch's own GraphModule, with that data, so that whoever reads it needs torch and whatever package the
    backbone's blocks come from, not this one.
    """

    about: About
    guard: Guard | None = None
    _steps: tuple[_Step, ...]
    _lineno_map, _prologue_start = None, 0  # torch.compile asks a GraphModule where in its source each node is

    @property
    def input_spec(self) -> InputSpec:
        """How it wants its images; like any other attribute, there is none where that is not known."""
        known = self.about["input_spec"]
        if known is None:
            raise AttributeError("input_spec")
        return InputSpec(**known)

    @property
    def source(self) -> ModelSource:
        """Where its architecture came from."""
        return ModelSource(**self.about["source"])

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of its classes, if it was given any."""
        return self.about["classes"]

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        self.about["classes"] = None if names is None else tuple(names)

    @property
    def code(self) -> str:
        """Its graph as source, to be read."""
        return self._graph.python_code("self").src

    def recompile(self) -> None:  # type: ignore[override]
        """Takes over a graph that was changed."""
        self._steps = _steps(self._graph)

    def forward(self, x: Tensor) -> Tensor:
        """The scores (N, classes), before any softmax."""
        if self.guard is None or isinstance(x, fx.Proxy):  # a tracer's stand-in has no values to check
            return self._run(x, None)
        with self.guard.watch(x):
            return self._run(x, self.guard)

    def _run(self, x: Tensor, guard: Guard | None) -> Tensor:
        values: list[object] = [None] * len(self._steps)
        for number, step in enumerate(self._steps):
            args = [_filled(value, values) for value in step.args]
            kwargs = {name: _filled(value, values) for name, value in step.kwargs.items()}
            if guard is not None:
                guard.check(step.function, args, kwargs)
            if step.op == "output":
                return cast(Tensor, args[0])
            if step.op == "placeholder":
                values[number] = x
            elif step.op == "get_attr":
                values[number] = self._held(x, step.path)
            else:
                function = module_at(self, step.path) if step.op == "call_module" else step.function
                values[number] = function(*args, **kwargs)
            for old in step.done:
                values[old] = None
        raise LayerError("", "the graph has no output")

    def _held(self, x: Tensor, path: tuple[str, ...]) -> object:
        """The parameter or buffer; a tracer's name for it where one is at work."""
        if not isinstance(x, fx.Proxy):
            return tensor_at(self, path)
        here = x.tracer.path_of_module(self) if isinstance(x.tracer, fx.Tracer) else ""
        return x.tracer.create_proxy("get_attr", ".".join((*filter(None, [here]), *path)), (), {})

    def __str__(self) -> str:
        return self.__repr__()

    def __deepcopy__(self, memo: dict[int, object]) -> FoldedModel:
        result = cast(FoldedModel, super().__deepcopy__(memo))
        result.about = copy.deepcopy(self.about, memo)  # torch keeps only what the graph refers to
        result.guard = copy.deepcopy(self.guard, memo)
        return result

    def __reduce__(self) -> tuple[object, ...]:
        plain = fx.GraphModule(self, copy.deepcopy(self._graph), class_name="FoldedModel")
        plain.about = self.about  # type: ignore[assignment]
        return plain.__reduce__()


def _steps(graph: fx.Graph) -> tuple[_Step, ...]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    done: dict[int, list[int]] = {}
    for node, number in numbers.items():
        done.setdefault(max([number, *(numbers[user] for user in node.users)]), []).append(number)
    return tuple(
        _Step(
            node.op,
            tuple(node.target.split(".")) if node.op in _PARTS else (),
            _function(node),
            tuple(_slotted(value, numbers) for value in (node.args[:1] if _is_reading(node) else node.args)),
            {name: _slotted(value, numbers) for name, value in node.kwargs.items()},
            tuple(done.get(number, ())),
        )
        for node, number in numbers.items()
    )


def _function(node: fx.Node) -> Callable[..., object]:
    """What the node calls; a method or attribute that no table has can only come from a network that was traced."""
    if node.op == "call_method":
        return METHODS.get(str(node.target)) or methodcaller(str(node.target))
    if _is_reading(node):
        return READINGS.get(str(node.args[1])) or attrgetter(str(node.args[1]))
    return node.target if callable(node.target) else _nothing


def _is_reading(node: fx.Node) -> bool:
    return node.target is getattr and len(node.args) == 2 and isinstance(node.args[1], str)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stands for the function of a step that calls none."""


def _slotted(value: object, numbers: dict[fx.Node, int]) -> object:
    """The argument with a slot in the place of each node."""
    return _replaced(value, lambda leaf: _Slot(numbers[leaf]) if isinstance(leaf, fx.Node) else leaf)


def _filled(value: object, values: list[object]) -> object:
    """The argument with what the steps gave in the place of each slot."""
    return _replaced(value, lambda leaf: values[leaf.number] if isinstance(leaf, _Slot) else leaf)


def _replaced(value: object, leaf: Callable[[object], object]) -> object:
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, leaf) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _replaced(item, leaf) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_replaced(item, leaf) for item in (value.start, value.stop, value.step)))
    return leaf(value)


class _OuterTracer(ValuedTracer):
    """Looks into the modules of this package only; a backbone's blocks stay as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the module stays a module."""
        return not isinstance(m, (TransferModel, GlobalPool, KeptModel))


def traced(name: str, model: TransferModel | KeptModel) -> FoldedModel:
    """What the model called `name` does, as a graph of its parts, which are shared; raises LayerError if it cannot.

    The model is in eval mode. Whether the graph does the same must be seen by comparing the two.
    """
    try:
        with torch.no_grad():
            graph = _OuterTracer(example_input(model, model.input_spec.shape)).trace(model)
    except Exception as error:
        inner = model.network if isinstance(model, KeptModel) else model.backbone
        raise LayerError(
            name,
            f"{type(inner).__name__}.forward_features cannot be traced ({error}); give the backbone a "
            "forward_features that only calls modules and torch functions",
        ) from error
    classes: Sequence[str] | None = getattr(model, "classes", None)
    pool = None
    if isinstance(model, TransferModel):
        pool = _Pool(layout=model.pool.layout, prefix_tokens=model.pool.prefix_tokens)
    return folded(model, graph, about(model.input_spec, model.source, classes, pool))


def about(
    spec: InputSpec | None, source: ModelSource | None, classes: Sequence[str] | None, pool: _Pool | None = None
) -> About:
    """What a folded model with this input, if that is known, this source and these classes knows of itself."""
    source = source or ModelSource(None)
    return About(
        input_spec=None
        if spec is None
        else _Spec(size=spec.size, mean=spec.mean, std=spec.std, interpolation=spec.interpolation, white=spec.white),
        source=_Source(backbone=source.backbone, insert_norm=source.insert_norm, is_trusted=source.is_trusted),
        pool=pool,
        classes=None if classes is None else tuple(classes),
    )


def folded(parts: nn.Module, graph: fx.Graph, known: About) -> FoldedModel:
    """The folded model of a graph, on the parts that it names, which are shared."""
    graph._tracer_cls = None  # or a pickle of the result would ask for the tracer's class
    result = FoldedModel({}, fx.Graph(), class_name="FoldedModel")  # torch would look the names up as attributes
    for node in graph.nodes:
        if node.op in _PARTS:
            _share(result, parts, node.target.split("."))
    result.graph, result.about, result.training = graph, known, parts.training
    return result


def _share(home: nn.Module, parts: nn.Module, path: Sequence[str]) -> None:
    """Puts a module, parameter or buffer of the parts under the same names into another network."""
    *above, leaf = path
    for name in above:
        inner = module_at(parts, [name])
        there = home._modules.get(name)
        if there is inner:
            return
        if there is None:
            home._modules[name] = there = nn.Module()
        home, parts = there, inner
    for held, into in ((parts._modules, home._modules), (parts._parameters, home._parameters)):
        if held.get(leaf) is not None:
            into[leaf] = held[leaf]  # type: ignore[assignment]
            return
    tensor = parts._buffers.get(leaf, vars(parts).get(leaf))
    if not isinstance(tensor, Tensor):
        raise LayerError(".".join(path), "the network has no such module, parameter or buffer")
    home._buffers[leaf] = tensor
    if leaf in parts._non_persistent_buffers_set:
        home._non_persistent_buffers_set.add(leaf)


def untraced(model: FoldedModel, fresh: nn.Module | None) -> TransferModel | KeptModel:
    """A TransferModel or KeptModel that does what the graph does, on the parts of the graph, which are shared.

    A file need not hold a graph then: the architecture is traced anew instead. `fresh` is that architecture with any
    weights, and is used up; it is None where the backbone is one part of the graph. Raises LayerError if it is not.
    """
    if isinstance(fresh, TransferModel | KeptModel):
        _adopt(fresh, model)
        fresh.input_spec, fresh.source = model.input_spec, model.source
        if isinstance(fresh, KeptModel):
            fresh.part = next((str(node.args[1]) for node in model.graph.nodes if node.target is getattr), None)
        return fresh.eval()
    parts, pool = dict(model.named_children()), model.about["pool"]
    backbone, dropout, classifier = (parts.get(name) for name in ("backbone", "dropout", "classifier"))
    if backbone is None or type(backbone) is nn.Module or dropout is None or classifier is None or pool is None:
        raise LayerError(
            "backbone",
            "was handed over as a module, and only its parts are left; pass factory='package.module:function' "
            "(or a timm name), which builds it",
        )
    return TransferModel(
        backbone,
        GlobalPool(**pool),
        cast(nn.Dropout, dropout),
        cast(nn.Linear, classifier),
        model.input_spec,
        model.source,
    ).eval()


def _adopt(place: nn.Module, graph: nn.Module) -> None:
    """Puts what the graph holds into the place; its containers of type nn.Module only hold names."""
    for name, child in graph.named_children():
        inner = place._modules.get(name)
        if type(child) is nn.Module and inner is not None:
            _adopt(inner, child)
        else:
            setattr(place, name, child)
    place._parameters.update(graph._parameters)
    place._buffers.update(graph._buffers)
