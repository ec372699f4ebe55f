"""The output of `compress`, `train` or an export -> a network ready for inference, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from basisprune.data.arrays import distinct_names
from basisprune.deploy.bundle import holds_bundle, load_bundle
from basisprune.deploy.bundle.loading import FILES, read_folder
from basisprune.deploy.export.runtime import FileModel
from basisprune.deploy.export.runtimes import RUNTIMES, runtime_of
from basisprune.deploy.export.writing import INT8_STEM, STEM
from basisprune.errors import BundleError, CheckpointError, ConfigError, ModelError
from basisprune.files import READY, file_digest, open_file
from basisprune.results import RunSummary, Settings
from basisprune.runs.output import BUNDLE, CHECKSUMS, CONFIG, SUMMARY, VERSIONS, refuse_link, settings_of
from basisprune.runs.parsing import read_settings
from basisprune.types import InputSpec

# What a run, and exports of it, write to its folder.
_DELIVERED = frozenset(
    [BUNDLE, *(name for each in RUNTIMES.values() for stem in (STEM, INT8_STEM) for name in each.files(stem))]
)
_READ_OF_A_RUN = (CONFIG, BUNDLE, *(f"{BUNDLE}/{name}" for name in (READY, *FILES)))


@dataclass(frozen=True)
class Loaded:
    """A network in eval mode, with its preprocessing and the names of its classes, which are none for other tasks.

    `settings` are those of the run, empty if it is not in a run's folder, and `folder` is that folder.
    """

    model: nn.Module
    classes: tuple[str, ...]
    spec: InputSpec
    settings: Settings = field(default_factory=dict)
    folder: Path | None = None


def load_any(path: str | Path, *, trust_remote_code: bool = False) -> Loaded:
    """The network in the folder of a run, in a bundle, or in an .onnx or .xml file.

    Raises BundleError if it is none of these; nothing is unpickled, and nothing that a bundle names is imported unless
    `trust_remote_code` allows it.
    """
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
    """The settings of the run that wrote this file or folder, empty if unknown."""
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
    """The names of the classes, or their numbers if they have none; raises ModelError if there are too many or few.

    A network of another task than classification has none.
    """
    if classes is None and is_of_a_task:
        return ()
    shape = model(torch.zeros(1, *spec.shape)).shape
    if len(shape) != 2 or (classes is not None and len(classes) != shape[1]):
        names = "class numbers" if classes is None else f"{len(classes)} classes"
        raise ModelError(f"{where}: has {names} and outputs {tuple(shape)[1:]} numbers; export it again")
    return tuple(str(number) for number in range(shape[1])) if classes is None else distinct_names(classes)
