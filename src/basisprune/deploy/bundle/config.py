"""What config.json of a bundle may say, and the one place where it, and every name in a bundle, is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from keyword import kwlist
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeGuard, TypeVar

import torch
from pydantic import AfterValidator, ConfigDict, Field, JsonValue
from torch import fx
from typing_extensions import TypedDict  # pydantic takes that of `typing` from Python 3.12 on

from basisprune.errors import BundleError, LayerError
from basisprune.types import BasisPlan, BlockPlan, FilterPlan, InputSpec, read_json

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_LARGEST_INPUT = 1 << 24  # numbers in one input, as in a colour image of 2,364 pixels each way
_MOST_STEPS = 50_000
_NOT_FINITE = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
_DTYPES = {
    each: getattr(torch, each) for each in ["bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
}
HINT = "pass factory='package.module:function' (or a timm name), which builds the backbone"


def _named(grammar: str) -> AfterValidator:
    pattern = re.compile(grammar, re.ASCII)

    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a name for a part of a network, which are such as conv1 or 0")
        return name

    return AfterValidator(check)


_WORD = rf"(?:(?!__|(?:{'|'.join(kwlist)})\b)[A-Za-z_]\w*|[0-9]+)"
_MODULE = rf"{_WORD}(?:-{_WORD})*"  # torchvision has block1-0
_TENSOR = rf"(?:{_MODULE}\.)*{_WORD}"
Name = Annotated[str, _named(_WORD)]
"""A parameter, buffer or attribute in its module: an identifier, or a number as containers have."""
ModuleName = Annotated[str, _named(_MODULE)]
"""A module in its parent: the same, or several of them with hyphens in between."""
DottedName = Annotated[str, _named(rf"(?:{_MODULE}(?:\.{_MODULE})*)?")]
"""The path from the network to a module in it; empty for the network itself."""
TensorName = Annotated[str, _named(_TENSOR)]
"""The path from the network to a tensor in it."""

Node = TypedDict(
    "Node",
    {
        "class": str,
        "args": dict[Name, JsonValue],
        "take": DottedName,
        "same": DottedName,
        "answers": ModuleName,
        "attributes": dict[Name, JsonValue],
        "parameters": dict[Name, bool],
        "buffers": dict[Name, tuple[bool, bool]],
        "order": list[ModuleName],
        "children": dict[ModuleName, "Node | None"],
    },
    total=False,
)
"""One module: `class` and `args`, or `take` (a module of the fresh network), or `same` (one met before), if it
is not the fresh network's module of that name; and the `attributes`, `parameters`, `buffers`, `order` of
children and `children` that differ from there. `answers` names the child whose attributes a container has too."""
Node.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]


class Step(TypedDict):
    """One operation of a graph: `op` on what the numbers in `args` and `kwargs` refer to, as torch.fx has them."""

    op: Literal["placeholder", "get_attr", "call_module", "call_function", "call_method", "output"]
    target: DottedName
    args: list[JsonValue]
    kwargs: dict[Name, JsonValue]


Step.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Architecture:
    """How the network is rebuilt, except for its structure.

    `backbone` is the timm name or `"package.module:factory"` that it came from, None for a module that was handed over.
    It is built first, unless the network stands `alone`, its structure saying all. `insert_norm` is None for a network
    that is not from `transfer_model`. `traced` says that it was folded into a graph, and `graph` is that graph down to
    plain layers, for one that stands alone.
    """

    __pydantic_config__ = _STRICT
    backbone: str | None
    insert_norm: bool | None
    traced: bool = False
    alone: bool = False
    graph: Annotated[list[Step], Field(max_length=_MOST_STEPS)] | None = None

    @property
    def builder(self) -> str | None:
        """The timm name or the function that must be called to build it; None where that is not needed."""
        return None if self.alone else self.backbone

    @property
    def is_timm(self) -> bool:
        """Whether nothing but timm or torchvision is needed to build the backbone."""
        return self.backbone is not None and (":" not in self.backbone or self.backbone.startswith("torchvision:"))


@dataclass(frozen=True)
class TensorFacts:
    """What safetensors does not keep: other names of tensors, layouts, and which are frozen."""

    __pydantic_config__ = _STRICT
    shared: dict[TensorName, TensorName] = field(default_factory=dict)
    frozen: list[TensorName] | Literal["all"] = field(default_factory=list)
    channels_last: list[TensorName] = field(default_factory=list)
    aliases: dict[TensorName, Annotated[str, _named(rf"\.?{_TENSOR}")]] = field(default_factory=dict)


@dataclass(frozen=True)
class Input:
    """The shape of one input, and how images become one, where that is known."""

    __pydantic_config__ = _STRICT
    shape: tuple[int, ...]
    spec: InputSpec | None = None

    def __post_init__(self) -> None:
        for shape in (self.shape, self.shape if self.spec is None else self.spec.shape):
            if not shape or min(shape) < 1 or math.prod(shape) > _LARGEST_INPUT:
                raise ValueError(f"{shape} is not a shape of an input with 1 to {_LARGEST_INPUT:,} numbers")
        if self.spec is not None and self.spec.shape != self.shape:
            raise ValueError(f"shape {self.shape} is not that of its spec, {self.spec.shape}; both must be the same")


@dataclass(frozen=True)
class Fingerprint:
    """What the network outputs for one fixed input: its first values, and the norm of them all."""

    __pydantic_config__ = _STRICT
    shape: list[int]
    values: list[float]
    norm: Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Config:
    """All that config.json says of the network."""

    __pydantic_config__ = _STRICT
    architecture: Architecture
    structure: Node
    tensors: TensorFacts
    input: Input
    classes: list[str] | None
    metrics: dict[str, JsonValue]
    versions: dict[str, str]
    fingerprint: Fingerprint


_Kind = TypeVar("_Kind")
_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class _Entry(Generic[_Kind, _Plan]):
    __pydantic_config__ = _STRICT
    kind: _Kind
    plan: _Plan


Plan: TypeAlias = BasisPlan | FilterPlan | BlockPlan
KINDS: Mapping[type[Plan], str] = {BasisPlan: "basis", FilterPlan: "filters", BlockPlan: "blocks"}
_AnyEntry: TypeAlias = (
    _Entry[Literal["basis"], BasisPlan] | _Entry[Literal["filters"], FilterPlan] | _Entry[Literal["blocks"], BlockPlan]
)
_PLANS = list[Annotated[_AnyEntry, Field(discriminator="kind")]]
_NONSENSE = "does not make sense"


def parse_config(content: bytes) -> Config:
    """Read config.json; raises BundleError that lists what it may not say."""
    return read_json(Config, content, BundleError, _NONSENSE)


def parse_plans(content: bytes) -> tuple[Plan, ...]:
    """Read plans.json; raises BundleError that lists what is no plan."""
    return tuple(entry.plan for entry in read_json(_PLANS, content, BundleError, _NONSENSE))


def check_names(names: Iterable[str]) -> None:
    """Raise BundleError unless all are dotted names of parts of a network."""
    read_json(list[TensorName], json.dumps(list(names)), BundleError, _NONSENSE)


# ------------------------------------------------------------------------- attributes and arguments as JSON

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | list[Plain] | None"
"""What an attribute must be to go into a file."""


def is_plain(value: object) -> TypeGuard[Plain]:
    """Whether the value can go into a file as an attribute."""
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def encode(value: object, numbers: Mapping[fx.Node, int] | None = None) -> JsonValue:
    """The value as JSON that tells tuples from lists; with the `numbers` of the steps of a graph, an argument of one.

    Raises LayerError for what a file cannot hold.

    >>> encode((1, [math.inf]))
    {'tuple': [1, [{'float': 'inf'}]]}
    """
    inner = partial(encode, numbers=numbers)
    if isinstance(value, (tuple, list)):
        items = list(map(inner, value))
        return items if isinstance(value, list) else {"tuple": items}
    if is_plain(value):
        is_odd = isinstance(value, float) and not math.isfinite(value)
        return {"float": repr(value)} if is_odd else value  # type: ignore[return-value]
    if numbers is not None:
        if isinstance(value, fx.Node):
            return {"step": numbers[value]}
        if isinstance(value, slice):
            return {"slice": [inner(value.start), inner(value.stop), inner(value.step)]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": [[key, inner(item)] for key, item in value.items()]}
        if value is ...:
            return {"ellipsis": True}
        if isinstance(value, torch.dtype) and value in _DTYPES.values():
            return {"dtype": str(value).removeprefix("torch.")}
    raise LayerError("backbone", f"is given a {type(value).__name__}, which a bundle cannot hold; {HINT}")


def decode(value: JsonValue, nodes: Sequence[fx.Node] | None = None) -> Any:
    """The value that `encode` was given; raises BundleError for what it does not make.

    >>> decode(encode((1, [math.inf])))
    (1, [inf])
    """
    inner = partial(decode, nodes=nodes)
    if isinstance(value, list):
        return list(map(inner, value))
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None) if len(value) == 1 else None:
        case "tuple", [*items]:
            return tuple(map(inner, items))
        case "float", str(text) if text in _NOT_FINITE:
            return _NOT_FINITE[text]
        case "step", int(number) if nodes is not None and 0 <= number < len(nodes):
            return nodes[number]
        case "slice", [start, stop, step] if nodes is not None:
            return slice(inner(start), inner(stop), inner(step))
        case "dict", [*pairs] if nodes is not None:
            return dict(_pair(pair, nodes) for pair in pairs)
        case "ellipsis", True if nodes is not None:
            return ...
        case "dtype", str(text) if nodes is not None and text in _DTYPES:
            return _DTYPES[text]
    raise BundleError(f"{str(value)[:80]} is not a value that a bundle may hold")


def _pair(pair: JsonValue, nodes: Sequence[fx.Node]) -> tuple[str, object]:
    match pair:
        case [str(key), item]:
            return key, decode(item, nodes)
    raise BundleError("graph: a dict in it has an entry that is not a name and a value")
