"""How long the layers of a network take: its shapes, and their times, measured here or on another device."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from platformdirs import user_cache_path
from torch import nn

from basisprune.basis.layers import BasisPair, half_name
from basisprune.deploy import device
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.fold import LAYERS, foldable_norms
from basisprune.deploy.forms import BatchNorm
from basisprune.errors import ConfigError, ModelError, PlanError
from basisprune.files import digest, json_digest, read_bytes, sound_or_aside, write_checked, write_text
from basisprune.layer_times import LayerShape, NetworkTimes, Sides, TimeTable
from basisprune.torchkit.surgery import find_layers
from basisprune.torchkit.watching import Dataflow, dataflow_of, example_input

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger(__name__)
SCRIPT = "profile_device.py"
BLOCKS = (32, 16, 8, 4)
_LARGEST_FILE = 8 << 20
_FOR_ANOTHER = "the device was profiled for another network or input size; profile it again"
_STEPS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_PROBE_INPUTS, _PROBE_SIDE = 64, 14


@dataclass(frozen=True)
class Wanted:
    """The largest numbers of input and output channels to measure a shape with."""

    inputs: int
    outputs: int

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(max(self.inputs, other.inputs), max(self.outputs, other.outputs))


# ------------------------------------------------------------------------------------------- networks and tables


def time_network(
    model: nn.Module,
    input_shape: tuple[int, ...],
    table: TimeTable | None = None,
    *,
    say: Callable[[str], None] = logger.info,
) -> NetworkTimes:
    """Return the times of a model's convs and norms at this input (channels, height, width), for `plan_together`.

    Without a table, its layers are measured here, in onnxruntime on one thread with one image, or read from the cache
    of an earlier measurement. Raises PlanError, with all layers that are missing, if the table is for another network
    or input size. The model is not changed.
    """
    calls = _calls(model, *_run(model, input_shape))
    if table is None:
        table = measured_table(wanted_shapes(model, input_shape), say=say)
    _refuse_missing(table, [(name, shape) for name, shapes in calls.items() for shape in shapes])
    return NetworkTimes(table, calls)


def refuse_other_table(model: nn.Module, input_shape: tuple[int, ...], table: TimeTable) -> None:
    """Raise PlanError, with all that is missing, for a table that does not know every shape the model can get."""
    time_network(model, input_shape, table)
    _refuse_missing(table, [("decomposed", shape) for shape in wanted_shapes(model, input_shape)])


def _refuse_missing(table: TimeTable, shapes: Iterable[tuple[str, LayerShape]]) -> None:
    missing = [f"{name}: no times for a {shape}" for name, shape in shapes if shape not in table]
    if missing:
        raise PlanError.of(_FOR_ANOTHER, missing)


def table_milliseconds(model: nn.Module, input_shape: tuple[int, ...], table: TimeTable) -> float:
    """Add up the times of a model's convs and norms for one image; other operations are left out.

    Of a table for batches, it is an image's share of the batch.
    """
    times = time_network(model, input_shape, table)
    seconds = 0.0
    for name, shapes in times.layers.items():
        counts = _channels(model, name, shapes[0])
        seconds += float(times.seconds(name, counts.inputs, counts.outputs))
    return 1000 * seconds / table.batch


def wanted_shapes(model: nn.Module, input_shape: tuple[int, ...]) -> dict[LayerShape, Wanted]:
    """Return all shapes that the layers can have, decomposed or not, with their largest numbers of channels.

    Where a branch goes as a whole, that is a 1x1 depthwise conv (see `merge_shifts`).
    """
    run, norms = _run(model, input_shape)
    wanted: dict[LayerShape, Wanted] = {}
    for name, shapes in _calls(model, run, norms).items():
        for place, shape in enumerate(shapes):
            most = _channels(model, name, shape)
            more = [(shape, most)]
            if shape.groups > 1:  # without some of its filters it may be a depthwise one
                more.append((replace(shape, kind="depthwise", groups=1), most))
            if shape.kind == "conv" and name in run.calls:
                size = _sides(run.calls[name][place].output_shape)
                more.append((_pointwise(size, shape.groups), Wanted(most.outputs, most.outputs)))
                shift = LayerShape("depthwise", (1, 1), (1, 1), size)  # what may be left of a whole branch
                more.append((shift, Wanted(most.outputs, 1)))
            for each, counts in more:
                wanted[each] = wanted.get(each, counts) | counts
    return wanted


def _run(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[Dataflow, Mapping[str, str]]:
    layers = dict(find_layers(model, LAYERS, opaque=BasisPair))
    run = dataflow_of(model, (example_input(model, input_shape),), layers, dict(find_layers(model, BatchNorm)))
    return run, foldable_norms(model, run)


def _calls(model: nn.Module, run: Dataflow, norms: Mapping[str, str]) -> dict[str, tuple[LayerShape, ...]]:
    """The shape of every 2d conv, half of a pair, and norm that stays, for each of its calls."""
    found: dict[str, tuple[LayerShape, ...]] = {}
    for name, calls in run.calls.items():
        layer = model.get_submodule(name)
        is_pair = isinstance(layer, BasisPair)
        conv = layer.basis if isinstance(layer, BasisPair) else layer
        if not isinstance(conv, nn.Conv2d):
            continue
        first = tuple(LayerShape.of(conv, _sides(call.shape)) for call in calls)
        found[half_name(name, "basis") if is_pair else name] = first
        if isinstance(layer, BasisPair):
            second = tuple(_pointwise(_sides(call.output_shape), layer.scaling.groups) for call in calls)
            found[half_name(name, "scaling")] = second
    folded = set(norms.values())
    for name, sizes in run.norm_sizes.items():
        if name not in folded:
            found[name] = tuple(LayerShape("norm", (1, 1), (1, 1), size) for size in sizes)
    return found


def _sides(shape: tuple[int, ...]) -> Sides:
    return shape[-2], shape[-1]


def _pointwise(size: Sides, groups: int) -> LayerShape:
    return LayerShape("conv", (1, 1), (1, 1), size, groups)


def _channels(model: nn.Module, name: str, shape: LayerShape) -> Wanted:
    weight = model.get_parameter(f"{name}.weight" if name else "weight")
    if shape.kind != "conv":
        return Wanted(len(weight), 1)
    return Wanted(weight.shape[1] * shape.groups, len(weight))


# ------------------------------------------------------------------------------------------- measured and kept


def measured_table(
    shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1, say: Callable[[str], None] = logger.info
) -> TimeTable:
    """Return the times of these shapes on this machine, of an earlier measurement by the same versions if there is one.

    They are kept in the user's cache folder, if it can be written to. A damaged file is set aside, and measured again.
    """
    axes = sorted((str(shape), channel_axes(shape, wanted)) for shape, wanted in shapes.items())
    key = [device.device_name(), device.versions(import_module("onnxruntime")), batch, threads, axes]
    path = cache_folder() / f"times-{json_digest(key)[:24]}.json"
    content: bytes | None = None
    with suppress(OSError):
        content = sound_or_aside(path, say)
    if content is not None:
        try:
            return TimeTable.from_json(content)
        except (PlanError, ConfigError) as error:
            say(f"{path}: holds no times that can be used ({error}); measuring again")
    say(f"measuring {len(shapes)} layer shapes in onnxruntime, on {threads} thread{'s' if threads > 1 else ''}")
    table = profile_here(shapes, batch=batch, threads=threads)
    with suppress(OSError):
        write_checked(path, table.to_json().encode())
    return table


def cache_folder() -> Path:
    """The folder of this package in the user's cache folder, where measurements are kept."""
    return user_cache_path("basisprune", appauthor=False)


def profile_here(shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1) -> TimeTable:
    """Measure the times of these shapes on this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_layer_models(Path(scratch) / "layers", shapes, batch=batch, threads=threads)
        try:
            return TimeTable.from_json(json.dumps(device.profile(folder)))
        except device.ProfileError as error:
            raise ModelError(f"the layers cannot be timed: {error}") from error


def read_table(path: Path) -> TimeTable:
    """Read the table in a file of `basisprune profile`; raises ConfigError if it is damaged or something else."""
    content = _content(path)
    try:
        return TimeTable.from_json(content)
    except (PlanError, ConfigError) as error:
        faults = [f"{path}: {fault}" for fault in error.faults[:5]]
        raise ConfigError.of("not a table of times; write it again with basisprune profile", faults) from error


def table_digest(path: Path) -> str:
    """The SHA-256 of a file of times; raises ConfigError if it cannot be read."""
    return digest(_content(path))


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, most=_LARGEST_FILE)
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); pass the file that basisprune profile wrote"
        raise ConfigError(f"{path}: {reason}") from error


# ------------------------------------------------------------------------------------------- the folder to measure


def write_layer_models(folder: Path, shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1) -> Path:
    """Fill the folder with a small ONNX model for each shape, the list of them, and a script that measures them.

    The script needs Python, onnxruntime and numpy, nothing of this package. The models hold no weights but rules that
    make them, so they are small. Raises ConfigError for a folder that holds something else.
    """
    ONNX.require()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / device.REQUEST).exists())):
        raise ConfigError(f"{folder}: holds something else; name a new or empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    listed: list[dict[str, object]] = []
    for shape, wanted in shapes.items():
        inputs, outputs = channel_axes(shape, wanted)
        name = f"{str(shape).replace(',', '').replace(' ', '-')}.onnx"
        _write(folder / name, _layer_model(shape, inputs, outputs, batch))
        listed.append({"file": name, "shape": asdict(shape), "inputs": inputs, "outputs": outputs})
    probe = LayerShape("conv", (1, 1), (1, 1), (_PROBE_SIDE, _PROBE_SIDE))
    counts = sorted({count for block in BLOCKS for count in (5 * block // 2, 3 * block)})
    _write(folder / "probe.onnx", _layer_model(probe, (_PROBE_INPUTS,), tuple(counts), 1))
    _write(folder / device.CHAIN, _chain())
    request = {
        "runtime": device.RUNTIME,
        "threads": threads,
        "batch": batch,
        "shapes": listed,
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
        maps = graph.input(f"maps.{count}", (batch, count, *shape.size))
        if shape.kind == "depthwise":
            graph.conv(str(count), shape, (maps, count, count), groups=count)
            continue
        for made in outputs:
            graph.conv(f"{count}x{made}", shape, (maps, count, made), groups=shape.groups)
    return graph.model()


def _chain() -> ModelProto:
    """Convs that compute almost nothing, one behind the other."""
    graph, shape = _Graph(), LayerShape("conv", (1, 1), (1, 1), (1, 1))
    last = graph.input("maps", (1, 16, 1, 1))
    for number in range(device.LINKS):
        last = graph.conv(f"link{number}", shape, (last, 16, 16), is_output=number == device.LINKS - 1)
    return graph.model()


class _Graph:
    """A graph under construction; nodes and their outputs are named alike, since runtimes rename them by either."""

    def __init__(self) -> None:
        self.onnx = import_module("onnx")
        self.helper = self.onnx.helper
        self.nodes, self.constants, self.inputs, self.outputs = ([] for _ in range(4))  # type: ignore[var-annotated]

    def model(self) -> ModelProto:
        graph = self.helper.make_graph(self.nodes, "layers", self.inputs, self.outputs, self.constants)
        opsets = [self.helper.make_opsetid("", 17)]
        model: ModelProto = self.helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return model

    def node(self, kind: str, inputs: list[str], name: str, *, is_output: bool = False, **attributes: object) -> str:
        self.nodes.append(self.helper.make_node(kind, inputs, [name], name, **attributes))
        if is_output:
            self.outputs.append(self._value(name, None))
        return name

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        self.inputs.append(self._value(name, shape))
        return name

    def filled(self, name: str, shape: tuple[int, ...], value: float) -> str:
        """Add a tensor of one value: a rule, which the runtime carries out when it opens the model."""
        array = self.onnx.numpy_helper.from_array
        self.constants.append(array(np.array(shape, dtype=np.int64), f"shape.{name}"))
        one = array(np.array([value], dtype=np.float32))
        self.nodes.append(
            self.helper.make_node("ConstantOfShape", [f"shape.{name}"], [name], f"fill.{name}", value=one)
        )
        return name

    def conv(
        self, name: str, shape: LayerShape, reads: tuple[str, int, int], *, groups: int = 1, is_output: bool = True
    ) -> str:
        """Add a conv of the named input with these inputs and outputs; padded to keep the map's size."""
        maps, inputs, outputs = reads
        weight = self.filled(f"weight.{name}", (outputs, inputs // groups, *shape.kernel), 0.01)
        pads = 2 * [step * (side - 1) // 2 for step, side in zip(shape.dilation, shape.kernel, strict=True)]
        sizes = {"kernel_shape": shape.kernel, "strides": shape.stride, "dilations": shape.dilation, "pads": pads}
        return self.node("Conv", [maps, weight], name, is_output=is_output, group=groups, **sizes)

    def norm(self, shape: LayerShape, count: int, batch: int) -> None:
        """Add a concatenation of two maps, the norm of it, and an activation; the maps come from convs of their own."""
        maps = self.input(f"maps.{count}", (batch, 16, *shape.size))
        first = min(count - 1, max(count - 32, 16)) if count > 1 else 1
        plain = LayerShape("conv", (1, 1), (1, 1), shape.size)
        parts = [
            self.conv(f"feed{count}.{place}", plain, (maps, 16, width), is_output=False)
            for place, width in enumerate((first, count - first))
            if width
        ]
        both = self.node("Concat", parts, f"{count}.both", axis=1) if len(parts) > 1 else parts[0]
        numbers = [self.filled(f"{part}.{count}", (count,), 1.0) for part in ("scale", "shift", "mean", "variance")]
        scaled = self.node("BatchNormalization", [both, *numbers], f"{count}.norm")
        self.node("Relu", [scaled], f"{count}.act", is_output=True)

    def _value(self, name: str, shape: tuple[int, ...] | None) -> Any:
        return self.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, shape)


def _write(path: Path, model: ModelProto) -> None:
    path.write_bytes(model.SerializeToString())
