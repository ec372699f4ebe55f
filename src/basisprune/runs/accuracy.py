"""The accuracy of a loaded network, on the images that its run held out or on others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from basisprune.budget.proportions import wilson_interval
from basisprune.callback import Callback
from basisprune.data import LabelledImages
from basisprune.data.load import FETCHED, Reading, Source, read_parts, recall
from basisprune.data.manifest import IMAGES, Role, read_manifest
from basisprune.errors import ConfigError, DataError
from basisprune.results import Interval
from basisprune.runs.load import Loaded, refuse_other_tasks
from basisprune.runs.output import is_loadable, refuse_link, same_data
from basisprune.training.evaluation import predict
from basisprune.types import Part


@dataclass(frozen=True)
class ClassCount:
    """How many of a class's images are classified correctly."""

    right: int
    images: int


@dataclass(frozen=True)
class Judgement:
    """The accuracy on a part of the data, with its 95 % interval, in total and by class."""

    data: str
    part: Part
    images: int
    accuracy: float
    interval: Interval
    classes: dict[str, ClassCount]


def accuracy_on(
    loaded: Loaded, data: Source | None = None, part: Part | None = None, *, callback: Callback | None = None
) -> Judgement:
    """The accuracy of the network on labelled images.

    Without `data`, or with the data of the run, the parts are exactly the images that the run wrote down, and the test
    part is used by default. For any other data, all images are used, or a part that the data itself defines; damaged
    ones are left out, as the callback is told. Classes are matched by name, so the data may lack some. Raises
    ConfigError for an unknown part, and DataError for a class that the network does not know, and for images of the run
    that are missing or replaced.
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
    """Which images are classified correctly, and their labels in the network's numbering."""
    unknown = [name for name in images.classes if name not in loaded.classes]
    if unknown:
        raise DataError(
            f"the data has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(loaded.classes[:10])}"
        )
    found = predict(loaded.model, images)
    labels = np.array([loaded.classes.index(name) for name in images.classes])[found.labels]
    return np.equal(found.classes, labels), labels
