"""A network of any class -> a graph of layers that a file can name, traced with the values of one run at hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute
from torch.nn import functional as F

from basisprune.deploy.bundle.structure import class_name, describe
from basisprune.deploy.folded import FoldedModel, about, folded
from basisprune.errors import LayerError
from basisprune.types import InputSpec

_Forward: TypeAlias = Callable[..., object]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DROPOUTS: dict[object, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


def as_graph(model: nn.Module, example: Tensor, spec: InputSpec | None) -> FoldedModel:
    """The network in eval mode as a graph of copies of its layers; `example` is one input that it runs on.

    Whether the graph does what the network does must be seen by comparing them: Python code may depend on what no
    graph knows. Raises LayerError for a network that cannot be traced.
    """
    try:
        root = copy.deepcopy(model).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            graph = _Tracer(example.clone()).trace(root)
    except Exception as error:
        raise LayerError("", f"{type(model).__name__} cannot be traced down to plain layers ({error})") from error
    if isinstance(model, FoldedModel):
        return folded(root, graph, model.about).eval()
    return folded(root, graph, about(spec, None, getattr(model, "classes", None))).eval()


class _Valued(fx.Proxy):
    """Stands for a value of the run, and answers as one of its type: code may ask whether it is a tensor."""

    fx_value: object = None
    _is_param = False  # what isinstance(x, nn.Parameter) reads

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The type of the value."""
        return type(self.fx_value)


class _Tracer(fx.Tracer):
    """Looks into every module that a file cannot name, and runs the network on one input meanwhile.

    The network has one input; what else its forward takes is left as it is by default.
    """

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.example = example
        self.is_running = False  # one operation, to see what it gives

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the module stays a module."""
        name = class_name(type(m))
        if name is None or type(m) is nn.Module or isinstance(m, _CONTAINERS):
            return False
        try:
            describe(m)
        except LayerError:
            return False
        return True

    def create_args_for_root(
        self, root_fn: _Forward, is_module: bool, concrete_args: object = None
    ) -> tuple[_Forward, list[object]]:
        """The network's forward, and what it is called with."""
        return root_fn, [self.root, self.create_proxy("placeholder", "images", (), {})]

    def create_arg(self, a: object) -> fx.node.Argument:
        """The value as an argument of a node."""
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the node's value."""
        return _Valued(node, self)

    def call_module(
        self, m: nn.Module, forward: _Forward, args: tuple[object, ...], kwargs: dict[str, object]
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
        if target in _DROPOUTS and (layer := _dropout_layer(target, args, kwargs)) is not None:
            name = self.get_fresh_qualname("dropout")
            self.root.add_module(name, layer)
            kind, target, args, kwargs = "call_module", name, args[:1] or (kwargs["input"],), {}
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


def _dropout_layer(
    function: _Forward, args: tuple[object, ...], kwargs: dict[str, object]
) -> nn.Module | None:
    """The layer that does in either mode what the function does in eval mode; None if the function always drops."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    return None if named["training"] else _DROPOUTS[function](named["p"], named["inplace"]).eval()
