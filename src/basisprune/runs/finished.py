"""A finished result: load it in any format, measure its accuracy, classify files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.budget.proportions import wilson_interval
from basisprune.callback import Callback
from basisprune.data import LabelledImages
from basisprune.data import image_files as list_images
from basisprune.data.arrays import distinct_names
from basisprune.data.decode import EXTENSIONS, decode
from basisprune.data.load import FETCHED, Reading, Source, read_parts, recall
from basisprune.data.manifest import IMAGES, Role, read_manifest
from basisprune.data.transforms import prepare
from basisprune.deploy.bundle import holds_bundle, load_bundle
from basisprune.deploy.bundle.loading import FILES, read_folder
from basisprune.deploy.export.runtime import FileModel
from basisprune.deploy.export.runtimes import RUNTIMES, runtime_of
from basisprune.deploy.export.writing import INT8_STEM, STEM
from basisprune.errors import BasisPruneError, BundleError, CheckpointError, ConfigError, DataError, ModelError, pass_on
from basisprune.files import READY, file_digest, open_file
from basisprune.results import Interval, RunSummary, Settings
from basisprune.runs.folder import (
    BUNDLE,
    CHECKSUMS,
    CONFIG,
    SUMMARY,
    VERSIONS,
    is_loadable,
    refuse_link,
    same_data,
    settings_of,
)
from basisprune.runs.parsing import read_settings
from basisprune.torchkit.running import logits_of, placed
from basisprune.training.evaluation import predict
from basisprune.types import InputSpec, Part

# What a run, and exports of it, write to its folder.
_DELIVERED = frozenset(
    [BUNDLE, *(name for each in RUNTIMES.values() for stem in (STEM, INT8_STEM) for name in each.files(stem))]
)
_READ_OF_A_RUN = (CONFIG, BUNDLE, *(f"{BUNDLE}/{name}" for name in (READY, *FILES)))


@dataclass(frozen=True)
class Loaded:
    """A network in eval mode, its classes (none for other tasks), and the folder and settings of its run."""

    model: nn.Module
    classes: tuple[str, ...]
    spec: InputSpec
    settings: Settings = field(default_factory=dict)
    folder: Path | None = None


def load_any(path: str | Path, *, trust_remote_code: bool = False) -> Loaded:
    """Load the network in the folder of a run, in a bundle, or in an .onnx or .xml file."""
    path = Path(path)
    runtime = runtime_of(path)
    if runtime is not None and runtime.is_data and path.is_file():
        for name in runtime.files(path.name.removesuffix(runtime.suffixes[0])):
            _check_file(path.with_name(name))
        network = FileModel(path, runtime).eval()
        classes = _names(network.classes, network, network.input_spec, str(path))
        return Loaded(network, classes, network.input_spec, _settings_beside(path), path.resolve().parent)
    if holds_bundle(path):
        return _from_bundle(path, _settings_beside(path), trust_remote_code)
    if (path / CONFIG).is_file():
        for name in _READ_OF_A_RUN:
            refuse_link(path / name)
        if not holds_bundle(path / BUNDLE):
            raise BundleError(f"{path}: this run has not written its model yet; run its command again to finish it")
        return replace(_from_bundle(path / BUNDLE, settings_of(path), trust_remote_code), folder=path)
    raise BundleError(
        f"{path}: {'is not a result' if path.exists() else 'does not exist'}; pass the output folder of compress or "
        "train, its model/ folder, or an .onnx or .xml file"
    )


def refuse_other_tasks(loaded: Loaded, command: str) -> None:
    """Raises ModelError for a network that is not for classes, of which the command knows nothing."""
    if not loaded.classes:
        raise ModelError(
            f"{command}: this network is no classifier, so its outputs cannot be told as classes; load it with "
            "basisprune.from_pretrained, and judge it with basisprune.evaluate(model, loader, task=...)"
        )


def _settings_beside(path: Path) -> Settings:
    path = path.resolve()
    if path.name not in _DELIVERED or not (path.parent / CONFIG).is_file():
        return {}
    try:
        settings = read_settings(path.parent / CONFIG)
    except ConfigError:  # an unrelated file with the same name
        return {}
    return settings_of(path.parent) if VERSIONS in settings else {}


def _check_file(path: Path) -> None:
    """Raises ModelError for what is no file, or has another checksum than the run that wrote it noted."""
    try:
        open_file(path).close()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    noted = _noted_sum(path.resolve())
    if noted is not None and noted != file_digest(path):
        raise ModelError(
            f"{path}: is damaged or was changed: its checksum is not the one that its run noted; repeat the run's "
            "command to write it again"
        )


def _noted_sum(path: Path) -> str | None:
    """What the summary, or else the bundle, beside the file says its checksum is; None if they say nothing."""
    if path.name not in _DELIVERED:
        return None
    try:
        about = RunSummary.read(path.parent / SUMMARY).files.get(path.name)
    except CheckpointError:  # there is none, it is damaged, or of something else
        about = None
    if about is not None and about.sha256:
        return about.sha256
    try:
        sums = read_folder(path.parent / BUNDLE).config.metrics.get(CHECKSUMS)
    except BundleError:
        return None
    found = sums.get(path.name) if isinstance(sums, dict) else None
    return found if isinstance(found, str) else None


def _from_bundle(folder: Path, settings: Settings, trust_remote_code: bool) -> Loaded:
    bundle = load_bundle(folder, trust_remote_code=trust_remote_code)
    if bundle.input_spec is None:
        raise BundleError(f"{folder}: does not define how images are preprocessed; save a network with an input_spec")
    is_of_a_task = "task" in bundle.metrics
    classes = _names(bundle.classes, bundle.model, bundle.input_spec, str(folder), is_of_a_task=is_of_a_task)
    return Loaded(bundle.model, classes, bundle.input_spec, settings, folder.resolve().parent)


@torch.no_grad()
def _names(
    classes: Sequence[str] | None, model: nn.Module, spec: InputSpec, where: str, *, is_of_a_task: bool = False
) -> tuple[str, ...]:
    """Return the names or numbers of the classes, none for another task; raise ModelError if they do not fit."""
    if classes is None and is_of_a_task:
        return ()
    output = _output(model, torch.zeros(1, *spec.shape))
    if not isinstance(output, Tensor):
        raise ModelError(
            f"{where}: outputs a {type(output).__name__}, and no tensor with a score for each class; load it with "
            "basisprune.from_pretrained"
        )
    shape = output.shape
    if len(shape) != 2 or (classes is not None and len(classes) != shape[1]):
        names = "class numbers" if classes is None else f"{len(classes)} classes"
        raise ModelError(f"{where}: has {names} and outputs {tuple(shape)[1:]} numbers; export it again")
    return tuple(str(number) for number in range(shape[1])) if classes is None else distinct_names(classes)


def _output(model: nn.Module, inputs: Tensor) -> object:
    """What a network outputs, its scores if it names them; raises ModelError where it fails, as one in a file may."""
    try:
        return logits_of(model(placed(inputs, model)))
    except (BasisPruneError, OSError):
        raise
    except Exception as error:
        pass_on(error)
        raise ModelError(
            f"the network fails on inputs {tuple(inputs.shape)}: {type(error).__name__}: {error}; save it again"
        ) from error


@dataclass(frozen=True)
class ClassCount:
    """How many of a class's images are classified correctly."""

    right: int
    images: int


@dataclass(frozen=True)
class Judgement:
    """The accuracy on a part of the data, with its 95% interval, in total and by class."""

    data: str
    part: Part
    images: int
    accuracy: float
    interval: Interval
    classes: dict[str, ClassCount]


def accuracy_on(
    loaded: Loaded, data: Source | None = None, part: Part | None = None, *, callback: Callback | None = None
) -> Judgement:
    """Measure the accuracy of the network on labelled images, whose classes are matched by name.

    The parts of the run's own data (the default) are exactly the images that the run wrote down, of which `part` is the
    test images by default; of any other data, all images are used, or a part that the data itself defines.
    """
    refuse_other_tasks(loaded, "evaluate")
    own = loaded.settings.get("data")
    source = data if data is not None else _own_data(own)
    wanted: Part = part or ("test" if same_data(source, own) else "all")
    parts = parts_of(loaded, source, wanted, Reading(callback=callback))
    hits, labels = zip(*(_hits(loaded, images) for images in parts), strict=True)
    right, labels_all = np.concatenate(hits), np.concatenate(labels)
    classes = {
        name: ClassCount(int(right[labels_all == index].sum()), int((labels_all == index).sum()))
        for index, name in enumerate(loaded.classes)
    }
    interval = wilson_interval(int(right.sum()), len(right))
    return Judgement(str(source), wanted, len(right), float(right.mean()), interval, classes)


def _own_data(own: object) -> str:
    """Return the data of the run, which must still be on this disk: the folder of a stranger fetches nothing."""
    if _is_here(own):
        return str(own)
    said = "the data of this model's run is unknown" if own is None else f"{own!r}, the run's data, is not on this disk"
    raise ConfigError(f"evaluate: {said}; pass --data")


def is_own(loaded: Loaded, data: Source | None) -> bool:
    """Whether this is the data of the network's run, which is there, or nothing was given in its place."""
    own = loaded.settings.get("data")
    return _is_here(own) if data is None else same_data(data, own)


def _is_here(own: object) -> bool:
    """Return whether the data of a run can be read without fetching it."""
    return isinstance(own, str) and not own.startswith(FETCHED) and is_loadable(own)


def parts_of(loaded: Loaded, source: Source, wanted: Part, reading: Reading) -> list[LabelledImages]:
    """The images of that part, or all; a part of the run's own data is what the run wrote down."""
    if wanted != "all" and same_data(source, loaded.settings.get("data")):
        return [_as_in_the_run(loaded, source, wanted, reading)]
    parts = read_parts(source, loaded.spec.image_size, reading, loaded.spec.white).parts
    if wanted == "all":
        return list(parts.values())
    if wanted not in parts or len(parts) == 1:
        raise ConfigError(
            f"evaluate: --part {wanted} given, but {source} is not known to be the data of the model's run, so which "
            "of its images were held out is unknown; pass the run's folder and its data, or omit --part"
        )
    return [parts[wanted]]


def _as_in_the_run(loaded: Loaded, source: Source, wanted: Role, reading: Reading) -> LabelledImages:
    path = (loaded.folder or Path()) / IMAGES
    if not path.exists():
        raise ConfigError(
            f"evaluate: {path} is missing, so which images the run held out is unknown; pass --part all, or other "
            "images by --data"
        )
    refuse_link(path)
    manifest = read_manifest(path)
    if wanted not in manifest.parts:
        raise DataError(f"{source}: has no {wanted} part; pass --part {' or '.join(manifest.parts)}, or all")
    return recall(source, loaded.spec.image_size, manifest, [wanted], reading)[wanted]


def _hits(loaded: Loaded, images: LabelledImages) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    unknown = [name for name in images.classes if name not in loaded.classes]
    if unknown:
        raise DataError(
            f"the data has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(loaded.classes[:10])}"
        )
    found = predict(loaded.model, images)
    labels = np.array([loaded.classes.index(name) for name in images.classes])[found.labels]
    return np.equal(found.classes, labels), labels


_BATCH = 32


@dataclass(frozen=True)
class Answer:
    """The prediction for one file: the probability of each class, most likely first; or the error."""

    file: Path
    classes: tuple[tuple[str, float], ...] = ()
    error: str = ""


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """List the given files, and all images in the given folders; raise DataError for a folder without images."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        found = list_images(path)
        if not found:
            raise DataError(f"{path}: contains no images ({' '.join(EXTENSIONS)})")
        files += found
    return files


def classify_files(loaded: Loaded, files: Iterable[Path], top: int | None = None) -> Iterator[Answer]:
    """One answer for each file, in order; raises ModelError for a network that is no classifier."""
    refuse_other_tasks(loaded, "predict")
    batch: list[tuple[Path, Tensor | str]] = []
    for file in files:
        try:
            batch.append((file, decode(file, loaded.spec.image_size, loaded.spec.white)))
        except DataError as error:
            batch.append((file, str(error)))
        except PermissionError as error:
            batch.append((file, f"{file}: {error.strerror}"))
        if len(batch) == _BATCH:
            yield from _answers(loaded, batch, top)
            batch = []
    yield from _answers(loaded, batch, top)


@torch.inference_mode()
def _answers(loaded: Loaded, batch: list[tuple[Path, Tensor | str]], top: int | None) -> Iterator[Answer]:
    images = [image for _, image in batch if isinstance(image, Tensor)]
    scores = _output(loaded.model, prepare(torch.stack(images), loaded.spec)) if images else torch.empty(0, 1)
    found = cast(Tensor, scores).float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    rows = zip(found.values[:, :top], found.indices[:, :top], strict=True)
    for file, image in batch:
        if isinstance(image, str):
            yield Answer(file, error=image)
        else:
            best, which = next(rows)
            yield Answer(file, tuple(zip([loaded.classes[place] for place in which], best.tolist(), strict=True)))
