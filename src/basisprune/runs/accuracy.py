"""The accuracy of a loaded network, on the images that its run held out or on others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from basisprune.data import LabelledImages, load_data
from basisprune.data.load import Source
from basisprune.errors import ConfigError, DataError
from basisprune.results import Interval
from basisprune.runs.job import load_images
from basisprune.runs.load import Loaded
from basisprune.runs.options import Options, configure
from basisprune.runs.output import is_loadable
from basisprune.training.intervals import wilson_interval
from basisprune.training.predict import predict
from basisprune.types import dotted

_SPLITTING = ("seed", "val_fraction", "test_fraction", "limit")
Part: TypeAlias = Literal["train", "val", "test", "all"]


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


def accuracy_on(loaded: Loaded, data: Source | None = None, part: Part | None = None) -> Judgement:
    """The accuracy of the network on labelled images.

    Without `data`, or with the data of the run, images are split as in the run, and the test part is used by
    default. For any other data, all images are used, or a part that the data itself defines. Classes are matched
    by name, so the data may lack some. Raises ConfigError for an unknown part, and DataError for a class that the
    network does not know.
    """
    own = loaded.settings.get("data")
    source = data if data is not None else _own_data(own)
    wanted: Part = part or ("test" if _same(source, own) else "all")
    parts = _parts(loaded, source, wanted)
    hits, labels = zip(*(_hits(loaded, images) for images in parts), strict=True)
    right, labels_all = np.concatenate(hits), np.concatenate(labels)
    classes = {
        name: ClassCount(int(right[labels_all == index].sum()), int((labels_all == index).sum()))
        for index, name in enumerate(loaded.classes)
    }
    interval = wilson_interval(int(right.sum()), len(right))
    return Judgement(str(source), wanted, len(right), float(right.mean()), interval, classes)


def _own_data(own: object) -> str:
    """The data of the run, which must still exist."""
    if isinstance(own, str) and is_loadable(own):
        return own
    said = "the data of this model's run is unknown" if own is None else f"{own!r}, the run's data, does not exist"
    raise ConfigError(f"evaluate: {said}; pass --data")


def _same(source: object, own: object) -> bool:
    """Whether two names refer to the same data, however the path is written."""
    if not isinstance(source, str | os.PathLike) or not isinstance(own, str) or not is_loadable(own):
        return False
    return str(source) == own or Path(source).expanduser().resolve() == Path(own).expanduser().resolve()


def _parts(loaded: Loaded, source: Source, wanted: Part) -> list[LabelledImages]:
    """The images of that part, or all; a part that the run drew at random is drawn the same way again."""
    known = _same(source, loaded.settings.get("data"))
    parts = (_as_the_run_did if known and wanted != "all" else _undivided)(loaded, source)
    if wanted == "all":
        return list(parts.values())
    if not known and (wanted not in parts or len(parts) == 1):
        raise ConfigError(
            f"evaluate: --part {wanted} given, but {source} is not known to be the data of the model's run, so which "
            "of its images were held out is unknown; pass the run's folder and its data, or omit --part"
        )
    if wanted not in parts:
        raise DataError(f"{source}: has no {wanted} part; pass --part {' or '.join(parts)}, or all")
    return [parts[wanted]]


def _undivided(loaded: Loaded, source: Source) -> dict[str, LabelledImages]:
    return load_data(source, size=loaded.spec.size, val_fraction=0.0, test_fraction=0.0).parts


def _as_the_run_did(loaded: Loaded, source: Source) -> dict[str, LabelledImages]:
    run = configure(cast("Options", {name: value for name, value in loaded.settings.items() if name in _SPLITTING}))
    return load_images(source, loaded.spec.size, run).parts


def _hits(loaded: Loaded, images: LabelledImages) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which images are classified correctly, and their labels in the network's numbering."""
    unknown = [name for name in images.classes if name not in loaded.classes]
    if unknown:
        raise DataError(
            f"the data has the class {unknown[0]!r}, which the model does not know; its classes are "
            f"{', '.join(loaded.classes[:10])}"
        )
    found = predict(loaded.model, images, prepared=_is_prepared(loaded))
    labels = np.array([loaded.classes.index(name) for name in images.classes])[found.labels]
    return np.equal(found.classes, labels), labels


def _is_prepared(loaded: Loaded) -> bool:
    """Whether the run's images are already normalised floats."""
    return dict(dotted(loaded.settings)).get("recipe.train.prepared") is True
