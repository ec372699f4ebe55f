"""The frozen values that travel between stages; all of them survive JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias, TypeVar

from basisprune.errors import BasisPruneError, CheckpointError, ConfigError, PlanError, faults_of_json
from basisprune.files import read_checked, write_checked

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

Option: TypeAlias = str | int | float | bool | None
"""What a plan says of how it was made."""

Part: TypeAlias = Literal["train", "val", "confirm", "test", "all"]
"""Which images of a run to judge by."""

Effort: TypeAlias = Literal["quick", "normal", "best"]
"""How long a search goes on."""
Augmentation: TypeAlias = Literal["auto", "none", "light", "strong"]
FloatType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Interpolation: TypeAlias = Literal["bilinear", "bicubic", "nearest"]
FrameworkName: TypeAlias = Literal[
    "baseline",
    "l1",
    "taylor",
    "hrank",
    "loss",
    "basis",
    "basis+taylor",
    "basis+hrank",
    "basis+l1",
    "basis+loss",
    "loss+basis",
]

VAL_FRACTION, TEST_FRACTION, CONFIRM_FRACTION = 0.2, 0.1, 0.5
"""The shares of the images held out for validation and for the test, where the data has no such splits."""

Value = TypeVar("Value", bound="JsonValue")
Read = TypeVar("Read")
_MOST_NAMES = 1_000_000  # in all mappings of one text
_WHITEST = 65535  # of 16 bits
_LARGEST_SIDE, _LARGEST_ROW = 1 << 14, 1 << 24  # pixels; numbers of a signal, or of several inputs in a row
_MOST = 1e6  # of a mean, or a deviation; beyond that, images are lost to rounding


def dotted(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each value in nested mappings under its dotted name; an empty mapping is a value.

    >>> list(dotted({"train": {"epochs": 3}, "data": "photos"}))
    [('train.epochs', 3), ('data', 'photos')]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class JsonValue:
    """A frozen dataclass that can be written as JSON, as text or with a checksum to a file, and read back equal."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "ser_json_inf_nan": "constants"}

    def to_json(self) -> str:
        return _adapter(type(self)).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return read_json(cls, text, PlanError, f"{cls.__name__}: the JSON does not hold one")

    def write(self, path: Path) -> None:
        write_checked(path, self.to_json().encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; raise CheckpointError if the file is missing, damaged, or of something else."""
        try:
            return cls.from_json(read_checked(path))
        except (OSError, PlanError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _adapter(kind: type[Value]) -> TypeAdapter[Value]:
    from pydantic import TypeAdapter  # takes a while, which `basisprune --help` need not wait for

    return TypeAdapter(kind)


def read_json(
    kind: type[Read], text: str | bytes, error: type[BasisPruneError], where: str = "", *, strict: bool = True
) -> Read:
    """The value of that type in JSON text; raises the error with what is wrong, of each list or mapping the first.

    All faults of a file could take hundreds of times its size.
    """
    from pydantic import ValidationError

    names = text.count(b'":') if isinstance(text, bytes) else text.count('":')
    if names > _MOST_NAMES:
        raise error.of(where, [f"{names:,} names in its mappings; at most {_MOST_NAMES:,} are read"])
    try:
        found: Read = _reader(kind).validate_json(text, strict=strict)  # type: ignore[arg-type]
    except ValidationError as fault:
        raise error.of(where, faults_of_json(fault)) from fault
    return found


@cache
def _reader(kind: type[Read]) -> SchemaValidator:
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    schema = TypeAdapter(kind).core_schema
    waiting: list[object] = [schema]
    while waiting:
        each = waiting.pop()
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
        if isinstance(each, dict) and each.get("type") in ("list", "tuple", "set", "dict"):
            each["fail_fast"] = True
    return SchemaValidator(schema)


def _are_finite(values: object) -> bool:
    if not isinstance(values, tuple | list):
        return False
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


@dataclass(frozen=True)
class InputSpec(JsonValue):
    """How a network wants its images: a float tensor (N, channels, *size), `(pixel / 255 - mean) / std`.

    Inputs other than images may have one side, as signals do, or three, as volumes do; those are prepared elsewhere.

    `white` is the value that counts as white in image files of more than 8 bits, which are scaled by it to 0..255; None
    where the network has seen no such files.

    >>> InputSpec(size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3).shape
    (3, 224, 224)
    """

    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    white: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.white is not None and not (isinstance(self.white, int) and 1 <= self.white <= _WHITEST):
            faults.append(f"white: {self.white!r} given; None or a whole number from 1 to {_WHITEST} is needed")
        sides = self.size if _are_finite(self.size) else ()
        most = _LARGEST_ROW if len(sides) == 1 else _LARGEST_SIDE
        if len(sides) not in (1, 2, 3) or not all(isinstance(side, int) and 0 < side <= most for side in sides):
            faults.append(f"size: {self.size} given; (height, width) of 1 to {_LARGEST_SIDE} pixels is needed")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if not _are_finite(values):
                faults.append(f"{name}: {values} given; finite numbers are needed")
            elif name == "mean" and any(abs(value) > _MOST for value in values):
                faults.append(f"mean: {values} given; -{_MOST:g} to {_MOST:g} is allowed, of values from 0 to 1")
            elif name == "std" and any(not 1 / _MOST <= deviation <= _MOST for deviation in values):
                faults.append(f"std: {values} given; all must be positive, {1 / _MOST:g} to {_MOST:g}")
        if _are_finite(self.mean) and _are_finite(self.std) and not 0 < len(self.mean) == len(self.std):
            faults.append(f"mean, std: {self.mean}, {self.std} given; one of each per channel is needed")
        if not isinstance(self.interpolation, str):
            faults.append(f"interpolation: {self.interpolation!r} given; a text such as 'bilinear' is needed")
        if faults:
            raise ConfigError.of("InputSpec", faults)

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size)

    @property
    def image_size(self) -> tuple[int, int]:
        """Its height and width; raises ConfigError for inputs that are no images."""
        if len(self.size) != 2:
            raise ConfigError(
                f"InputSpec: size {self.size} is that of inputs which are no images; pass loaders of them"
            )
        return self.size[0], self.size[1]

    @classmethod
    def as_it_is(cls, shape: tuple[int, ...]) -> InputSpec:
        """The spec of inputs of that shape, (channels, *size), which are prepared already.

        >>> InputSpec.as_it_is((2, 100)).shape
        (2, 100)
        """
        return cls(tuple(shape[1:]), (0.0,) * shape[0], (1.0,) * shape[0])


@dataclass(frozen=True)
class LayerScores:
    """The importance of each basis vector or filter of a layer, group by group; higher is more important.

    `means` are the mean features along each vector, None if no images were seen; `parameters` and `macs` are what one
    basis vector costs, None where that is not known.
    """

    values: tuple[float, ...]
    groups: int = 1
    means: tuple[float, ...] | None = None
    parameters: int | None = None
    macs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        object.__setattr__(self, "means", None if self.means is None else tuple(self.means))


@dataclass(frozen=True)
class Scores(JsonValue):
    """The raw importance of every basis vector or filter of a network, and how it was found.

    >>> scores = Scores("taylor", {"conv1": LayerScores((0.1, 0.9))})
    >>> Scores.from_json(scores.to_json()) == scores
    True
    """

    method: str
    layers: Mapping[str, LayerScores]


@dataclass(frozen=True)
class LayerPlan:
    """The basis vectors that a layer keeps, sorted, of its `rank`; `means` as in LayerScores."""

    keep: tuple[int, ...]
    rank: int
    means: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep))
        object.__setattr__(self, "means", None if self.means is None else tuple(self.means))

    @property
    def removed(self) -> int:
        return self.rank - len(self.keep)


@dataclass(frozen=True)
class BasisPlan(JsonValue):
    """What basis pruning keeps in each layer; `pruning_ratio` is the fraction asked to be removed.

    >>> plan = BasisPlan({"conv1": LayerPlan((0, 2), 4)}, pruning_ratio=0.5)
    >>> plan.removed, plan.total
    (2, 4)
    >>> BasisPlan.from_json(plan.to_json()) == plan
    True
    """

    layers: Mapping[str, LayerPlan]
    pruning_ratio: float
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def removed(self) -> int:
        return sum(layer.removed for layer in self.layers.values())

    @property
    def total(self) -> int:
        return sum(layer.rank for layer in self.layers.values())

    @property
    def fraction_removed(self) -> float:
        return self.removed / self.total


OUTPUT = "it is part of the network's output"
"""Why the layer that makes the classes stays whole."""


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter or buffer that carries a group's units.

    `index` has the positions of the first unit, then of the second: equally many, as 49 for a flattened 7x7 map.
    """

    parameter: str
    dim: int
    index: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A number that a module keeps beside its weights and that shrinks by `count / divisor` per unit.

    `item` is its place in a tuple or list. A width of a head shrinks by one when every head loses one channel.
    """

    module: str
    attribute: str
    item: int | None
    count: int
    divisor: int


@dataclass(frozen=True)
class Group:
    """Channels of one or more layers that are cut together; a unit is the smallest thing to keep or cut.

    `filters` says how many output channels of which layers these are; the group is named after the first
    of them. `parts` are the sets of units that must lose equally many; there is one part that holds all
    units where nothing asks for that.

    >>> axes = (Axis("conv.weight", 0, (0, 1, 2, 3)), Axis("conv.bias", 0, (0, 1, 2, 3)))
    >>> Group("conv", 4, {"conv": 4}, axes, parts=((0, 1), (2, 3)), sizes=()).layers
    ('conv',)
    """

    name: str
    size: int
    filters: Mapping[str, int]
    axes: tuple[Axis, ...]
    parts: tuple[tuple[int, ...], ...]
    sizes: tuple[Size, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.filters)


@dataclass(frozen=True)
class Coupling(JsonValue):
    """All groups of a network; what stays whole and why; the operations that were not understood.

    >>> Coupling.from_json(Coupling((), {"fc": "it makes the output"}, ()).to_json()).frozen
    {'fc': 'it makes the output'}
    """

    groups: tuple[Group, ...]
    frozen: Mapping[str, str]
    unknown_ops: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for group in self.groups for name in group.layers))

    def __getitem__(self, name: str) -> Group:
        return {group.name: group for group in self.groups}[name]


@dataclass(frozen=True)
class GroupPlan:
    """The units that a group of coupled filters keeps, sorted, of its `size`."""

    keep: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep))


@dataclass(frozen=True)
class FilterPlan(JsonValue):
    """What filter pruning keeps of each group; `pruning_ratio` is the fraction asked to be removed.

    The coupling says what the units are, so that the plan can be carried out as it is, on a network whose
    tensors have these `shapes`. `total` is the number of filters of all layers, those that cannot be pruned
    included.
    """

    groups: Mapping[str, GroupPlan]
    coupling: Coupling
    shapes: Mapping[str, tuple[int, ...]]
    total: int
    pruning_ratio: float
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def removed(self) -> int:
        lost = (
            sum(group.filters.values()) * (group.size - len(self.groups[group.name].keep)) // group.size
            for group in self.coupling.groups
        )
        return sum(lost)

    @property
    def fraction_removed(self) -> float:
        return self.removed / self.total


@dataclass(frozen=True)
class Block:
    """A module that adds a branch, which the pair `last` ends, to what it reads; a relu may follow the sum."""

    name: str
    last: str
    rectifies: bool = False


@dataclass(frozen=True)
class BlockPlan(JsonValue):
    """The blocks whose branches go as a whole."""

    blocks: tuple[Block, ...]

    @property
    def removed(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class JointPlan(JsonValue):
    """What goes of basis vectors and filters as one move; `pruning_ratio` is the fraction of the cost asked to go.

    `cost` and `cost_left` are parameters, multiply-adds or seconds before and after; a pair counts as the one conv it
    stands for where that is cheaper. `expected_loss` is what the loss is expected to rise, to second order. `blocks`
    are those whose branches go as a whole.
    """

    basis: BasisPlan
    filters: FilterPlan
    pruning_ratio: float
    cost: float
    cost_left: float
    expected_loss: float
    blocks: tuple[Block, ...] = ()

    @property
    def options(self) -> Mapping[str, Option]:
        return self.basis.options

    @property
    def fraction_removed(self) -> float:
        return 1 - self.cost_left / self.cost
