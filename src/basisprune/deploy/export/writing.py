"""A network as the files of any runtime, compared with PyTorch before anybody sees them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from basisprune.data import is_prepared
from basisprune.deploy.export.exportable import OUTPUT, Exportable, PixelLayout, named_outputs
from basisprune.deploy.export.onnx import LEAST, ONNX
from basisprune.deploy.export.runtime import FileModel, Runtime
from basisprune.deploy.export.runtimes import RUNTIMES, TORCH, find_runtime
from basisprune.errors import ConfigError, DataError, ModelError
from basisprune.files import atomic, user_path, write_together
from basisprune.torchkit.running import relative_difference
from basisprune.training.evaluation import Data, Evaluation, evaluate
from basisprune.transfer.model import known_spec
from basisprune.types import InputSpec

STEM, INT8_STEM = "model", "model.int8"
_TOLERANCE = {torch.float64: 1e-8, torch.float16: 2e-2}  # of outputs in these, in place of the runtime's


@dataclass(frozen=True)
class Agreement:
    """How near a file's outputs are to PyTorch's on this many images; 0 images mean random ones.

    `difference` is the largest in relation to the largest output, `same` the share of images with the same class.
    """

    difference: float
    same: float
    images: int


@dataclass(frozen=True)
class Exported:
    """A file that was written, with the bytes of all files that belong to it, and how it agrees with PyTorch."""

    runtime: str
    path: Path
    bytes: int
    agreement: Agreement


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


def export(
    model: nn.Module,
    to: str,
    folder: str | Path,
    *,
    images: Tensor | Sequence[Tensor] | None = None,
    prepared: bool = False,
    int8: bool = False,
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
) -> tuple[Exported, ...]:
    """Write the network to the folder for a runtime: onnx, openvino, executorch, torch or ncnn.

    The file is called `model` with the runtime's suffix, and with `int8` there is a second one, `model.int8`. Where
    the format allows, and unless the images are prepared, it takes uint8 pixels (N, H, W, C) of the right size.

    Args:
        model: The network, which is not changed.
        to: The name of the runtime.
        folder: Where to write.
        images: Batches (N, C, H, W) of pixels, on which the outputs are compared with PyTorch's; by default random.
        prepared: Whether the images are normalised floats already.
        int8: Whether to write a file in 8 bits too, calibrated on the images.
        classes: Their names, by default those that the network knows.
        overwrite: Whether to replace files that are there.

    Returns:
        The files.

    Raises:
        ModelError: The network cannot be exported, or the outputs differ; nothing is written.
        ConfigError: The settings are wrong, or a file is there already.
        MissingExtraError: The runtime's packages are not installed.
    """
    runtime = find_runtime(to)
    runtime.require()
    path, spec = user_path(folder, "export"), known_spec(model)
    batches = [] if images is None else [images] if isinstance(images, Tensor) else list(images)
    stems = (STEM, INT8_STEM) if int8 else (STEM,)
    _check(runtime, spec, int8=int8, has_images=bool(batches))
    _refuse_existing(path, [name for stem in stems for name in runtime.files(stem)], overwrite=overwrite)
    if spec is None:
        raise ModelError(f"{type(model).__name__} does not know its input; set model.input_spec = InputSpec(...)")
    what = Exportable.of(model, runtime.layout(prepared=prepared), spec=spec, classes=classes)
    if list(what.outputs) != [OUTPUT]:
        raise ModelError(f"{what.name} outputs {', '.join(what.outputs)}; one tensor is needed here")
    checks = [what.input.batch(batch, prepared=prepared) for batch in batches]
    return _write(what, runtime, [path / runtime.files(stem)[0] for stem in stems], checks, checks)


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
    """Write the network to `path` as ONNX for any batch size, with its classes and input spec inside.

    One tensor that the network outputs is called "scores" in the graph; several, in tuples, lists and dicts, are called
    by their keys and places, such as "out" or "output0". Outputs are also compared on random inputs of other batch
    sizes.

    Args:
        model: The network, which is not changed.
        path: The file; one in 8 bits is written beside it as `<name>.int8.onnx`.
        example_inputs: A batch, for networks without an `input_spec`.
        check_inputs: Batches of what the graph takes, on which the outputs are compared with PyTorch's.
        classes: Their names, by default those that the network knows.
        preprocess: Whether the graph takes uint8 pixels, (N, H, W, C) or in this layout, and normalises them itself.
        int8: Batches to calibrate on, a few hundred images; `evaluate_onnx` measures the accuracy of the int8 file.
        input_spec: By default the one that the network knows.

    Raises:
        LayerError: The outputs differ first at this layer; nothing is written.
        ModelError: The network cannot be exported.
        MissingExtraError: The packages of the extra `onnx` are not installed.
    """
    ONNX.require()
    path, spec = Path(path), input_spec or known_spec(model)
    layout: PixelLayout | None = "NHWC" if preprocess is True else preprocess or None
    if layout is not None and (spec is None or layout not in ("NHWC", "NCHW")):
        fault = f"{preprocess!r} given; allowed are False, 'NHWC' and 'NCHW', for a network with an input_spec"
        raise ConfigError.of("export_onnx", [f"preprocess: {fault}"])
    what = Exportable.of(model, layout, spec=spec, example=example_inputs, classes=classes)
    example = what.example
    checks = [*_batches(check_inputs, example), example, torch.cat([example] * 2)[:3], example[:1]]
    calibration = None if int8 is None else _batches(int8, example)
    if calibration == []:
        raise DataError("int8: no batch came; a few hundred images are needed to calibrate on")
    paths = [path] if calibration is None else [path, path.with_suffix(".int8.onnx")]
    full, *rest = _write(what, ONNX, paths, checks, calibration or [])
    report = OnnxReport(full.path, full.bytes, full.agreement.difference)
    for small in rest:
        return replace(report, int8_path=small.path, int8_size=small.bytes, agreement=small.agreement.same)
    return report


def export_program(model: nn.Module, path: str | Path, *, example_inputs: Tensor | None = None) -> Path:
    """Write the network in eval mode as a `.pt2` file, which `torch.export.load` reads, for any batch size.

    `example_inputs` are for networks without an `input_spec`. The outputs are compared before anything is written, and
    the network is not changed. Raises ModelError if it cannot be exported.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ModelError(f"{path}: a program of torch.export ends in .pt2; name it so")
    what = Exportable.of(model, example=example_inputs)
    return _write(what, TORCH, [path], [what.example, what.example[:1]])[0].path


def evaluate_onnx(path: str | Path, data: Data, *, batch_size: int = 128) -> Evaluation:
    """Measure the loss and accuracy of an ONNX file of `export_onnx`, in onnxruntime on the CPU.

    The file runs in a process of its own, with bounded memory and time.

    Args:
        path: The file.
        data: Labelled images, which are prepared as the file's metadata says.
        batch_size: Images per batch.

    Returns:
        The mean loss, the accuracy, and the number of images.

    Raises:
        ModelError: The file cannot be read, or does not say how its images are prepared.
        DataError: There are no images, or prepared ones for a file that prepares them itself.
    """
    file = FileModel(Path(path), ONNX)
    if is_prepared(data) and file.input.layout is not None:
        raise DataError("evaluate_onnx: the file prepares its images itself; pass pixels, not prepared images")
    return evaluate(file, data, batch_size=batch_size)


def agreement(what: Exportable, file: FileModel, checks: Sequence[Tensor]) -> Agreement:
    """Compare the outputs of a file with those of the network it was made from, on these batches or on random ones."""
    batches = list(checks) or [what.example]
    pairs = [(list(named_outputs(what.network, batch).values()), file.outputs(batch)) for batch in batches]
    first = [(expected[0], given[0]) for expected, given in pairs]
    same = [
        (expected.argmax(axis) == given.argmax(axis)).flatten() if expected.shape == given.shape else torch.zeros(1)
        for expected, given in first
        for axis in (1 if expected.dim() > 3 else -1,)  # a map of classes for each place, or scores for each input
    ]
    difference = max(_difference([(one[k], other[k]) for one, other in pairs]) for k in range(len(what.outputs)))
    return Agreement(difference, torch.cat(same).double().mean().item(), sum(map(len, checks)))


def _difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    if any(expected.shape != given.shape for expected, given in pairs):
        return float("inf")
    whole = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in zip(*pairs, strict=True))
    return relative_difference(*whole, least=LEAST)


def _write(
    what: Exportable,
    runtime: Runtime,
    paths: Sequence[Path],
    checks: Sequence[Tensor],
    calibration: Sequence[Tensor] = (),
) -> tuple[Exported, ...]:
    """Write the file at the first path and, calibrated on those batches, an int8 one at the second; all or none."""
    found: list[Exported] = []
    with TemporaryDirectory() as scratch:
        for path in paths:
            place, before = Path(scratch) / path.name, sum(file.stat().st_size for file in Path(scratch).iterdir())
            with runtime.errors(what.name):
                if found and runtime.quantise is not None:
                    runtime.quantise(Path(scratch) / paths[0].name, place, calibration)
                else:
                    runtime.write(what, place)
            file = FileModel(place, runtime, 1, trusted=True)
            near = agreement(what, file, checks)
            if not found:
                _refuse_difference(what, file, near, checks)
            size = sum(file.stat().st_size for file in Path(scratch).iterdir()) - before
            found.append(Exported(runtime.name, path, size, near))
        contents = {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}
    if len(contents) == 1:
        with atomic(paths[0]) as written:
            written.write(contents[paths[0].name])
    else:
        write_together(paths[0].parent, contents, lambda _folder: None)
    return tuple(found)


def _refuse_difference(what: Exportable, file: FileModel, found: Agreement, checks: Sequence[Tensor]) -> None:
    runtime, dtype = file.runtime, next(iter(what.outputs.values())).dtype
    allowed = _TOLERANCE.get(dtype, runtime.tolerance) if runtime in (ONNX, TORCH) else runtime.tolerance
    if found.difference <= allowed:
        return
    if runtime.locate is not None:
        worst = max(list(checks) or [what.example], key=lambda batch: agreement(what, file, [batch]).difference)
        raise runtime.locate(what, worst, found.difference)
    raise ModelError(
        f"{what.name}: {runtime.title}'s output differs from PyTorch's by {found.difference:.2g} of the largest, more "
        f"than {allowed:g}; its forward may do something else when it is traced, and nothing was written"
    )


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
    return [tensor.cpu() for tensor in tensors if isinstance(tensor, Tensor)]


def _refuse_existing(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder")
    for path in (folder / name for name in names):
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path}: is a link or a folder, which exporting would replace; move it away")
        if not overwrite:
            raise ConfigError(f"{path}: exists already; replace it with --overwrite (overwrite=True in Python)")


def _check(runtime: Runtime, spec: InputSpec | None, *, int8: bool, has_images: bool) -> None:
    able = ", ".join(each.name for each in RUNTIMES.values() if each.quantise is not None)
    faults = []
    if int8 and runtime.quantise is None:
        faults.append(f"int8: is not made for {runtime.name}; the runtimes that have it are {able}")
    elif int8 and not has_images:
        faults.append("int8: no images came; a few hundred are needed to calibrate on")
    if spec is not None and spec.channels not in (1, 3):
        faults.append(f"input_spec: {spec.channels} channels given, images have 1 or 3")
    if faults:
        raise ConfigError.of("export", faults)
