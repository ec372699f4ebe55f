"""Tables of times that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping

from basisprune.deploy.timing import Wanted
from basisprune.layer_times import ChannelTimes, LayerShape, TimeTable


def invented(shapes: Mapping[LayerShape, Wanted], *, block: int = 4, pair_penalty: float = 0.0) -> TimeTable:
    """A table in which a layer takes a nanosecond for each multiply-add, and something for each call."""
    times = []
    for shape, wanted in shapes.items():
        inputs = tuple(range(block, wanted.inputs + block, block))
        outputs = tuple(range(block, wanted.outputs + block, block)) if shape.kind == "conv" else (1,)
        area = shape.size[0] * shape.size[1] * shape.kernel[0] * shape.kernel[1]
        rows = tuple(tuple(1e-9 * area * a * b + pair_penalty for b in outputs) for a in inputs)
        times.append(ChannelTimes(shape, inputs, outputs, rows))
    return TimeTable("onnxruntime", "invented", {}, 1, 1, block, tuple(times))
