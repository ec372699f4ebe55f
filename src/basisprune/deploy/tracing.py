"""Python code -> a graph of what it does with tensors, traced with the values of one run at hand.

torch.fx calls a network's code with stand-ins, which code that asks for types takes for something else. Those here have
the type of what they stand for. What else code may depend on no graph knows, so that whoever traces a network compares
the graph with it (`comparing.difference`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute

Forward: TypeAlias = Callable[..., object]


class _Valued(fx.Proxy):
    """Stands for a value of the run, and answers as one of its type: code may ask whether it is a tensor."""

    fx_value: object = None
    _is_param = False  # what isinstance(x, nn.Parameter) reads

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The type of the value."""
        return type(self.fx_value)


class ValuedTracer(fx.Tracer):
    """Runs the network on one input while it traces it; what else its forward takes is left as it is by default."""

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.example = example
        self.is_running = False  # one operation, to see what it gives

    def create_args_for_root(
        self, root_fn: Forward, is_module: bool, concrete_args: object = None
    ) -> tuple[Forward, list[object]]:
        """The network's forward, and what it is called with."""
        return root_fn, [self.root, self.create_proxy("placeholder", "images", (), {})]

    def create_arg(self, a: object) -> fx.node.Argument:
        """The value as an argument of a node."""
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the node's value."""
        return _Valued(node, self)

    def call_module(
        self, m: nn.Module, forward: Forward, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """What the module gives: a value while an operation runs, and a node otherwise."""
        return forward(*args, **kwargs) if self.is_running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]) -> object:
        """A parameter of a module: itself while an operation runs, and a node otherwise."""
        return attr_val if self.is_running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(
        self, kind: str, target: fx.node.Target, args: tuple[object, ...], kwargs: dict[str, object], **more: object
    ) -> fx.Proxy:
        """A node, and its value in this run."""
        if target is torch._assert:
            return args[0]  # what it would refuse, the network refuses
        proxy = super().create_proxy(kind, target, args, kwargs, **more)
        self.is_running = True
        try:
            proxy.fx_value = self._value(kind, target, _known(args), _known(kwargs))
        finally:
            self.is_running = False
        return proxy

    def _value(self, kind: str, target: fx.node.Target, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if kind == "placeholder":
            return self.example
        if kind == "get_attr":
            return self.root.get_parameter(target)
        if kind == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        return getattr(args[0], target)(*args[1:], **kwargs) if kind == "call_method" else target(*args, **kwargs)


def _known(value: object) -> object:
    """The argument with the values of this run in it."""
    kind = type(value)
    if isinstance(value, _Valued):
        return value.fx_value
    if issubclass(kind, Attribute):
        return getattr(_known(value.root), value.attr)
    if kind in (tuple, list):
        return kind(map(_known, value))
    if kind is dict:
        return {key: _known(item) for key, item in value.items()}
    if kind is slice:
        return slice(_known(value.start), _known(value.stop), _known(value.step))
    return value
