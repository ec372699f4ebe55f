"""A float ONNX file -> int8, calibrated on images, by onnxruntime."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from basisprune.deploy.export.common import INPUT
from basisprune.deploy.export.runtime import feed_of, open_session
from basisprune.errors import ModelError
from basisprune.files import replacing

if TYPE_CHECKING:
    from onnx import ModelProto

_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SHARES = (0.125, 0.25, 0.5)
"""The shares of layers that stay in float, one after the other, until the file is good enough."""


class _Batches:
    """What onnxruntime asks for calibration data."""

    def __init__(self, name: str, batches: Sequence[Tensor]) -> None:
        self.feeds = iter([{name: batch.cpu().numpy()} for batch in batches])

    def get_next(self) -> dict[str, NDArray[np.generic]] | None:
        """The next batch, or None."""
        return next(self.feeds, None)


@dataclass(frozen=True)
class Quantised:
    """An int8 file: how many of its layers stay in float, of all, and whether it is good enough."""

    in_float: int
    layers: int
    accepted: bool


def quantise(source: Path, target: Path, batches: Sequence[Tensor], keep: Sequence[str] = ()) -> Path:
    """The int8 file at `target`: weights per channel, activations by their range on the batches.

    Weights use seven of eight bits, so that no processor overflows. The nodes named in `keep` stay as they are, and
    so do those that prepare the images, and the metadata. Raises ModelError where onnxruntime cannot, and leaves no
    file.
    """
    tools = import_module("onnxruntime.quantization")
    with replacing(target) as partial, _quiet():
        try:
            tools.quantize_static(
                source,
                partial,
                _Batches(INPUT, batches),
                quant_format=tools.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                nodes_to_exclude=[*_preparing(_read(source)), *keep],
            )
        except Exception as error:  # onnxruntime's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{source}: onnxruntime cannot quantise it ({reason}); use it as it is") from error
    return target


def quantise_within(
    source: Path, target: Path, batches: Sequence[Tensor], accepts: Callable[[Path], bool]
) -> Quantised:
    """What came of the int8 file at `target`: it keeps layers in float, those that hurt most, until it is accepted.

    `accepts` judges a file. If none is accepted, the last is left there, with half of the layers in float.
    """
    quantise(source, target, batches)
    layers = [node.name for node in _read(source).graph.node if node.op_type in _LAYERS]
    if accepts(target):
        return Quantised(0, len(layers), accepted=True)
    worst = _by_harm(source, target, batches[0])
    count = 0
    for share in _SHARES:
        count = math.ceil(share * len(worst))
        quantise(source, target, batches, worst[:count])
        if accepts(target):
            return Quantised(count, len(layers), accepted=True)
    return Quantised(count, len(layers), accepted=False)


def _by_harm(source: Path, quantised: Path, batch: Tensor) -> list[str]:
    """The layers, those first behind which the relative error grows most from one layer to the next."""
    outputs = {node.output[0]: node.name for node in _read(source).graph.node if node.op_type in _LAYERS}
    wanted, made = _watched(source, outputs, batch), _watched(quantised, outputs, batch)
    harm, before = {}, 0.0
    for name in outputs:
        size = float(np.linalg.norm(wanted[name])) or 1.0
        error = float(np.linalg.norm(wanted[name] - made[name])) / size if name in made else before
        harm[outputs[name]] = error - before
        before = error
    return sorted(harm, key=lambda layer: -harm[layer])


def _watched(path: Path, names: Sequence[str] | dict[str, str], batch: Tensor) -> dict[str, NDArray[np.float64]]:
    """The values of those tensors in a file, as far as they are there."""
    onnx = import_module("onnx")
    proto = _read(path)
    there = {output for node in proto.graph.node for output in node.output}
    known = {output.name for output in proto.graph.output}
    found = [name for name in names if name in there]
    added = [onnx.helper.make_empty_tensor_value_info(name) for name in found if name not in known]
    proto.graph.output.extend(added)
    session = open_session(proto.SerializeToString())
    values = session.run(found, feed_of(session, batch))
    return {name: np.asarray(value, dtype=np.float64) for name, value in zip(found, values, strict=True)}


def _read(path: Path) -> ModelProto:
    proto: ModelProto = import_module("onnx").load(str(path))
    return proto


def _preparing(proto: ModelProto) -> list[str]:
    """The nodes that prepare the images, as the file's metadata says."""
    notes = {entry.key: entry.value for entry in proto.metadata_props}
    names: list[str] = json.loads(notes.get("basisprune.preparing", "[]"))
    return names


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that onnxruntime logs: the graph comes from an exporter that merged norms already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
