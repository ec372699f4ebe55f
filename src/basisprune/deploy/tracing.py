"""A network's code becomes a graph: run once on an example, with every operation noted."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from basisprune.deploy.allowed import ARITHMETIC, CREATING, READINGS, expect, set_item
from basisprune.deploy.graphs import FoldedModel, about, graph_model
from basisprune.errors import LayerError
from basisprune.torchkit.running import tensors_in
from basisprune.torchkit.surgery import module_at
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import GlobalPool, KeptModel, TransferModel

_NUMBERS = (bool, int, float)
_NEVER_CHANGE = ("ndim", "dim", "ndimension", "is_floating_point", "is_complex")
_READ = "call_function", getattr
_AS_THEY_ARE = (torch.as_tensor, torch.asarray)


class _Valued(fx.Proxy):
    """Stands for a value of the run, and answers as one of its type: code may ask whether it is a tensor."""

    fx_value: Any = None
    _is_param = False  # what isinstance(x, nn.Parameter) reads

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.fx_value)

    def __getattr__(self, k: str) -> object:  # type: ignore[override]
        """Give methods as fx does, what a graph can read as a step, and what never changes as it is."""
        found = getattr(self.fx_value, k)
        if not isinstance(self.fx_value, Tensor):
            return super().__getattr__(k)
        if k in _NEVER_CHANGE or not (callable(found) or k in READINGS):
            return found
        return super().__getattr__(k) if callable(found) else self.tracer.create_proxy(*_READ, (self, k), {})

    def __setitem__(self, index: object, value: object) -> None:
        self.tracer.create_proxy("call_function", set_item, (self, index, value), {})

    def __hash__(self) -> int:
        return hash(self.fx_value) if isinstance(self.fx_value, _NUMBERS) else id(self)

    def __len__(self) -> int:
        return cast(int, cast(ValuedTracer, self.tracer).known(self.node, len(self.fx_value)))

    def __contains__(self, item: object) -> bool:
        return item in tuple(self)

    def __index__(self) -> int:
        return int(operator.index(cast(int, cast(ValuedTracer, self.tracer).known(self.node, self.fx_value))))

    def __int__(self) -> int:
        return int(cast(ValuedTracer, self.tracer).known(self.node, self.fx_value))

    def __float__(self) -> float:
        return float(cast(ValuedTracer, self.tracer).known(self.node, self.fx_value))


class _AsTheyAre(TorchFunctionMode):
    """Leaves values that are made tensors as they are, and notes what is made of sizes: torch knows no stand-ins."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _AS_THEY_ARE and issubclass(type(args[0]), fx.Proxy):
            return cast(fx.Proxy, args[0]).to(**kwargs) if kwargs else args[0]
        if func in CREATING:
            held = [leaf for leaf in tree_leaves((args, kwargs)) if issubclass(type(leaf), fx.Proxy)]
            if held:
                return held[0].tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **kwargs or {})


class ValuedTracer(fx.Tracer):
    """Traces a network while it runs on one example, so that code which asks for types sees those of the values.

    Code that decides by a size, or computes with it outside of torch, gets that of the example, and the graph refuses
    inputs for which it is another (`expect`). What else code may depend on no graph knows: whoever traces a network
    compares the graph with it. Arguments of its forward beyond the first keep their defaults.
    """

    def __init__(self, example: Tensor, is_leaf: Callable[[nn.Module], bool], *, is_deep: bool = False) -> None:
        super().__init__()
        self.example, self.is_leaf, self.is_deep = example, is_leaf, is_deep
        self.values: dict[fx.Node, object] = {}
        self.asked: set[tuple[fx.Node, object]] = set()
        self.is_running = False  # one operation, to see what it gives

    def trace(
        self, root: nn.Module | Callable[..., object], concrete_args: dict[str, object] | None = None
    ) -> fx.Graph:
        with _AsTheyAre():
            graph = super().trace(root, concrete_args)
        for node in reversed(graph.nodes):
            # What an assertion would refuse, the network refuses; what code only looked at is in no result.
            looked = node.op.startswith("call") and next(tensors_in(self.values[node]), None) is None
            is_idle = not node.users and node.target not in (expect, set_item)
            if node.target is torch._assert or (is_idle and (looked or node.target in CREATING)):
                graph.erase_node(node)
        self.values.clear()
        return graph

    def known(self, node: fx.Node, value: object) -> float:
        """Return a number that code asks for, and have each run of the graph compare its own."""
        if isinstance(value, Tensor):
            raise LayerError("", "its code decides by the values of tensors")
        is_rank = isinstance(self.values[node], torch.Size)
        is_of_numbers = all(isinstance(leaf, _NUMBERS) for leaf in self._leaves(node))
        if is_of_numbers and not is_rank and (node, value) not in self.asked:
            self.asked.add((node, value))
            self.create_node("call_function", expect, (node, value), {})
        return cast(float, value)

    def _leaves(self, node: fx.Node) -> list[object]:
        """What an operation on numbers is given: types and devices of tensors are those of the weights, too."""
        given = fx.node.map_arg(node.args, self.values.__getitem__)  # type: ignore[arg-type]
        return list(given) if node.target in ARITHMETIC else []

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self.values[obj.node]
        return bool(self.known(obj.node, value if isinstance(value, Tensor) else bool(value)))

    def iter(self, obj: fx.Proxy) -> Iterator[object]:
        return (obj[place] for place in range(len(obj)))  # type: ignore[index]

    def keys(self, obj: fx.Proxy) -> object:  # type: ignore[override]
        return self.values[obj.node].keys()  # type: ignore[attr-defined]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return self.is_leaf(m)

    def create_args_for_root(
        self,
        root_fn: Callable[..., object],
        is_module: bool,  # noqa: ARG002
        concrete_args: object = None,  # noqa: ARG002
    ) -> tuple[Callable[..., object], list[object]]:
        return root_fn, [self.root, self.create_proxy("placeholder", "images", (), {})]

    def create_proxy(
        self,
        kind: str,
        target: fx.node.Target,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *more: object,
        **named: object,
    ) -> fx.Proxy:
        is_of_others = isinstance(target, FunctionType) and target.__module__.split(".")[0] not in (
            "torch",
            "basisprune",
        )
        if self.is_deep and is_of_others:  # fx was asked not to look into it
            return cast("Callable[..., fx.Proxy]", target)(*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *more, **named)  # type: ignore[arg-type]

    def create_arg(self, a: object) -> fx.node.Argument:
        # By its type, because it may call itself a tensor.
        return cast(fx.Proxy, a).node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        found = _Valued(node, self)
        found.fx_value = self.values[node]
        return found

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return forward(*args, **kwargs) if self.is_running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        return attr_val if self.is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *given: object, **named: object) -> fx.Node:
        node = super().create_node(*given, **named)  # type: ignore[arg-type]
        self.is_running = True
        try:
            self.values[node] = self._value(node)
        finally:
            self.is_running = False
        return node

    def _value(self, node: fx.Node) -> object:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)  # type: ignore[arg-type]
        if not isinstance(node.target, str):
            return node.target(*args, **kwargs)
        match node.op:
            case "placeholder":
                return self.example
            case "get_attr":
                *above, leaf = node.target.split(".")
                home = module_at(self.root, above)
                return {**vars(home), **home._buffers, **home._parameters}[leaf]  # fx keeps constants as attributes
            case "call_module":
                return module_at(self.root, node.target.split("."))(*args, **kwargs)
            case "call_method":
                return methodcaller(node.target, *args[1:], **kwargs)(args[0])
        return None


def trace(name: str, model: TransferModel | KeptModel) -> FoldedModel:
    """Return what the model called `name` does, in eval mode, as a graph of its parts, which are shared.

    A backbone's blocks stay modules. Whether the graph does the same must be seen by comparing the two. Raises
    LayerError for code that cannot be traced.
    """
    inner = model.network if isinstance(model, KeptModel) else model.backbone
    tracer = ValuedTracer(
        example_input(model, model.input_spec.shape),
        lambda part: not isinstance(part, (TransferModel, GlobalPool, KeptModel)),
    )
    try:
        with torch.no_grad():
            graph = tracer.trace(model)
    except Exception as error:
        raise LayerError(
            name,
            f"{type(inner).__name__}.forward_features cannot be traced ({error}); give the backbone a "
            "forward_features that only calls modules and torch functions",
        ) from error
    classes: Sequence[str] | None = getattr(model, "classes", None)
    pool = model.pool if isinstance(model, TransferModel) else None
    return graph_model(model, graph, about(model.input_spec, model.source, classes, pool))
