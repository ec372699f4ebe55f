"""Networks for OpenVINO: an .xml file and its .bin, made from ONNX; int8 by nncf."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from basisprune.deploy.export.facts import for_openvino
from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.deploy.export.onnx import onnx_of
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
    """The compiled file in single precision: left to itself, OpenVINO takes bfloat16 where a processor has it."""
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = _core()

    @cache
    def request(count: int) -> Any:
        return core.compile_model(_for_batches(core.read_model(path), count), "CPU", config).create_infer_request()

    def run(batch: NDArray[np.generic]) -> NDArray[np.generic]:
        ready = request(len(batch))
        ready.get_input_tensor().data[:] = batch  # a tensor made for each call would take longer than the copy
        ready.infer(share_outputs=True)
        return np.array(ready.get_output_tensor().data)

    request(1)
    return run


def _notes(path: Path) -> dict[str, str]:
    model = _core().read_model(path)
    return {name: str(model.get_rt_info([_OURS, name]).value) for name in ("input", "classes")}


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
