"""How long the layers of a network take: which shapes it has, and their times, measured here or on another device."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from torch import nn

from basisprune.basis.layers import BasisPair, half_name
from basisprune.deploy import device
from basisprune.deploy.fold import LAYERS, foldable_norms
from basisprune.deploy.form_times import conv_shape
from basisprune.deploy.forms import BatchNorm
from basisprune.deploy.layer_models import Wanted, channel_axes, write_layer_models
from basisprune.errors import ConfigError, ModelError, PlanError
from basisprune.files import digest, read_bytes, sound_or_aside, write_checked
from basisprune.joint_plan.times import LayerShape, NetworkTimes, Sides, TimeTable
from basisprune.torchkit.surgery import find_layers
from basisprune.torchkit.watching import Dataflow, dataflow_of, example_input

logger = logging.getLogger(__name__)
_LARGEST_FILE = 64 << 20
_FOR_ANOTHER = "the device was profiled for another network or input size; profile it again"


def time_network(
    model: nn.Module,
    input_shape: tuple[int, ...],
    table: TimeTable | None = None,
    *,
    say: Callable[[str], None] = logger.info,
) -> NetworkTimes:
    """The times of the convs and norms of a model at this input (channels, height, width), for `plan_together`.

    Without a table, its layers are measured here, in onnxruntime on one thread with one image, or read from the cache
    of an earlier measurement. Raises PlanError, with all layers that are missing, if the table is for another network
    or input size. The model is not changed.
    """
    run, norms = _run(model, input_shape)
    calls = _calls(model, run, norms)
    if table is None:
        table = measured_table(wanted_shapes(model, input_shape), say=say)
    missing = [fault for name, shapes in calls.items() for shape in shapes for fault in table.missing({name: shape})]
    if missing:
        raise PlanError.of(_FOR_ANOTHER, missing)
    return NetworkTimes(table, calls)


def refuse_other_table(model: nn.Module, input_shape: tuple[int, ...], table: TimeTable) -> None:
    """Raises PlanError, with all that is missing, for a table that does not know every shape the model can get."""
    time_network(model, input_shape, table)
    missing = [fault for shape in wanted_shapes(model, input_shape) for fault in table.missing({"decomposed": shape})]
    if missing:
        raise PlanError.of(_FOR_ANOTHER, missing)


def table_milliseconds(model: nn.Module, input_shape: tuple[int, ...], table: TimeTable) -> float:
    """What the convs and norms of a model take for one image, according to a table; other operations are left out.

    Of a table for batches, it is an image's share of the batch.
    """
    times = time_network(model, input_shape, table)
    seconds = 0.0
    for name, shapes in times.layers.items():
        counts = _channels(model, name, shapes[0])
        seconds += float(times.seconds(name, counts.inputs, counts.outputs))
    return 1000 * seconds / table.batch


def wanted_shapes(model: nn.Module, input_shape: tuple[int, ...]) -> dict[LayerShape, Wanted]:
    """All shapes that the layers of the model can have, decomposed or not, with their largest numbers of channels.

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
                height, width = run.calls[name][place].output_shape[-2:]
                more.append((_pointwise((height, width), shape.groups), Wanted(most.outputs, most.outputs)))
                shift = LayerShape("depthwise", (1, 1), (1, 1), (height, width))  # what may be left of a whole branch
                more.append((shift, Wanted(most.outputs, 1)))
            for each, counts in more:
                wanted[each] = wanted.get(each, counts) | counts
    return wanted


def measured_table(
    shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1, say: Callable[[str], None] = logger.info
) -> TimeTable:
    """The times of these shapes on this machine; those of an earlier measurement if device and versions are the same.

    They are kept in the user's cache folder, if it can be written to. A damaged file is set aside, and measured again.
    """
    path = _cached(shapes, batch, threads)
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


def profile_here(shapes: Mapping[LayerShape, Wanted], *, batch: int = 1, threads: int = 1) -> TimeTable:
    """The times of these shapes on this machine, measured now."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_layer_models(Path(scratch) / "layers", shapes, batch=batch, threads=threads)
        try:
            return TimeTable.from_json(json.dumps(device.profile(folder)))
        except device.ProfileError as error:
            raise ModelError(f"the layers cannot be timed: {error}") from error


def read_table(path: Path) -> TimeTable:
    """The table in a file that `basisprune profile` wrote; raises ConfigError if it is damaged or something else."""
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
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); pass the file that basisprune profile wrote"
        ) from error


def _cached(shapes: Mapping[LayerShape, Wanted], batch: int, threads: int) -> Path:
    """The file for these shapes on this device with these versions."""
    runtime = import_module("onnxruntime")
    axes = sorted((str(shape), channel_axes(shape, wanted)) for shape, wanted in shapes.items())
    key = [device.device_name(), device.versions(runtime), batch, threads, axes]
    return cache_folder() / f"times-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"


def cache_folder() -> Path:
    """Where measurements are kept: a folder of this package in the user's cache folder."""
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "basisprune"


def _run(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[Dataflow, Mapping[str, str]]:
    layers = dict(find_layers(model, LAYERS, opaque=BasisPair))
    run = dataflow_of(model, (example_input(model, input_shape),), layers, dict(find_layers(model, BatchNorm)))
    return run, foldable_norms(model, run)


def _calls(model: nn.Module, run: Dataflow, norms: Mapping[str, str]) -> dict[str, tuple[LayerShape, ...]]:
    """The shape of every 2d conv, half of a pair, and norm that stays, for each of its calls."""
    found: dict[str, tuple[LayerShape, ...]] = {}
    for name, calls in run.calls.items():
        layer = model.get_submodule(name)
        conv = layer.basis if isinstance(layer, BasisPair) else layer
        if not isinstance(conv, nn.Conv2d):
            continue
        sizes = [(call.shape[-2], call.shape[-1]) for call in calls]
        if isinstance(layer, BasisPair):
            found[half_name(name, "basis")] = tuple(conv_shape(conv, size) for size in sizes)
            outputs = [(call.output_shape[-2], call.output_shape[-1]) for call in calls]
            groups = layer.scaling.groups
            found[half_name(name, "scaling")] = tuple(_pointwise(size, groups) for size in outputs)
        else:
            found[name] = tuple(conv_shape(conv, size) for size in sizes)
    folded = set(norms.values())
    for name, sizes in run.norm_sizes.items():
        if name not in folded:
            found[name] = tuple(LayerShape("norm", (1, 1), (1, 1), size) for size in sizes)
    return found


def _pointwise(size: Sides, groups: int) -> LayerShape:
    return LayerShape("conv", (1, 1), (1, 1), size, groups)


def _channels(model: nn.Module, name: str, shape: LayerShape) -> Wanted:
    weight = model.get_parameter(f"{name}.weight" if name else "weight")
    if shape.kind != "conv":
        return Wanted(len(weight), 1)
    return Wanted(weight.shape[1] * shape.groups, len(weight))
