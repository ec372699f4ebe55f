"""Layer shapes -> a folder of small ONNX models that a device is profiled with (see `device.py`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from basisprune.deploy import device
from basisprune.deploy.export.onnx import ONNX
from basisprune.errors import ConfigError
from basisprune.files import write_text
from basisprune.joint_plan.times import LayerShape

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

SCRIPT = "profile_device.py"
BLOCKS = (32, 16, 8, 4)
_STEPS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_PROBE_INPUTS, _PROBE_SIDE = 64, 14


@dataclass(frozen=True)
class Wanted:
    """The largest numbers of input and output channels to measure a shape with."""

    inputs: int
    outputs: int

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(max(self.inputs, other.inputs), max(self.outputs, other.outputs))


def write_layer_models(folder: Path, shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1) -> Path:
    """The folder, filled with a model for each shape, the list of them, and a script that measures them.

    The script needs Python, onnxruntime and numpy, nothing of this package. The models hold no weights but rules that
    make them, so they are small. Raises ConfigError for a folder that holds something else.
    """
    ONNX.require()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / device.REQUEST).exists())):
        raise ConfigError(f"{folder}: holds something else; name a new or empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = []
    for shape, wanted in shapes.items():
        axes = channel_axes(shape, wanted)
        name = f"{shape.file_name}.onnx"
        _write(folder / name, _layer_model(shape, *axes, batch))
        asked.append({"file": name, "shape": asdict(shape), "inputs": axes[0], "outputs": axes[1]})
    probe = LayerShape("conv", (1, 1), (1, 1), (_PROBE_SIDE, _PROBE_SIDE))
    counts = sorted({count for block in BLOCKS for count in (5 * block // 2, 3 * block)})
    _write(folder / "probe.onnx", _layer_model(probe, (_PROBE_INPUTS,), tuple(counts), 1))
    _write(folder / device.CHAIN, _chain())
    request = {
        "runtime": device.RUNTIME,
        "threads": threads,
        "batch": batch,
        "shapes": asked,
        "probe": {"file": "probe.onnx", "inputs": _PROBE_INPUTS, "blocks": BLOCKS},
    }
    write_text(folder / SCRIPT, Path(device.__file__).read_text())
    write_text(folder / device.REQUEST, json.dumps(request, indent=1) + "\n")
    return folder


def channel_axes(shape: LayerShape, wanted: Wanted) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of input and output channels to measure.

    >>> channel_axes(LayerShape("conv", (1, 1), (1, 1), (8, 8)), Wanted(3, 40))
    ((3,), (16, 32, 48))
    """
    inputs = _axis(wanted.inputs, shape.groups)
    return inputs, (1,) if shape.kind != "conv" else _axis(wanted.outputs, shape.groups)


def _axis(most: int, groups: int) -> tuple[int, ...]:
    if most < _STEPS[0]:
        return (most,)
    counts = [count for count in _STEPS if count < most]
    counts.append(-(-most // _STEPS[0]) * _STEPS[0])
    return tuple(dict.fromkeys(-(-count // groups) * groups for count in counts))


def _layer_model(shape: LayerShape, inputs: Iterable[int], outputs: tuple[int, ...], batch: int) -> ModelProto:
    graph = _Graph()
    for count in inputs:
        if shape.kind == "norm":
            graph.norm(shape, count, batch)
            continue
        given = graph.input(f"maps.{count}", (batch, count, *shape.size))
        if shape.kind == "depthwise":
            graph.conv(str(count), shape, (given, count, count), groups=count)
            continue
        for made in outputs:
            graph.conv(f"{count}x{made}", shape, (given, count, made), groups=shape.groups)
    return graph.model()


def _chain() -> ModelProto:
    """Convs that compute almost nothing, one behind the other."""
    graph, shape = _Graph(), LayerShape("conv", (1, 1), (1, 1), (1, 1))
    given = graph.input("maps", (1, 16, 1, 1))
    for number in range(device.LINKS):
        given = graph.conv(f"link{number}", shape, (given, 16, 16), last=number == device.LINKS - 1)
    return graph.model()


@dataclass
class _Graph:
    """A graph under construction; nodes and what they make are named alike, since runtimes rename them by either."""

    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    outputs: list[ValueInfoProto] = field(default_factory=list)

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        onnx = import_module("onnx")
        self.inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        return name

    def filled(self, name: str, shape: tuple[int, ...], value: float) -> str:
        """A tensor of one value: a rule, which the runtime carries out when it opens the model."""
        onnx = import_module("onnx")
        self.constants.append(onnx.numpy_helper.from_array(np.array(shape, dtype=np.int64), f"shape.{name}"))
        one = onnx.numpy_helper.from_array(np.array([value], dtype=np.float32))
        rule = onnx.helper.make_node("ConstantOfShape", [f"shape.{name}"], [name], f"fill.{name}", value=one)
        self.nodes.append(rule)
        return name

    def conv(
        self, name: str, shape: LayerShape, reads: tuple[str, int, int], *, groups: int = 1, last: bool = True
    ) -> str:
        """A conv of the named input with so many channels, that outputs so many; padded to keep the map's size."""
        given, inputs, outputs = reads
        weight = self.filled(f"weight.{name}", (outputs, inputs // groups, *shape.kernel), 0.01)
        pads = [step * (side - 1) // 2 for step, side in zip(shape.dilation, shape.kernel, strict=True)]
        self.node(
            "Conv",
            [given, weight],
            name,
            kernel_shape=shape.kernel,
            strides=shape.stride,
            dilations=shape.dilation,
            pads=[*pads, *pads],
            group=groups,
        )
        if last:
            self.output(name)
        return name

    def norm(self, shape: LayerShape, count: int, batch: int) -> None:
        """A concatenation of two maps, the norm of it, and an activation; the maps come from convs of their own."""
        given = f"maps.{count}"
        self.input(given, (batch, 16, *shape.size))
        first = min(count - 1, max(count - 32, 16)) if count > 1 else 1
        plain = LayerShape("conv", (1, 1), (1, 1), shape.size)
        parts = [
            self.conv(f"feed{count}.{place}", plain, (given, 16, width), last=False)
            for place, width in enumerate((first, count - first))
            if width
        ]
        both = self.node("Concat", parts, f"{count}.both", axis=1) if len(parts) > 1 else parts[0]
        numbers = [self.filled(f"{part}.{count}", (count,), 1.0) for part in ("scale", "shift", "mean", "variance")]
        scaled = self.node("BatchNormalization", [both, *numbers], f"{count}.norm")
        self.output(self.node("Relu", [scaled], f"{count}.act"))

    def node(self, kind: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(import_module("onnx").helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def output(self, name: str) -> None:
        onnx = import_module("onnx")
        self.outputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))

    def model(self) -> ModelProto:
        helper = import_module("onnx").helper
        graph = helper.make_graph(self.nodes, "layers", self.inputs, self.outputs, self.constants)
        made: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return made


def _write(path: Path, model: ModelProto) -> None:
    path.write_bytes(model.SerializeToString())
