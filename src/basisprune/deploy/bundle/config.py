"""What config.json of a bundle may say, and the one place where it, and every name in a bundle, is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes that of `typing` from Python 3.12 on

from basisprune.errors import BundleError
from basisprune.types import BasisPlan, BlockPlan, FilterPlan, InputSpec

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_LARGEST_INPUT = 1 << 24  # numbers in one input, as in a colour image of 2,364 pixels each way
_MOST_STEPS = 50_000
_MANY_FAULTS = 1000
_LISTED = 3


def _checked_name(name: str) -> str:
    is_word = name.isidentifier() and not name.startswith("__") and not iskeyword(name)
    if not (name.isascii() and (is_word or name.isdecimal())):
        raise ValueError(f"{name[:80]!r} is not a name for a part of a network, which are such as conv1 or 0")
    return name


def _checked_module(name: str) -> str:
    for word in name.split("-"):  # torchvision has block1-0
        _checked_name(word)
    return name


def _checked_path(path: str) -> str:
    for name in path.split(".") if path else ():
        _checked_module(name)
    return path


def _checked_tensor(path: str) -> str:
    parent, _, leaf = path.rpartition(".")
    _checked_path(parent)
    _checked_name(leaf)
    return path


def _checked_alias(path: str) -> str:
    _checked_tensor(path.removeprefix("."))
    return path


Name = Annotated[str, AfterValidator(_checked_name)]
"""A parameter, buffer or attribute in its module: an identifier, or a number as containers have."""
ModuleName = Annotated[str, AfterValidator(_checked_module)]
"""A module in its parent: the same, or several of them with hyphens in between."""
DottedName = Annotated[str, AfterValidator(_checked_path)]
"""The names that lead from the network to a module of it; empty for the network itself."""
TensorName = Annotated[str, AfterValidator(_checked_tensor)]
"""The names that lead from the network to a tensor of it."""

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
    """How the network is built anew, but for its structure.

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
    aliases: dict[TensorName, Annotated[str, AfterValidator(_checked_alias)]] = field(default_factory=dict)


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


@dataclass(frozen=True)
class _BasisEntry:
    __pydantic_config__ = _STRICT
    kind: Literal["basis"]
    plan: BasisPlan


@dataclass(frozen=True)
class _FilterEntry:
    __pydantic_config__ = _STRICT
    kind: Literal["filters"]
    plan: FilterPlan


@dataclass(frozen=True)
class _BlockEntry:
    __pydantic_config__ = _STRICT
    kind: Literal["blocks"]
    plan: BlockPlan


Plan: TypeAlias = BasisPlan | FilterPlan | BlockPlan
KINDS: Mapping[type[Plan], str] = {BasisPlan: "basis", FilterPlan: "filters", BlockPlan: "blocks"}
_CONFIG = TypeAdapter(Config)
_Entry = Annotated[_BasisEntry | _FilterEntry | _BlockEntry, Field(discriminator="kind")]
_PLANS = TypeAdapter(list[_Entry])
_NAMES = TypeAdapter(list[TensorName])


def parse_config(content: bytes) -> Config:
    """The config in JSON text; raises BundleError that lists what it may not say."""
    try:
        return _CONFIG.validate_json(content)
    except ValidationError as error:
        raise BundleError(_told(error)) from error


def parse_plans(content: bytes) -> tuple[Plan, ...]:
    """The plans in JSON text; raises BundleError that lists what is none."""
    try:
        return tuple(entry.plan for entry in _PLANS.validate_json(content, strict=True))
    except ValidationError as error:
        raise BundleError(_told(error)) from error


def check_names(names: Iterable[str]) -> None:
    """Raises BundleError unless all are dotted names of parts of a network."""
    try:
        _NAMES.validate_python(list(names))
    except ValidationError as error:
        raise BundleError(_told(error)) from error


def _told(error: ValidationError) -> str:
    """What is wrong, in one line; what the file calls things is shown as far as it can be printed."""
    if (count := error.error_count()) > _MANY_FAULTS:  # each would take a kilobyte of memory
        return f"does not make sense: {count:,} faults"
    found = error.errors(include_url=False, include_input=False, include_context=False)
    listed = [
        f"{'.'.join(_shown(step) for step in each['loc'][:12])}: {each['msg'].removeprefix('Value error, ')}"
        for each in found[:_LISTED]
    ]
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"does not make sense: {'; '.join(listed)}{more}"


def _shown(step: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(step)[:60])
