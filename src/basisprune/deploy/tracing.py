"""Python code -> a graph of what it does with tensors, traced with the values of one run at hand.

torch.fx calls a network's code with stand-ins, which code that asks for types takes for something else. Those here have
the type of what they stand for. What else code may depend on no graph knows, so that whoever traces a network compares
the graph with it (`comparing.difference`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, fx, nn

from basisprune.torchkit.surgery import module_at

Forward: TypeAlias = Callable[..., object]
Arguments: TypeAlias = tuple[fx.node.Argument, ...]
Options: TypeAlias = dict[str, fx.node.Argument]


class _Valued(fx.Proxy):
    """Stands for a value of the run, and answers as one of its type: code may ask whether it is a tensor."""

    fx_value: object = None
    _is_param = False  # what isinstance(x, nn.Parameter) reads

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the value."""
        return type(self.fx_value)


class ValuedTracer(fx.Tracer):
    """Runs the network on one input while it traces it; what else its forward takes is left as it is by default."""

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.example = example
        self.values: dict[fx.Node, object] = {}
        self.is_running = False  # one operation, to see what it gives

    def trace(self, root: nn.Module | Forward, concrete_args: dict[str, object] | None = None) -> fx.Graph:
        """The graph, without assertions: what they would refuse, the network refuses."""
        graph = super().trace(root, concrete_args)
        for node in [node for node in graph.nodes if node.target is torch._assert]:
            graph.erase_node(node)
        self.values.clear()
        return graph

    def create_args_for_root(
        self,
        root_fn: Forward,
        is_module: bool,  # noqa: ARG002
        concrete_args: object = None,  # noqa: ARG002
    ) -> tuple[Forward, list[object]]:
        """The network's forward, and what it is called with."""
        return root_fn, [self.root, self.create_proxy("placeholder", "images", (), {})]

    def create_arg(self, a: object) -> fx.node.Argument:
        """The value as an argument of a node."""
        # By its type, because it may call itself a tensor.
        return cast(fx.Proxy, a).node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the node's value."""
        found = _Valued(node, self)
        found.fx_value = self.values[node]
        return found

    def call_module(
        self, m: nn.Module, forward: Forward, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """What the module gives: a value while an operation runs, and a node otherwise."""
        return forward(*args, **kwargs) if self.is_running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        """A parameter of a module: itself while an operation runs, and a node otherwise."""
        return attr_val if self.is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(
        self,
        kind: str,
        target: fx.node.Target,
        args: Arguments,
        kwargs: Options,
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        """A node, and its value in this run."""
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
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
                return getattr(args[0], node.target)(*args[1:], **kwargs)
        return None
