"""A folded network as a list of operations on plain layers, and back: no architecture has to be built for it.

A file names an operation only out of the lists below; none of them reads, writes or calls anything but tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from pydantic import JsonValue
from torch import Tensor, fx, nn
from torch.nn import functional as F

from basisprune.deploy.bundle.config import Step
from basisprune.deploy.bundle.values import decode, encode, is_plain
from basisprune.deploy.folded import FoldedModel
from basisprune.errors import BundleError, LayerError

_OF_TENSORS = (
    *("abs", "add", "cat", "chunk", "clamp", "concat", "div", "exp", "flatten", "log", "matmul", "max", "maximum"),
    *("mean", "min", "minimum", "movedim", "mul", "neg", "permute", "pow", "reciprocal", "relu", "reshape", "roll"),
    *("rsqrt", "sigmoid", "softmax", "split", "sqrt", "square", "squeeze", "stack", "std", "sub", "sum", "tanh"),
    *("transpose", "unbind", "unsqueeze", "var", "cos", "cumsum", "einsum", "sin", "swapaxes", "unflatten"),
)
_OF_LAYERS = (
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool1d"),
    *("avg_pool2d", "avg_pool3d", "dropout", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh"),
    *("interpolate", "layer_norm", "leaky_relu", "log_softmax", "max_pool1d", "max_pool2d", "max_pool3d", "mish"),
    *("normalize", "pad", "pixel_shuffle", "pixel_unshuffle", "relu", "relu6", "scaled_dot_product_attention", "selu"),
    *("sigmoid", "silu", "softmax", "softplus", "tanh", "conv1d", "conv2d", "conv3d", "linear"),
)
_OF_NUMBERS = ("add", "eq", "floordiv", "getitem", "iadd", "imul", "matmul", "mod", "mul", "neg", "sub", "truediv")
_FUNCTIONS: dict[str, Callable[..., object]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TENSORS},
    **{f"functional.{name}": getattr(F, name) for name in _OF_LAYERS},
    **{f"operator.{name}": getattr(operator, name) for name in _OF_NUMBERS},
    "getattr": getattr,
}
_METHODS = frozenset(_OF_TENSORS) - {"cat", "concat", "einsum", "stack"} | {
    *("add_", "clamp_", "contiguous", "dim", "div_", "expand", "expand_as", "mul_", "relu_", "sigmoid_", "size"),
    *("reshape_as", "sub_", "t", "view", "view_as"),
}
_READABLE = (["shape"], ["ndim"], ["dtype"], ["device"])  # the attributes of a tensor that may be asked for
_NAMES = {function: name for name, function in reversed(_FUNCTIONS.items())}
_ARITHMETIC = frozenset(_FUNCTIONS[f"operator.{name}"] for name in _OF_NUMBERS if name != "getitem")
_LARGEST_NUMBER = 1 << 40
HINT = "pass factory='package.module:function' (or a timm name), which builds the backbone"


def plain_steps(model: FoldedModel) -> tuple[nn.Module, list[Step]]:
    """The plain layers of a graph, which are shared, and the operations that it does with them.

    Raises LayerError if there is something in it that a file cannot hold.
    """
    numbers = {node: number for number, node in enumerate(model.graph.nodes)}
    steps = [_step(node, numbers) for node in numbers]
    parts = nn.Module()
    parts._modules, parts._parameters, parts._buffers = model._modules, model._parameters, model._buffers
    parts._non_persistent_buffers_set = model._non_persistent_buffers_set
    return parts.eval(), steps


class _Careful(fx.Interpreter):
    """Runs a graph out of a file for the first time: sums and products are of tensors and small numbers only.

    Python itself sets no bounds to a list times a billion, or to a number squared forty times.
    """

    def call_function(
        self, target: fx.node.Target, args: tuple[fx.node.Argument, ...], kwargs: dict[str, object]
    ) -> object:
        """What the function gives."""
        if target in _ARITHMETIC and not all(isinstance(value, (Tensor, int, float)) for value in args):
            raise BundleError(f"graph: {_NAMES[target]} of something that is neither tensor nor number")
        result: object = super().call_function(target, args, kwargs)
        if isinstance(result, int) and abs(result) > _LARGEST_NUMBER:
            raise BundleError("graph: a number in it becomes too large")
        return result


def try_out(model: FoldedModel, images: Tensor) -> None:
    """Runs a network that `from_steps` made for the first time; raises BundleError if it does what it may not."""
    with torch.no_grad():
        careful = _Careful(model)
        careful.extra_traceback = False  # or it writes its own words into the message
        careful.run(images)


def from_steps(steps: list[Step]) -> fx.Graph:
    """The graph of these operations; raises BundleError for one that a file may not name."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for number, step in enumerate(steps):
        is_last, is_first = number == len(steps) - 1, number == 0
        if (step["op"] == "output") is not is_last or (step["op"] == "placeholder") is not is_first:
            raise BundleError(f"graph: step {number} is {step['op']}; one input comes first and one output last")
        args = tuple(_read(value, nodes) for value in step["args"])
        kwargs = {name: _read(value, nodes) for name, value in step["kwargs"].items()}
        target = _target(step, args)
        nodes.append(graph.create_node(step["op"], target, args, kwargs, name=f"step{number}"))  # type: ignore[arg-type]
    return graph


def _target(step: Step, args: tuple[object, ...]) -> str | Callable[..., object]:
    name = step["target"]
    if step["op"] == "call_function":
        function = _FUNCTIONS.get(name)
        if function is None or (function is getattr and list(args[1:]) not in _READABLE):
            raise BundleError(f"graph: {name} is not a function that a bundle may call")
        return function
    if step["op"] == "call_method" and name not in _METHODS:
        raise BundleError(f"graph: {name} is not a method that a bundle may call")
    return name


def _step(node: fx.Node, numbers: dict[fx.Node, int]) -> Step:
    target = node.target if isinstance(node.target, str) else _NAMES.get(node.target, "")
    allowed = node.op != "call_method" or target in _METHODS
    if not target or not allowed or (target == "getattr" and list(node.args[1:]) not in _READABLE):
        raise LayerError("backbone", f"calls {node.target}, which a bundle cannot name; {HINT}")
    return Step(
        op=node.op,  # type: ignore[typeddict-item]
        target=target,
        args=[_written(value, numbers) for value in node.args],
        kwargs={name: _written(value, numbers) for name, value in node.kwargs.items()},
    )


def _written(value: object, numbers: dict[fx.Node, int]) -> JsonValue:
    """The argument as JSON: `{"step": 3}` for what step 3 gave, and what `encode` makes of plain values."""
    if isinstance(value, fx.Node):
        return {"step": numbers[value]}
    if isinstance(value, (tuple, list)):
        items = [_written(item, numbers) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, slice):
        return {"slice": [_written(item, numbers) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _written(item, numbers)] for key, item in value.items()]}
    if value is ...:
        return {"ellipsis": True}
    if not is_plain(value):
        raise LayerError("backbone", f"is given a {type(value).__name__}, which a bundle cannot hold; {HINT}")
    return encode(value)


def _read(value: JsonValue, nodes: list[fx.Node]) -> object:
    match value:
        case [*items]:
            return [_read(item, nodes) for item in items]
        case {"step": int(number)} if 0 <= number < len(nodes):
            return nodes[number]
        case {"tuple": [*items]}:
            return tuple(_read(item, nodes) for item in items)
        case {"slice": [start, stop, step]}:
            return slice(*(_read(item, nodes) for item in (start, stop, step)))
        case {"dict": [*pairs]}:
            return dict(_pair(pair, nodes) for pair in pairs)
        case {"ellipsis": True}:
            return ...
    return decode(value)


def _pair(pair: JsonValue, nodes: list[fx.Node]) -> tuple[str, object]:
    match pair:
        case [str(key), item]:
            return key, _read(item, nodes)
    raise BundleError("graph: a dict in it has an entry that is not a name and a value")
