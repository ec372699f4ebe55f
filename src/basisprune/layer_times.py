"""How long the layers of a network take on a device, as values: measured there, used wherever a network is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from basisprune.errors import ConfigError, PlanError
from basisprune.torchkit.surgery import is_depthwise
from basisprune.types import JsonValue

Kind: TypeAlias = Literal["conv", "depthwise", "norm"]
Sides: TypeAlias = tuple[int, int]
Array: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]

RUNTIMES = ("onnxruntime",)


@dataclass(frozen=True)
class LayerShape:
    """What decides on a layer's time beside its channels: its kernel, stride and groups, and the map that it reads.

    A "norm" is one that no conv can take in, with the concatenation before it and the activation behind it.

    >>> str(LayerShape("conv", (3, 3), (2, 2), (32, 32)))
    '3x3 conv, stride 2, on maps of 32x32'
    """

    kind: Kind
    kernel: Sides
    stride: Sides
    size: Sides
    groups: int = 1
    dilation: Sides = (1, 1)

    def __str__(self) -> str:
        height, width = self.size
        if self.kind == "norm":
            return f"norm on maps of {height}x{width}"
        name = "depthwise conv" if self.kind == "depthwise" else "conv"
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        stride = "" if self.stride == (1, 1) else f", stride {_by(self.stride)}"
        dilation = "" if self.dilation == (1, 1) else f", dilation {_by(self.dilation)}"
        return f"{self.kernel[0]}x{self.kernel[1]} {name}{groups}{stride}{dilation}, on maps of {height}x{width}"

    @classmethod
    def of(cls, conv: nn.Conv2d, size: Sides) -> LayerShape:
        """The shape of a conv that reads maps of this size.

        >>> str(LayerShape.of(nn.Conv2d(8, 8, 3, stride=2, groups=8), (16, 16)))
        '3x3 depthwise conv, stride 2, on maps of 16x16'
        """
        kernel, stride, dilation = ((side[0], side[1]) for side in (conv.kernel_size, conv.stride, conv.dilation))
        if is_depthwise(conv):
            return cls("depthwise", kernel, stride, size, 1, dilation)
        return cls("conv", kernel, stride, size, conv.groups, dilation)


def _by(sides: Sides) -> str:
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"


@dataclass(frozen=True)
class ChannelTimes:
    """The seconds of a layer by its channels read (rows) and made (columns, one for a depthwise conv or a norm)."""

    shape: LayerShape
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def faults(self) -> list[str]:
        found = [
            f"{self.shape}: {name} {axis} given; rising numbers of channels are needed"
            for name, axis in (("inputs", self.inputs), ("outputs", self.outputs))
            if not axis or axis[0] < 1 or list(axis) != sorted(set(axis))
        ]
        if [len(row) for row in self.seconds] != [len(self.outputs)] * len(self.inputs):
            found.append(f"{self.shape}: not one time for each of its {len(self.inputs)} x {len(self.outputs)} counts")
        elif not all(math.isfinite(value) and value > 0 for row in self.seconds for value in row):
            found.append(f"{self.shape}: a time is not a number above 0")
        return found


@dataclass(frozen=True)
class TimeTable(JsonValue):
    """The times of layers on one device: in which runtime, of which versions, on how many threads, at which batch size.

    `block` is the number of channels that the runtime's kernels work on at once: those beyond the last full block take
    as long as a whole one.

    >>> shape = LayerShape("conv", (1, 1), (1, 1), (8, 8))
    >>> times = ChannelTimes(shape, (16, 32), (16, 32), ((1.0, 2.0), (2.0, 4.0)))
    >>> table = TimeTable("onnxruntime", "a laptop", {}, 1, 1, 16, (times,))
    >>> TimeTable.from_json(table.to_json()) == table
    True
    >>> [float(table.seconds(shape, *counts)) for counts in ((16, 16), (17, 32), (64, 32))]
    [1.0, 4.0, 8.0]
    """

    runtime: str
    device: str
    versions: Mapping[str, str]
    threads: int
    batch: int
    block: int
    shapes: tuple[ChannelTimes, ...]

    def __post_init__(self) -> None:
        faults = [fault for times in self.shapes for fault in times.faults()]
        if self.runtime not in RUNTIMES:
            faults.append(f"runtime: {self.runtime!r} given; allowed is {', '.join(RUNTIMES)}")
        faults += [
            f"{name}: {getattr(self, name)} given; at least 1 is needed"
            for name in ("threads", "batch", "block")
            if getattr(self, name) < 1
        ]
        seen = [times.shape for times in self.shapes]
        if len(set(seen)) != len(seen):
            faults.append("shapes: one of them is given twice")
        if faults:
            raise ConfigError.of("TimeTable", faults)

    def __contains__(self, shape: LayerShape) -> bool:
        return shape in self._times

    def seconds(self, shape: LayerShape, inputs: float | Array, outputs: float | Array) -> Array:
        """Return the seconds for these channels, in full blocks; raise PlanError for a shape not measured.

        Between the measured numbers of channels, linearly.
        """
        times = self._times.get(shape)
        if times is None:
            raise PlanError(f"the table of times knows no {shape}; profile the device for this network and input size")
        rows = self._blocks(inputs)
        columns = self._blocks(outputs) if shape.kind == "conv" else np.minimum(rows, 1)
        most_rows, most_columns = (-(-axis[-1] // self.block) for axis in (times.inputs, times.outputs))
        row, next_row, down = _between(times.inputs, self.block * np.minimum(rows, most_rows))
        column, next_column, right = _between(times.outputs, self.block * np.minimum(columns, most_columns))
        known = np.asarray(times.seconds, dtype=np.float64)
        above = known[row, column] * (1 - right) + known[row, next_column] * right
        below = known[next_row, column] * (1 - right) + known[next_row, next_column] * right
        scale = np.maximum(rows / most_rows, 1) * np.maximum(columns / most_columns, 1)
        return np.where((rows > 0) & (columns > 0), (above * (1 - down) + below * down) * scale, 0.0)

    def _blocks(self, counts: float | Array) -> Indices:
        return np.ceil(np.divide(counts, self.block)).astype(np.int64)

    @cached_property
    def _times(self) -> dict[LayerShape, ChannelTimes]:
        return {times.shape: times for times in self.shapes}


def _between(axis: tuple[int, ...], counts: Indices) -> tuple[Indices, Indices, Array]:
    """The places on the axis before and after each number, and how far it is from the first of them to the other."""
    exact = np.interp(counts, axis, np.arange(len(axis)))
    before = np.floor(exact).astype(np.int64)
    return before, np.minimum(before + 1, len(axis) - 1), exact - before


@dataclass(frozen=True)
class NetworkTimes:
    """A table of times, and the shape of each conv and norm of one network, by the layer's name, once for each call."""

    table: TimeTable
    layers: Mapping[str, tuple[LayerShape, ...]]

    def seconds(self, name: str, inputs: float | Array, outputs: float | Array) -> Array:
        """Time of that layer in one run of the network with these channels; nothing if it is not timed."""
        calls = self.layers.get(name, ())
        return sum((self.table.seconds(shape, inputs, outputs) for shape in calls), np.asarray(0.0))
