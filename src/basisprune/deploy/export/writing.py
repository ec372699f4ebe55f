"""A network as the files of any runtime, compared with PyTorch before anybody sees them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from basisprune.data import prepare
from basisprune.deploy.export.common import LEAST, PixelLayout, WithPreparation, example_for, outputs_of
from basisprune.deploy.export.evaluating import as_pixels
from basisprune.deploy.export.facts import GraphInput
from basisprune.deploy.export.interface import Order, Runtime, said_by
from basisprune.deploy.export.runtimes import RUNTIMES, find_runtime
from basisprune.errors import ConfigError, ModelError
from basisprune.files import user_path, write_together
from basisprune.torchkit.running import relative_difference
from basisprune.transfer.model import known_spec
from basisprune.types import InputSpec

STEM, INT8_STEM = "model", "model.int8"
_WHERE = "export"


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
    """The files written to the folder for a runtime: onnx, openvino, executorch, torch or ncnn.

    The file is called `model` with the runtime's suffix, and with `int8` there is a second one, `model.int8`,
    calibrated on the images. `images` are batches (N, C, H, W) of pixels, or of normalised floats if `prepared`; the
    output of the runtime is compared with PyTorch's on them, or on random ones. Where the format allows, and unless
    the images are prepared, the file takes uint8 pixels (N, H, W, C) of the right size. It knows its classes, by
    default those of the network, and its input.

    The network is not changed. Raises ModelError, and writes nothing, if it cannot be exported or the outputs differ;
    ConfigError for wrong settings, and if a file is there already; MissingExtraError without the runtime's packages.
    """
    runtime = find_runtime(to, _WHERE)
    runtime.require()
    spec, path = known_spec(model), user_path(folder, _WHERE)
    batches = [] if images is None else [images] if isinstance(images, Tensor) else list(images)
    stems = (STEM, INT8_STEM) if int8 else (STEM,)
    _check(runtime, spec, int8=int8, has_images=bool(batches))
    refuse_existing(path, [name for stem in stems for name in runtime.files(stem)], overwrite=overwrite)
    if spec is None:
        raise ModelError(f"{type(model).__name__} does not know its input; set model.input_spec = InputSpec(...)")
    order = make_order(model, runtime, spec, prepared=prepared, classes=classes)
    checks = [as_taken(batch, order_input(order), prepared=prepared) for batch in batches]
    with TemporaryDirectory() as scratch:
        first, *rest = (Path(scratch) / runtime.files(stem)[0] for stem in stems)
        said_by(runtime.title, type(model).__name__, lambda: runtime.write(order, first))
        if rest and runtime.quantise is not None:
            runtime.quantise(first, rest[0], checks)
        written = {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}
        found: dict[str, Agreement] = {}

        def compare(staging: Path) -> None:
            for stem in stems:
                found[stem] = agreement(order, runtime, staging / runtime.files(stem)[0], checks)
            _refuse_difference(runtime, found[STEM], type(model).__name__)

        write_together(path, written, compare)
    sizes = {stem: sum(len(written[name]) for name in runtime.files(stem)) for stem in stems}
    return tuple(Exported(runtime.name, path / runtime.files(s)[0], sizes[s], found[s]) for s in stems)


def make_order(
    model: nn.Module, runtime: Runtime, spec: InputSpec, *, prepared: bool, classes: Sequence[str] | None = None
) -> Order:
    """What the runtime is to write: with the preparation of the images inside, if it can be."""
    layout: PixelLayout | None = "NHWC" if runtime.takes_pixels and not prepared else None
    plain = _in_plain_memory(model)
    network = plain if layout is None else WithPreparation(plain, spec, layout)
    example = example_for(model, None, spec, layout)
    width = outputs_of(network, example).shape[-1]
    names = getattr(model, "classes", None) if classes is None else classes
    if names is not None and len(names) != width:
        raise ConfigError.of(_WHERE, [f"classes: {len(names)} given, the network has {width}"])
    return Order(network, example, spec, layout, None if names is None else tuple(names))


def _in_plain_memory(model: nn.Module) -> nn.Module:
    """A copy whose tensors lie in memory as their dimensions say; some exporters take no others."""
    result = copy.deepcopy(model).cpu()
    for tensor in (*result.parameters(), *result.buffers()):
        tensor.data = tensor.data.contiguous()
    return result


def order_input(order: Order) -> GraphInput:
    """What the file of the order takes."""
    return GraphInput(order.spec, order.layout is not None, order.layout or "NCHW")


def as_taken(images: Tensor, wanted: GraphInput, *, prepared: bool = False) -> Tensor:
    """A batch of images as a file takes it: pixels of the right size, or prepared images."""
    if wanted.prepares:
        return as_pixels(images, wanted.spec, wanted.layout)
    return prepare(images, wanted.spec, prepared=prepared).contiguous()


def agreement(order: Order, runtime: Runtime, path: Path, checks: Iterable[Tensor]) -> Agreement:
    """How near the file at the path is to the network of its order, on these batches or on random ones."""
    run = said_by(runtime.title, path.name, lambda: runtime.open(path, 1))
    batches = list(checks)
    pairs = [
        (outputs_of(order.network, batch).cpu().float(), runtime.scores(run, batch))
        for batch in (batches or [order.example])
    ]
    expected, given = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    difference = relative_difference(expected, given, least=LEAST)
    same = 0.0 if expected.shape != given.shape else float((expected.argmax(1) == given.argmax(1)).double().mean())
    return Agreement(difference, same, sum(map(len, batches)))


def refuse_existing(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raises ConfigError if one of the files is in the folder already, or cannot be replaced."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder")
    for path in (folder / name for name in names):
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise ConfigError(f"{path}: is a link or a folder, which exporting would replace; move it away")
        if not overwrite:
            raise ConfigError(f"{path}: is there already; write it anew with --overwrite (overwrite=True in Python)")


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
        raise ConfigError.of(_WHERE, faults)


def _refuse_difference(runtime: Runtime, found: Agreement, network: str) -> None:
    if not found.difference <= runtime.tolerance:
        raise ModelError(
            f"{network}: {runtime.title}'s output differs from PyTorch's by {found.difference:.2g} of the largest, "
            f"more than {runtime.tolerance:g}; nothing was written"
        )
