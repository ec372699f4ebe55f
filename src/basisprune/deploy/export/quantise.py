"""A float ONNX file -> int8, calibrated on images, by onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from basisprune.errors import ModelError
from basisprune.files import replacing


class _Batches:
    """What onnxruntime asks for calibration data."""

    def __init__(self, name: str, batches: Sequence[Tensor]) -> None:
        self.feeds = iter([{name: batch.cpu().numpy()} for batch in batches])

    def get_next(self) -> dict[str, NDArray[np.generic]] | None:
        """The next batch, or None."""
        return next(self.feeds, None)


def quantise(source: Path, target: Path, input_name: str, batches: Sequence[Tensor], keep: Sequence[str] = ()) -> Path:
    """The int8 file at `target`: weights per channel, activations by their range on the batches.

    Weights use seven of eight bits, so that no processor overflows. The nodes named in `keep` stay as they are,
    and so does the metadata. Raises ModelError where onnxruntime cannot, and leaves no file.
    """
    tools = import_module("onnxruntime.quantization")
    with replacing(target) as partial, _quiet():
        try:
            tools.quantize_static(
                source,
                partial,
                _Batches(input_name, batches),
                quant_format=tools.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                nodes_to_exclude=list(keep),
            )
        except Exception as error:  # onnxruntime's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{source}: onnxruntime cannot quantise it ({reason}); use it as it is") from error
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that onnxruntime logs: the graph comes from an exporter that merged norms already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
