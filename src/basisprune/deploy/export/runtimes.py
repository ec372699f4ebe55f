"""The runtimes, ONNX Runtime's apart, and the table of all; a new one is a value here, and an entry in the table."""

from __future__ import annotations

import io
import json
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from basisprune.deploy.export.exportable import Exportable
from basisprune.deploy.export.onnx import ONNX, proto_of, without_advice
from basisprune.deploy.export.runtime import Runtime
from basisprune.deploy.export.sandboxed import PREFIX, Array, Opened, open_openvino
from basisprune.errors import ConfigError, ModelError, nearest
from basisprune.files import parse_json, read_bytes
from basisprune.torchkit.running import mode

_NOTES = ("input", "classes")
_PARAM, _BIN, _JSON = ".ncnn.param", ".ncnn.bin", ".ncnn.json"
_PNNX_SECONDS, _MOST_JSON = 600, 16 << 20


@contextmanager
def _exporting(what: Exportable) -> Iterator[None]:
    """Run an exporter in eval mode and without its warnings; its errors become ModelErrors."""
    with torch.no_grad(), mode(what.network, training=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters warn of their own affairs
        try:
            yield
        except Exception as error:  # of many kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{what.name} cannot be exported: {reason}") from error


# ------------------------------------------------------------------------------------------- OpenVINO, made from ONNX


def _write_openvino(what: Exportable, path: Path) -> None:
    model = import_module("openvino").Core().read_model(proto_of(what).SerializeToString())
    for section, notes in (("basisprune", what.notes), ("model_info", what.openvino_notes)):
        for name, value in notes.items():
            model.set_rt_info(value, [section, name])
    _save_openvino(model, path)


def _quantise_openvino(source: Path, target: Path, batches: Sequence[Tensor]) -> None:
    """Weights and activations in 8 bits by nncf, by their ranges on the batches."""
    with _nncf() as nncf:
        images = [batch.cpu().numpy() for batch in batches]
        try:
            model = _for_batches(import_module("openvino").Core().read_model(source), -1)
            mixed = nncf.QuantizationPreset.MIXED  # activations of either sign use all of their 256 values
            model = nncf.quantize(model, nncf.Dataset(images), subset_size=len(images), preset=mixed)
        except Exception as error:  # nncf's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{source}: nncf cannot quantise it ({reason}); use it as it is") from error
    _save_openvino(model, target)


def _save_openvino(model: Any, path: Path) -> None:
    """Write the model for one image: left open, the size of batches takes OpenVINO more time than a small network."""
    import_module("openvino").save_model(_for_batches(model, 1), path, compress_to_fp16=False)


def _for_batches(model: Any, count: int) -> Any:
    _, *shape = model.input().get_partial_shape()
    model.reshape([count, *shape])
    return model


@contextmanager
def _nncf() -> Iterator[Any]:
    """Import nncf without its bars and advice, and without its reports on its use to its makers."""
    before = os.environ.get("NNCF_CI")
    os.environ["NNCF_CI"] = "1"
    try:
        with without_advice(), redirect_stdout(io.StringIO()):
            yield import_module("nncf")
    finally:
        if before is None:
            del os.environ["NNCF_CI"]
        else:
            os.environ["NNCF_CI"] = before


OPENVINO = Runtime(
    name="openvino",
    title="OpenVINO",
    what="for OpenVINO, on Intel's and other processors",
    packages=(*ONNX.packages, "openvino", "nncf"),
    suffixes=(".xml", ".bin"),
    write=_write_openvino,
    open=open_openvino,
    quantise=_quantise_openvino,
)


# ------------------------------------------------------------------------------------------- ExecuTorch, by XNNPACK


def _write_executorch(what: Exportable, path: Path) -> None:
    lower = import_module("executorch.exir").to_edge_transform_and_lower
    xnnpack = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    notes = {f"{PREFIX[:-1]}_{name}": text for name, text in what.notes.items()}
    with _exporting(what):
        program = torch.export.export(what.network, (what.example[:1].clone(),))
        lowered = lower(program, partitioner=[xnnpack.XnnpackPartitioner()], constant_methods=notes)
        path.write_bytes(lowered.to_executorch().buffer)


def _open_executorch(path: Path, threads: int) -> Opened:
    import_module("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(threads)
    program = import_module("executorch.runtime").Runtime.get().load_program(path)
    notes = {name: program.load_method(f"{PREFIX[:-1]}_{name}").execute([])[0] for name in _NOTES}
    method = program.load_method("forward")

    def run(batch: Array, _program: object = program) -> list[Array]:  # which the method does not keep alive
        return [scores.numpy() for scores in method.execute([torch.as_tensor(batch)])]

    return notes, run


EXECUTORCH = Runtime(
    name="executorch",
    title="ExecuTorch",
    what="for ExecuTorch with XNNPACK, on phones and boards; takes one image",
    packages=("executorch",),
    suffixes=(".pte",),
    write=_write_executorch,
    open=_open_executorch,
    takes_batches=False,
)


# ------------------------------------------------------------------------------------------- torch.export


def _write_torch(what: Exportable, path: Path) -> None:
    with _exporting(what):
        shapes = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(what.network, (what.example,), dynamic_shapes=shapes)
        program.module()  # its parts may have names that torch keeps for itself
    torch.export.save(program, path, extra_files={f"{PREFIX}{name}": text for name, text in what.notes.items()})


def _open_torch(path: Path, _threads: int) -> Opened:
    texts = {f"{PREFIX}{name}": "" for name in _NOTES}
    program = torch.export.load(path, extra_files=texts).module()

    @torch.no_grad()
    def run(batch: Array) -> list[Array]:
        return [output.numpy() for output in tree_leaves(program(torch.as_tensor(batch)))]

    return {name.removeprefix(PREFIX): text for name, text in texts.items()}, run


TORCH = Runtime(
    name="torch",
    title="torch.export",
    what="for torch, without the code that made it",
    packages=(),
    suffixes=(".pt2",),
    write=_write_torch,
    open=_open_torch,
)


# ------------------------------------------------------------------------------------------- ncnn, by pnnx


def _write_ncnn(what: Exportable, path: Path) -> None:
    example, program = what.example[:1].clone(), import_module("pnnx").EXEC_PATH
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "model.pt"
        with _exporting(what):  # pnnx reads nothing but traces, which torch calls old
            torch.jit.trace(what.network, example).save(str(source))
        shape = ",".join(map(str, example.shape))
        command = [program, source.name, f"inputshape=[{shape}]f32", "fp16=0"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_PNNX_SECONDS, check=False)
        files = {suffix: source.with_name(f"model{suffix}") for suffix in (_PARAM, _BIN)}
        if done.returncode or not all(file.is_file() for file in files.values()):
            reason = " ".join(done.stderr.split())[-500:]
            raise ModelError(f"{what.name} cannot be exported: pnnx failed ({reason})")
        for suffix, file in files.items():
            _beside(path, suffix).write_bytes(file.read_bytes())
    _beside(path, _JSON).write_text(json.dumps(what.notes))


def _open_ncnn(path: Path, threads: int) -> Opened:
    ncnn = import_module("ncnn")
    notes = parse_json(read_bytes(_beside(path, _JSON), most=_MOST_JSON))
    net = ncnn.Net()
    net.opt.use_vulkan_compute, net.opt.num_threads = False, threads
    if net.load_param(str(path)) or net.load_model(str(_beside(path, _BIN))):
        raise ModelError(f"{path}: ncnn cannot read it; export it again")

    def run(batch: Array) -> list[Array]:
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(np.ascontiguousarray(batch[0])).clone())
        failed, scores = extractor.extract("out0")
        if failed:
            raise ModelError(f"{path}: ncnn cannot run it")
        return [np.array(scores)[None]]

    return {key: str(value) for key, value in notes.items()} if isinstance(notes, dict) else {}, run


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name.removesuffix(_PARAM) + suffix)


NCNN = Runtime(
    name="ncnn",
    title="ncnn",
    what="for ncnn, on phones and boards; takes one prepared image",
    packages=("ncnn", "pnnx"),
    suffixes=(_PARAM, _BIN, _JSON),
    write=_write_ncnn,
    open=_open_ncnn,
    takes_pixels=False,
    takes_batches=False,
    tolerance=1e-3,
)


RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (ONNX, OPENVINO, EXECUTORCH, TORCH, NCNN)}


def find_runtime(name: str, where: str = "export") -> Runtime:
    """Return the runtime of that name; raises ConfigError that names the nearest.

    >>> find_runtime("open-vino")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: export: 'open-vino' is not a runtime. Did you mean 'openvino'? \
Allowed are onnx, openvino, executorch, torch, ncnn
    """
    if name not in RUNTIMES:
        hint = f"{name!r} is not a runtime.{nearest(name, RUNTIMES)} Allowed are {', '.join(RUNTIMES)}"
        raise ConfigError.of(where, [hint])
    return RUNTIMES[name]


def runtime_of(path: Path) -> Runtime | None:
    """Return the runtime that opens a file of this name, None where there is none.

    >>> runtime_of(Path("model.int8.xml")).title
    'OpenVINO'
    """
    return next((runtime for runtime in RUNTIMES.values() if path.name.endswith(runtime.suffixes[0])), None)
