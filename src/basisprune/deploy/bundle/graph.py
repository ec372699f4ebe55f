"""A folded network as a list of operations on plain layers, and back: no architecture has to be built for it.

A step of a file names a module, parameter or buffer that is in the structure, or an entry of the tables in
`deploy/operations.py`; nothing else can be said.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from torch import fx, nn

from basisprune.deploy.bundle.config import Step
from basisprune.deploy.bundle.values import decode, encode, is_plain
from basisprune.deploy.folded import FoldedModel
from basisprune.deploy.operations import ARITHMETIC, FUNCTIONS, METHODS, NAMES, READINGS, odd_keywords
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.surgery import module_at, tensor_at

_HIGHEST_DEGREE, _DEEPEST = 32, 100
_PRODUCTS = (operator.mul, operator.imul, operator.matmul)
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


def from_steps(steps: list[Step], parts: nn.Module) -> fx.Graph:
    """The graph of these operations on these parts; raises BundleError for one that a file may not name."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for number, step in enumerate(steps):
        is_last, is_first = number == len(steps) - 1, number == 0
        if (step["op"] == "output") is not is_last or (step["op"] == "placeholder") is not is_first:
            raise BundleError(f"graph: step {number} is {step['op']}; one input comes first and one output last")
        args = tuple(_read(value, nodes) for value in step["args"])
        kwargs = {name: _read(value, nodes) for name, value in step["kwargs"].items()}
        try:
            target = _target(step, args, parts)
        except LayerError as error:
            raise BundleError(
                f"graph: step {number} ({step['op']}): {error}; "
                "it may name a module, parameter or buffer of the structure"
            ) from error
        except BundleError as error:
            raise BundleError(f"graph: step {number}: {error}") from error
        nodes.append(graph.create_node(step["op"], target, args, kwargs, name=f"step{number}"))  # type: ignore[arg-type]
    _refuse_large_formulas(nodes)
    return graph


@dataclass(frozen=True)
class _Formula:
    """A number that is computed from sizes of the input: the degree of that polynomial, and how deep it is nested."""

    degree: int = 1
    depth: int = 0


def _refuse_large_formulas(nodes: Sequence[fx.Node]) -> None:
    """Raise BundleError for numbers that become huge formulas where an exporter computes them for every input size."""
    formulas: dict[fx.Node, _Formula] = {}
    for number, node in enumerate(nodes):
        given = [formulas[each] for each in node.all_input_nodes if each in formulas]
        if node.op == "call_module" and given:
            raise BundleError(f"graph: step {number} gives a layer a number")
        found = _formula(node, [formulas.get(each) for each in node.args if isinstance(each, fx.Node)])
        if found is None:
            continue
        if found.degree > _HIGHEST_DEGREE or found.depth > _DEEPEST:
            raise BundleError(f"graph: step {number} computes a number that is too large a formula of the input's size")
        formulas[node] = found


def _formula(node: fx.Node, given: Sequence[_Formula | None]) -> _Formula | None:
    """The number that the node gives; None if it gives something else."""
    reads = node.target is getattr and node.args[1:] in (("shape",), ("ndim",))
    if reads or (node.op == "call_method" and node.target in ("size", "dim")):
        return _Formula()
    if node.target is operator.getitem:
        return given[0]
    known = [each for each in given if each is not None]
    if node.target not in ARITHMETIC or not known or len(known) < len(given):
        return None
    degrees, depth = [each.degree for each in known], 1 + max(each.depth for each in known)
    return _Formula(sum(degrees) if node.target in _PRODUCTS else max(degrees), depth)


def _target(step: Step, args: tuple[object, ...], parts: nn.Module) -> str | Callable[..., object]:
    """What the step names, which must be there or in a table."""
    name, op = step["target"], step["op"]
    if op == "placeholder":
        return "x"  # it becomes a name in code that fx writes, and what the file calls it does not matter
    if op == "call_module":
        module_at(parts, name.split("."))
    elif op == "get_attr":
        tensor_at(parts, name.split("."))
    elif op == "call_function" and name == "getattr":
        if len(args) != 2 or args[1] not in tuple(READINGS) or step["kwargs"]:
            raise BundleError(f"getattr is not a function that a bundle may call, but for {', '.join(READINGS)}")
        return getattr  # stands for the reading, which is what runs
    elif op == "call_function":
        _refuse_unlisted(name, "function", FUNCTIONS, step)
        return FUNCTIONS[name]
    elif op == "call_method":
        _refuse_unlisted(name, "method", METHODS, step)
    return name


def _refuse_unlisted(name: str, what: str, allowed: Collection[str], step: Step) -> None:
    if name not in allowed:
        raise BundleError(f"{name} is not a {what} that a bundle may call; allowed are {', '.join(sorted(allowed))}")
    if odd := odd_keywords(step["kwargs"]):
        raise BundleError(f"{name} is given {odd[0]}, which is not an argument that a bundle may pass")


def _step(node: fx.Node, numbers: dict[fx.Node, int]) -> Step:
    target = node.target if isinstance(node.target, str) else _function_name(node)
    allowed = node.op != "call_method" or target in METHODS
    if node.op in ("call_function", "call_method"):
        allowed &= not odd_keywords(node.kwargs)
    if not target or not allowed:
        raise LayerError("backbone", f"calls {node.target}, which a bundle cannot name; {HINT}")
    return Step(
        op=node.op,  # type: ignore[typeddict-item]
        target=target,
        args=[_written(value, numbers) for value in node.args],
        kwargs={name: _written(value, numbers) for name, value in node.kwargs.items()},
    )


def _function_name(node: fx.Node) -> str:
    """What a file calls the function of the node; empty if nothing."""
    if node.target is getattr:
        return "getattr" if len(node.args) == 2 and node.args[1] in tuple(READINGS) else ""
    return NAMES.get(node.target, "") if callable(node.target) else ""


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
