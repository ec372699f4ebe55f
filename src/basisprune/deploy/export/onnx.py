"""A network as an ONNX file, compared with PyTorch before anybody sees it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from basisprune.deploy.export.common import (
    LEAST,
    OUTPUT,
    PixelLayout,
    WithPreparation,
    example_for,
    named_outputs,
)
from basisprune.deploy.export.differences import module_scopes, name_difference
from basisprune.deploy.export.facts import for_openvino, for_ultralytics, input_facts
from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.deploy.export.quantise import quantise
from basisprune.deploy.export.runner import PREFIX
from basisprune.deploy.export.runtime import PACKAGES, notes_in, open_session, require_onnx, run_all, to_proto
from basisprune.errors import ConfigError, DataError, ModelError
from basisprune.files import atomic
from basisprune.torchkit.running import relative_difference
from basisprune.transfer.model import known_spec
from basisprune.types import InputSpec

if TYPE_CHECKING:
    from onnx import ModelProto

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2}


@dataclass(frozen=True)
class OnnxReport:
    """An ONNX file that was written: `difference` is the largest from PyTorch, in relation to the largest output.

    `agreement` is the share of check inputs on which the int8 file names the same class as PyTorch.
    """

    path: Path
    size: int
    difference: float
    int8_path: Path | None = None
    int8_size: int | None = None
    agreement: float | None = None


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    example_inputs: Tensor | None = None,
    check_inputs: Tensor | Iterable[object] | None = None,
    classes: Sequence[str] | None = None,
    preprocess: bool | PixelLayout = False,
    int8: Iterable[object] | None = None,
    input_spec: InputSpec | None = None,
) -> OnnxReport:
    """What was written to `path`: the network as ONNX for any batch size, with its classes and input spec inside.

    The network may output one tensor, which the graph calls "scores", or several in tuples, lists and dicts, which
    it calls by their keys and places, such as "out" or "output0".
    With `preprocess` the graph takes uint8 pixels of the right size, (N, H, W, C) or as the layout says, and
    normalises them itself; otherwise prepared images. onnxruntime's output is compared with PyTorch's on
    `check_inputs`, a batch or batches of what the graph takes (tensors, or tuples that start with them), and
    on random ones of other batch sizes. `int8` are batches to calibrate on, a few hundred images: then a
    second file, `<name>.int8.onnx`, is written, whose accuracy `evaluate_onnx` measures. `classes` and
    `input_spec` are by default what the network knows itself.

    The network is not changed. Raises LayerError, naming the first layer that differs, and writes nothing, if
    the outputs do not agree; ModelError if the network cannot be exported; MissingExtraError without the
    packages of the extra `onnx`.
    """
    require_onnx()
    path, spec = Path(path), input_spec or known_spec(model)
    layout = _layout(preprocess, spec)
    example = example_for(model, example_inputs, spec, layout)
    network = model if spec is None or layout is None else WithPreparation(model, spec, layout)
    checks = [*_batches(check_inputs, example), example, torch.cat([example] * 2)[:3], example[:1]]
    calibration = None if int8 is None else _batches(int8, example)
    if calibration == []:
        raise DataError("int8: no batch came; a few hundred images are needed to calibrate on")
    classes = getattr(model, "classes", None) if classes is None else classes
    outputs = named_outputs(network, example)
    width = next(iter(outputs.values())).shape[-1]
    if classes is not None and list(outputs) == [OUTPUT] and len(classes) != width:
        raise ConfigError.of("export_onnx", [f"classes: {len(classes)} given, the network has {width}"])
    proto = to_proto(network, example, list(outputs))
    _describe(proto, _notes(spec, layout, example, classes and list(classes)))
    _describe(proto, _preparing(proto, layout))
    difference = _compare(network, proto, checks)
    strip(proto)
    with atomic(path) as file:
        file.write(proto.SerializeToString())
    report = OnnxReport(path, path.stat().st_size, difference)
    if calibration is None:
        return report
    small = quantise(path, path.with_suffix(".int8.onnx"), calibration)
    return replace(
        report, int8_path=small, int8_size=small.stat().st_size, agreement=_agreement(network, small, checks)
    )


def _layout(preprocess: bool | PixelLayout, spec: InputSpec | None) -> PixelLayout | None:
    """How the graph's pixels lie, None for prepared images."""
    layout: PixelLayout | None = "NHWC" if preprocess is True else preprocess or None
    if layout is not None and (spec is None or layout not in ("NHWC", "NCHW")):
        fault = f"{preprocess!r} given; allowed are False, 'NHWC' and 'NCHW', for a network with an input_spec"
        raise ConfigError.of("export_onnx", [f"preprocess: {fault}"])
    return layout


def _batches(inputs: Tensor | Iterable[object] | None, example: Tensor) -> list[Tensor]:
    """The inputs as a list of batches like the example; raises DataError for any other."""
    batches = [] if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
    tensors = [batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches]
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape[1:]) != (example.dtype, example.shape[1:]):
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(
                f"export_onnx: a batch of {found} given, the graph takes {example.dtype} "
                f"(N, {', '.join(map(str, example.shape[1:]))})"
            )
    return [tensor.to(example.device) for tensor in tensors if isinstance(tensor, Tensor)]


def _notes(
    spec: InputSpec | None, layout: PixelLayout | None, example: Tensor, classes: Sequence[str] | None
) -> dict[str, str]:
    """What the file says of itself: in our own words and, where it knows all of it, in those of other readers."""
    facts = {"input": input_facts(spec, layout, example), "classes": classes}
    notes = {f"{PREFIX}{name}": json.dumps(value) for name, value in facts.items()}
    if spec is None or classes is None:
        return notes
    known = for_openvino(spec, layout, classes)
    return notes | for_ultralytics(spec, classes) | {f"model_info {name}": value for name, value in known.items()}


def _preparing(proto: ModelProto, layout: PixelLayout | None) -> dict[str, str]:
    """The nodes that prepare the images, which `quantise` leaves alone: what comes before all of the network's layers.

    A folded network is a graph, whose operations between layers name no module that they come from.
    """
    constants = {constant.name for constant in proto.graph.initializer}
    before, names = {"", *constants, *(each.name for each in proto.graph.input)}, []
    for node in proto.graph.node:
        inside = any(f"{scope}.".startswith("network.") for scope in module_scopes(node))
        if layout is not None and not inside and before.issuperset(node.input):
            before.update(node.output)
            names.append(node.name)
    return {f"{PREFIX}preparing": json.dumps(names)}


def _describe(proto: ModelProto, notes: Mapping[str, str]) -> None:
    """Writes the notes into the model's metadata."""
    for key, value in notes.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value


def strip(proto: ModelProto) -> None:
    """Takes out what only serves to debug the exporter: traces with paths of this machine, and derived shapes."""
    for part in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del part.metadata_props[:]
    del proto.graph.value_info[:]


def _compare(network: nn.Module, proto: ModelProto, checks: Sequence[Tensor]) -> float:
    """The largest difference between onnxruntime and PyTorch; raises LayerError if it is more than rounding."""
    worst = 0.0
    try:
        session = open_session(proto.SerializeToString())
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run {type(network).__name__}: {str(error)[:500]}") from error
    for inputs in checks:
        wanted = named_outputs(network, inputs).values()
        try:
            found = run_all(session, inputs)
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run {type(network).__name__}: {str(error)[:500]}") from error
        for expected, given in zip(wanted, found, strict=True):
            difference = relative_difference(expected.cpu(), given, least=LEAST)
            if difference > _TOLERANCE.get(expected.dtype, 2e-2):
                raise name_difference(network, copy.deepcopy(proto), inputs, difference)
            worst = max(worst, difference)
    return worst


def _agreement(network: nn.Module, path: Path, checks: Sequence[Tensor]) -> float:
    """On how many inputs, or places of them, both name the same class; by the first output if there are several."""
    session = open_session(path)
    same = []
    for inputs in checks:
        expected = next(iter(named_outputs(network, inputs).values())).cpu()
        axis = 1 if expected.dim() > 3 else -1  # a map of classes for each place, or scores for each input
        same.append((expected.argmax(axis) == run_all(session, inputs)[0].argmax(axis)).flatten())
    return torch.cat(same).double().mean().item()


def onnx_of(order: Order) -> ModelProto:
    """The network as an onnx.ModelProto that knows its classes and its input."""
    proto = to_proto(order.network, order.example)
    _describe(proto, _notes(order.spec, order.layout, order.example, order.classes))
    _describe(proto, _preparing(proto, order.layout))
    strip(proto)
    return proto


def _write(order: Order, path: Path) -> None:
    path.write_bytes(onnx_of(order).SerializeToString())


def _open(path: Path, threads: int) -> Run:
    session = open_session(path, threads)
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


ONNX_RUNTIME = Runtime(
    name="onnx",
    title="ONNX Runtime",
    what="for ONNX Runtime and others",
    packages=PACKAGES,
    suffixes=(".onnx",),
    write=_write,
    open=_open,
    notes=lambda path: notes_in(open_session(path)),
    quantise=quantise,
)
