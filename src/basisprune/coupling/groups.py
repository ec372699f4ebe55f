"""What tracing finds out: groups of channels that go together, and everything that carries them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OUTPUT = "it is part of the network's output"
"""Why the layer that makes the classes stays whole."""


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter or buffer that carries a group's units.

    `index` holds the positions of the first unit, then those of the second, and so on; every unit has
    equally many (one as a rule; 49 where a 7x7 map is flattened before a linear layer).
    """

    parameter: str
    dim: int
    index: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A number that a module keeps beside its weights and that shrinks by `count / divisor` per unit.

    `item` is the position where the attribute is a tuple or list of numbers. Dividing happens where units
    are spread over equal parts: the width of a head shrinks by one when every head loses one channel.
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
        """The modules whose weights produce the channels."""
        return tuple(self.filters)


@dataclass(frozen=True)
class Coupling:
    """All groups of a network; what stays whole and why; the operations that were not understood.

    >>> Coupling.from_json(Coupling((), {"fc": "it makes the output"}, ()).to_json()).frozen
    {'fc': 'it makes the output'}
    """

    groups: tuple[Group, ...]
    frozen: Mapping[str, str]
    unknown_ops: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules that produce channels of some group, each once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group.layers))

    def __getitem__(self, name: str) -> Group:
        """The group of that name; a KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]

    def to_json(self) -> str:
        """The coupling as a JSON document; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Coupling:
        """The coupling that `to_json` wrote."""
        data = json.loads(text)
        groups = tuple(_group(entry) for entry in data["groups"])
        return cls(groups, data["frozen"], tuple(data["unknown_ops"]))


def _group(entry: dict[str, Any]) -> Group:
    return Group(
        name=entry["name"],
        size=entry["size"],
        filters=entry["filters"],
        axes=tuple(Axis(axis["parameter"], axis["dim"], tuple(axis["index"])) for axis in entry["axes"]),
        parts=tuple(map(tuple, entry["parts"])),
        sizes=tuple(Size(**size) for size in entry["sizes"]),
    )
