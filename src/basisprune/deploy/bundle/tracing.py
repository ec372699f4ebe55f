"""A network of any class -> a graph of the plain layers that a file can name."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from basisprune.deploy.bundle.graph import HINT
from basisprune.deploy.bundle.layers import NAMES
from basisprune.deploy.bundle.structure import is_described
from basisprune.deploy.folded import FoldedModel, about, folded
from basisprune.deploy.tracing import Arguments, Options, ValuedTracer
from basisprune.errors import LayerError
from basisprune.types import InputSpec

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
            graph = _PlainTracer(example.clone()).trace(root)
    except Exception as error:
        raise LayerError(
            "", f"{type(model).__name__} cannot be traced down to plain layers ({error}); {HINT}"
        ) from error
    if isinstance(model, FoldedModel):
        return folded(root, graph, model.about).eval()
    return folded(root, graph, about(spec, None, getattr(model, "classes", None))).eval()


class _PlainTracer(ValuedTracer):
    """Looks into every module that a file cannot name."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the module stays a module."""
        named = type(m) in NAMES and type(m) is not nn.Module
        return named and not isinstance(m, _CONTAINERS) and is_described(m)

    def create_node(
        self,
        kind: str,
        target: fx.node.Target,
        args: Arguments,
        kwargs: Options,
        name: str | None = None,
        type_expr: object = None,
    ) -> fx.Node:
        """A node; dropout by a function that the mode switches is a layer, so that the graph has both modes too."""
        layer = _dropout_layer(target, args, kwargs)
        if layer is not None:
            target = self.get_fresh_qualname("dropout")
            self.root.add_module(target, layer)
            kind, args, kwargs = "call_module", args[:1] or (kwargs["input"],), {}
        return super().create_node(kind, target, args, kwargs, name, type_expr)


def _dropout_layer(target: fx.node.Target, args: Arguments, kwargs: Options) -> nn.Module | None:
    """The layer that does in either mode what a dropout function does in eval mode; None for all else."""
    if isinstance(target, str) or target not in _DROPOUTS:
        return None
    given = inspect.signature(target).bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    return None if named["training"] else _DROPOUTS[target](named["p"], named["inplace"]).eval()
