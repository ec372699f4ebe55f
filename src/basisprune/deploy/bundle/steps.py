"""A network as a list of operations on plain layers, and back: no architecture has to be built for it.

A step of a file names a module, parameter or buffer that is in the structure, or an entry of the tables in
`deploy/allowed.py`; nothing else can be said.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from itertools import count

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from basisprune.deploy.allowed import (
    ARITHMETIC,
    CLASS_NAMES,
    FUNCTION_NAMES,
    FUNCTIONS,
    METHODS,
    READINGS,
    odd_keywords,
)
from basisprune.deploy.bundle.config import HINT, Step, decode, encode
from basisprune.deploy.bundle.structure import is_described
from basisprune.deploy.graphs import FoldedModel, about, graph_model
from basisprune.deploy.tracing import ValuedTracer
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.surgery import module_at, tensor_at
from basisprune.types import InputSpec

_HIGHEST_DEGREE, _DEEPEST, _LARGEST_FORMULA, _LARGEST_IN_ALL = 32, 100, 1_000, 100_000
_MOST_SIDES = 6
_PRODUCTS = (operator.mul, operator.imul, operator.matmul)
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
    """Return the network in eval mode as a graph of copies of its layers; `example` is one input that it runs on.

    Whether the graph does what the network does must be seen by comparing them. Raises LayerError for a network that
    cannot be traced.
    """
    try:
        root = copy.deepcopy(model).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            graph = ValuedTracer(example.clone(), _is_leaf, is_deep=True).trace(root)
            _name_dropouts(root, graph)
    except Exception as error:
        raise LayerError(
            "", f"{type(model).__name__} cannot be traced down to plain layers ({error}); {HINT}"
        ) from error
    known = model.about if isinstance(model, FoldedModel) else about(spec, None, getattr(model, "classes", None))
    return graph_model(root, graph, known).eval()


def _is_leaf(module: nn.Module) -> bool:
    named = type(module) in CLASS_NAMES and type(module) is not nn.Module
    return named and not isinstance(module, _CONTAINERS) and is_described(module)


def _name_dropouts(root: nn.Module, graph: fx.Graph) -> None:
    """Write dropout by a function, which the mode switches, as a layer, so that the graph has both modes too."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _DROPOUTS:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not given["training"]:
                taken = {*vars(root), *root._modules, *root._parameters, *root._buffers}
                name = next(name for number in count() if (name := f"dropout_{number}") not in taken)
                root.add_module(name, _DROPOUTS[node.target](given["p"], given["inplace"]).eval())
                node.op, node.target, node.args, node.kwargs = "call_module", name, (given["input"],), {}


def plain_steps(model: FoldedModel) -> tuple[nn.Module, list[Step]]:
    """Return the plain layers of a graph, which are shared, and the operations that it does with them.

    Raises LayerError if there is something in it that a file cannot hold.
    """
    numbers = {node: number for number, node in enumerate(model.graph.nodes)}
    steps = []
    for node in numbers:
        target = node.target if isinstance(node.target, str) else FUNCTION_NAMES.get(node.target, "")
        if node.target is getattr and len(node.args) == 2 and node.args[1] in tuple(READINGS):
            target = "getattr"
        calls = node.op in ("call_function", "call_method")
        if not target or (node.op == "call_method" and target not in METHODS) or (calls and odd_keywords(node.kwargs)):
            raise LayerError("backbone", f"calls {node.target}, which a bundle cannot name; {HINT}")
        args = [encode(value, numbers) for value in node.args]
        kwargs = {name: encode(value, numbers) for name, value in node.kwargs.items()}
        steps.append(Step(op=node.op, target=target, args=args, kwargs=kwargs))
    parts = nn.Module()
    parts._modules, parts._parameters, parts._buffers = model._modules, model._parameters, model._buffers
    parts._non_persistent_buffers_set = model._non_persistent_buffers_set
    return parts.eval(), steps


def from_steps(steps: list[Step], parts: nn.Module) -> fx.Graph:
    """Return the graph of these operations on these parts; raises BundleError for one that a file may not name."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for number, step in enumerate(steps):
        is_last, is_first = number == len(steps) - 1, number == 0
        if (step["op"] == "output") is not is_last or (step["op"] == "placeholder") is not is_first:
            raise BundleError(f"graph: step {number} is {step['op']}; one input comes first and one output last")
        args = tuple(decode(value, nodes) for value in step["args"])
        kwargs = {name: decode(value, nodes) for name, value in step["kwargs"].items()}
        try:
            target = _target(step, args, parts)
        except (LayerError, BundleError) as error:
            raise BundleError(f"graph: step {number} ({step['op']}): {error}") from error
        nodes.append(graph.create_node(step["op"], target, args, kwargs, name=f"step{number}"))
    _refuse_large_formulas(nodes)
    return graph


def _target(step: Step, args: tuple[object, ...], parts: nn.Module) -> str | Callable[..., object]:
    """What the step names, which must be there or in a table."""
    name = step["target"]
    match step["op"]:
        case "placeholder":
            return "x"  # it becomes a name in code that fx writes, and what the file calls it does not matter
        case "call_module":
            module_at(parts, name.split("."))
        case "get_attr":
            tensor_at(parts, name.split("."))
        case "call_function" if name == "getattr":
            if len(args) != 2 or args[1] not in tuple(READINGS) or step["kwargs"]:
                raise BundleError(f"getattr is not a function that a bundle may call, but for {', '.join(READINGS)}")
            return getattr  # stands for the reading, which is what runs
        case "call_function":
            _refuse_unlisted(name, "function", FUNCTIONS, step)
            return FUNCTIONS[name]
        case "call_method":
            _refuse_unlisted(name, "method", METHODS, step)
    return name


def _refuse_unlisted(name: str, what: str, allowed: Collection[str], step: Step) -> None:
    if name not in allowed:
        raise BundleError(f"{name} is not a {what} that a bundle may call; allowed are {', '.join(sorted(allowed))}")
    if odd := odd_keywords(step["kwargs"]):
        raise BundleError(f"{name} is given {odd[0]}, which is not an argument that a bundle may pass")


def _refuse_large_formulas(nodes: Sequence[fx.Node]) -> None:
    """Raise BundleError for numbers that become huge formulas where an exporter computes them for every input size.

    Of each number that is computed from sizes of the input, the degree of that polynomial, its depth, and its size with
    every argument written out are followed.
    """
    formulas: dict[fx.Node, tuple[int, int, int]] = {}
    total = 0
    for number, node in enumerate(nodes):
        if node.op == "call_module" and any(each in formulas for each in node.all_input_nodes):
            raise BundleError(f"graph: step {number} gives a layer a number")
        given = [formulas.get(each) for each in node.args if isinstance(each, fx.Node)]
        known = [each for each in given if each is not None]
        reads = node.target is getattr and node.args[1:] in (("shape",), ("ndim",))
        if reads or (node.op == "call_method" and node.target in ("size", "dim")):
            degree, depth, size = 1, 0, 1
        elif node.op == "call_method" and node.target == "numel":
            degree, depth, size = _MOST_SIDES, 0, _MOST_SIDES
        elif node.target is operator.getitem and given and given[0] is not None:
            degree, depth, size = given[0]
        elif node.target in ARITHMETIC and known and len(known) == len(given):
            degrees = [each[0] for each in known]
            degree = sum(degrees) if node.target in _PRODUCTS else max(degrees)
            depth = 1 + max(each[1] for each in known)
            size = 1 + sum(each[2] for each in known)
        else:
            continue
        total += size
        if degree > _HIGHEST_DEGREE or depth > _DEEPEST or size > _LARGEST_FORMULA or total > _LARGEST_IN_ALL:
            raise BundleError(f"graph: step {number} computes a number that is too large a formula of the input's size")
        formulas[node] = degree, depth, size
