"""Networks as graphs of their parts: traced from Python code, and run step by step without generating any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor, fx, nn
from torch.utils._pytree import MappingKey, register_pytree_node

from basisprune.deploy.allowed import METHODS, READINGS
from basisprune.errors import LayerError
from basisprune.torchkit.running import packed
from basisprune.torchkit.surgery import module_at, refuse_hidden_names, tensor_at
from basisprune.transfer.model import GlobalPool, KeptModel, ModelSource, TransferModel
from basisprune.types import InputSpec

if TYPE_CHECKING:
    from basisprune.deploy.bundle.limits import RunGuard

About: TypeAlias = dict[str, Any]
"""What a folded model knows of itself, as plain data: `input_spec`, `source`, `classes`, and the `pool` in it."""
_PARTS = ("call_module", "get_attr")


def about(
    spec: InputSpec | None, source: ModelSource | None, classes: Sequence[str] | None, pool: GlobalPool | None = None
) -> About:
    """Return what a folded model with this input, source and classes knows of itself."""
    return {
        "input_spec": None if spec is None else asdict(spec),
        "source": asdict(source or ModelSource(None)),
        "pool": None if pool is None else {"layout": pool.layout, "prefix_tokens": pool.prefix_tokens},
        "classes": None if classes is None else tuple(classes),
    }


@dataclass(frozen=True)
class _Slot:
    """The value that the step of this number gave."""

    number: int


@dataclass(frozen=True)
class _Step:
    """One node: `path` leads to the part it names, else `function` is called; the steps `done` are not read later."""

    op: str
    path: tuple[str, ...]
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    done: tuple[int, ...]


class Outputs(dict[str, object]):
    """Several outputs by name, which are attributes too, as those of transformers are."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


register_pytree_node(
    Outputs,
    lambda outputs: (list(outputs.values()), list(outputs)),
    lambda values, names: Outputs(zip(names, values, strict=True)),
    serialized_type_name="basisprune.Outputs",
    flatten_with_keys_fn=lambda outputs: ([(MappingKey(name), each) for name, each in outputs.items()], list(outputs)),
)


class FoldedModel(fx.GraphModule):
    """What `fold` makes of a TransferModel or KeptModel: a graph of calls of its parts, which keep their names.

    The graph is run step by step, without the source that torch's own GraphModule generates and compiles, so nothing in
    a file can become code. Modules, parameters and buffers are found by the modules that hold them, methods of tensors
    in a table. A `guard` watches each run of a graph that came out of a file. Pickled, it becomes torch's own
    GraphModule with the plain data `about`, which can be read without this package.
    """

    about: About
    guard: RunGuard | None = None
    _steps: tuple[_Step, ...]
    _lineno_map, _prologue_start = None, 0  # torch.compile asks a GraphModule where in its source each node is

    @property
    def input_spec(self) -> InputSpec:
        known = self.about["input_spec"]
        if known is None:
            raise AttributeError("input_spec")  # as of any network that has none
        return InputSpec(**known)

    @input_spec.setter
    def input_spec(self, spec: InputSpec) -> None:
        self.about["input_spec"] = asdict(spec)

    @property
    def source(self) -> ModelSource:
        return ModelSource(**self.about["source"])

    @property
    def classes(self) -> tuple[str, ...] | None:
        return cast("tuple[str, ...] | None", self.about["classes"])

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        self.about["classes"] = None if names is None else tuple(names)

    @property
    def code(self) -> str:
        return self._graph.python_code("self").src

    def recompile(self) -> None:  # type: ignore[override]
        self._steps = _steps(self._graph)

    def forward(self, given: object = None, *more: Tensor, **named: Tensor) -> Tensor:
        several = more or named or isinstance(given, tuple | list | dict)
        x = packed(named or ((given, *more) if more else given)) if several else cast(Tensor, given)
        if self.guard is None or isinstance(x, fx.Proxy):  # a tracer's stand-in has no values to check
            return self._run(x, None)
        with self.guard.watch(x):
            return self._run(x, self.guard)

    def _run(self, x: Tensor, guard: RunGuard | None) -> Tensor:
        values: list[object] = [None] * len(self._steps)
        for number, step in enumerate(self._steps):
            args = [_filled(value, values) for value in step.args]
            kwargs = {name: _filled(value, values) for name, value in step.kwargs.items()}
            if guard is not None:
                guard.check(step.function, args, kwargs)
            if step.op == "output":
                return cast(Tensor, Outputs(args[0]) if type(args[0]) is dict else args[0])
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

    def __copy__(self) -> FoldedModel:
        result = graph_model(self, copy.deepcopy(self._graph), copy.copy(self.about))  # torch would generate code
        result.guard = self.guard
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> FoldedModel:
        result = cast(FoldedModel, super().__deepcopy__(memo))
        result.about = copy.deepcopy(self.about, memo)  # torch keeps only what the graph refers to
        result.guard = copy.deepcopy(self.guard, memo)
        return result

    def __reduce__(self) -> tuple[object, ...]:
        refuse_hidden_names(self)  # the names become code
        plain = fx.GraphModule(self, copy.deepcopy(self._graph), class_name="FoldedModel")
        plain.about = self.about  # type: ignore[assignment]
        return plain.__reduce__()


def _steps(graph: fx.Graph) -> tuple[_Step, ...]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    done: dict[int, list[int]] = {}
    for node, number in numbers.items():
        done.setdefault(max([number, *(numbers[user] for user in node.users)]), []).append(number)

    def slot(node: fx.Node) -> Any:
        return _Slot(numbers[node])

    steps = []
    for node, number in numbers.items():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), slot)
        function = node.target if callable(node.target) else _nothing
        # A method or attribute that no table has can only come from a network that was traced.
        if node.op == "call_method":
            function = METHODS.get(str(node.target)) or methodcaller(str(node.target))
        elif node.target is getattr and len(args) == 2 and isinstance(args[1], str):
            function, args = READINGS.get(args[1]) or attrgetter(args[1]), args[:1]
        path = tuple(node.target.split(".")) if node.op in _PARTS else ()
        steps.append(_Step(node.op, path, function, tuple(args), dict(kwargs), tuple(done.get(number, ()))))
    return tuple(steps)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stands for the function of a step that calls none."""


def _filled(value: object, values: list[object]) -> object:
    """The argument with what the steps gave in the place of each slot."""
    if isinstance(value, _Slot):
        return values[value.number]
    if isinstance(value, list):
        return [_filled(item, values) for item in value]
    if isinstance(value, tuple):
        return tuple([_filled(item, values) for item in value])
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[_filled(item, values) for item in (value.start, value.stop, value.step)])
    return value


def graph_model(parts: nn.Module, graph: fx.Graph, known: About) -> FoldedModel:
    """Return the folded model of a graph, on the parts that it names, which are shared."""
    graph._tracer_cls = None  # or a pickle of the result would ask for the tracer's class
    result = FoldedModel({}, fx.Graph(), class_name="FoldedModel")  # torch would look the names up as attributes
    for node in graph.nodes:
        if node.op in _PARTS:
            _share(result, parts, node.target.split("."))
    result.graph, result.about, result.training = graph, known, parts.training
    refuse_hidden_names(result)
    return result


def _share(home: nn.Module, parts: nn.Module, path: Sequence[str]) -> None:
    """Put a module, parameter or buffer of the parts under the same names into another network."""
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


def from_graph(model: FoldedModel, fresh: nn.Module | None) -> TransferModel | KeptModel:
    """Return a TransferModel or KeptModel that does what the graph does, on its parts, which are shared.

    `fresh` is the architecture with any weights, and is used up; it is None where the backbone is one part of the
    graph. Raises LayerError if it is not.
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
    head = cast(nn.Dropout, dropout), cast(nn.Linear, classifier)
    return TransferModel(backbone, GlobalPool(**pool), *head, model.input_spec, model.source).eval()


def _adopt(place: nn.Module, graph: nn.Module) -> None:
    """Put what the graph holds into the place; its containers of type nn.Module only hold names."""
    for name, child in graph.named_children():
        inner = place._modules.get(name)
        if type(child) is nn.Module and inner is not None:
            _adopt(inner, child)
        else:
            setattr(place, name, child)
    place._parameters.update(graph._parameters)
    place._buffers.update(graph._buffers)
