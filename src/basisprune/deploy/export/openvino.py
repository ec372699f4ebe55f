"""Networks for OpenVINO: an .xml file and its .bin, made from ONNX; int8 by nncf."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from basisprune.deploy.export.facts import for_openvino
from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.deploy.export.onnx import onnx_of
from basisprune.deploy.export.runner import open_openvino
from basisprune.deploy.export.runtime import PACKAGES
from basisprune.errors import ModelError

_OURS, _THEIRS = "basisprune", "model_info"


def _write(order: Order, path: Path) -> None:
    model = _core().read_model(onnx_of(order).SerializeToString())
    for name, value in order.notes.items():
        model.set_rt_info(value, [_OURS, name])
    for name, value in for_openvino(order.spec, order.layout, order.names).items():
        model.set_rt_info(value, [_THEIRS, name])
    _save(model, path)


def _open(path: Path, threads: int) -> Run:
    return open_openvino(str(path), threads)[1]


def _notes(path: Path) -> Mapping[str, str]:
    return open_openvino(str(path), 1)[0]


def _quantise(source: Path, target: Path, batches: Sequence[Tensor]) -> None:
    """Weights and activations in 8 bits, by their ranges on the batches."""
    with _alone():
        nncf = import_module("nncf")
        images = [batch.cpu().numpy() for batch in batches]
        try:
            model = _for_batches(_core().read_model(source), -1)
            model = nncf.quantize(model, nncf.Dataset(images), subset_size=len(images), preset=_mixed(nncf))
        except Exception as error:  # nncf's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{source}: nncf cannot quantise it ({reason}); use it as it is") from error
    _save(model, target)


def _save(model: Any, path: Path) -> None:
    """Writes the model for one image: left open, the size of batches takes OpenVINO more time than a small network."""
    import_module("openvino").save_model(_for_batches(model, 1), path, compress_to_fp16=False)


def _for_batches(model: Any, count: int) -> Any:
    """The model, which takes batches of this size from now on, or of any for -1."""
    _, *shape = model.input().get_partial_shape()
    model.reshape([count, *shape])
    return model


def _mixed(nncf: Any) -> object:
    """Activations of either sign use all of their 256 values."""
    return nncf.QuantizationPreset.MIXED


def _core() -> Any:
    return import_module("openvino").Core()


@contextmanager
def _alone() -> Iterator[None]:
    """Without nncf's bars and advice, and without its reports on its use to its makers."""
    before, level = os.environ.get("NNCF_CI"), logging.root.manager.disable
    os.environ["NNCF_CI"] = "1"
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        if before is None:
            del os.environ["NNCF_CI"]
        else:
            os.environ["NNCF_CI"] = before


OPENVINO = Runtime(
    name="openvino",
    title="OpenVINO",
    what="for OpenVINO, on Intel's and other processors",
    packages=(*PACKAGES, "openvino", "nncf"),
    suffixes=(".xml", ".bin"),
    write=_write,
    open=_open,
    notes=_notes,
    quantise=_quantise,
)
