"""How often a network that was loaded is right, on the images that a run held out or on others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from basisprune.data import LabelledImages, load_data
from basisprune.errors import ConfigError, DataError
from basisprune.runs.load import Loaded
from basisprune.runs.settings import is_loadable
from basisprune.training.intervals import wilson_interval
from basisprune.training.predict import predict

_SPLITTING = ("seed", "val_fraction", "test_fraction", "limit")


def accuracy_on(loaded: Loaded, data: Any | None = None, part: str | None = None) -> dict[str, Any]:
    """The accuracy with its interval, in total and by class, as JSON values.

    Without `data`, or with that of the run, the images are split as the run did, and by default those of the
    test part are looked at; of any other data all images are, or a part that it has itself. Classes are matched
    by name, so that the data may lack some. Raises ConfigError for a part that is not known, DataError for a
    class that the network does not know.
    """
    own = loaded.settings.get("data")
    source = own if data is None else data
    if data is None and not is_loadable(own):
        said = "this model does not know its run's data" if own is None else f"{own!r}, the run's data, is not there"
        raise ConfigError(f"evaluate: {said}; pass --data")
    wanted = part or ("test" if _same(source, own) else "all")
    parts = _parts(loaded, source, wanted)
    hits, labels = zip(*(_hits(loaded, images) for images in parts), strict=True)
    right, labels_all = np.concatenate(hits), np.concatenate(labels)
    classes = {
        name: {"right": int(right[labels_all == index].sum()), "images": int((labels_all == index).sum())}
        for index, name in enumerate(loaded.classes)
    }
    return {
        "data": str(source),
        "part": wanted,
        "images": len(right),
        "accuracy": float(right.mean()),
        "interval": list(wilson_interval(int(right.sum()), len(right))),
        "classes": classes,
    }


def _same(source: Any, own: Any) -> bool:
    """Whether two names are of the same data, however the path is written."""
    if not isinstance(source, str | os.PathLike) or not is_loadable(own):
        return False
    return str(source) == own or Path(source).expanduser().resolve() == Path(own).expanduser().resolve()


def _parts(loaded: Loaded, source: Any, wanted: str) -> list[LabelledImages]:
    """The images of that part, or of all; a part that the run has drawn is drawn again only as the run did."""
    known = _same(source, loaded.settings.get("data"))
    splitting: dict[str, Any] = {"val_fraction": 0.0, "test_fraction": 0.0}
    if known and wanted != "all":
        splitting = {name: loaded.settings[name] for name in _SPLITTING if loaded.settings.get(name) is not None}
    parts = load_data(source, size=loaded.spec.size, **splitting).parts
    if wanted == "all":
        return list(parts.values())
    if not known and (wanted not in parts or len(parts) == 1):
        raise ConfigError(
            f"evaluate: --part {wanted} given, but {source} is not known to be the data of the model's run, so which "
            "of its images were held out is unknown; give the run's folder and its data, or leave --part out"
        )
    if wanted not in parts:
        raise DataError(f"{source}: has no {wanted} part; pass --part {' or '.join(parts)}, or all")
    return [parts[wanted]]


def _hits(loaded: Loaded, images: LabelledImages) -> tuple[Any, Any]:
    """Which images are classified correctly, and their labels as the network numbers them."""
    unknown = [name for name in images.classes if name not in loaded.classes]
    if unknown:
        raise DataError(
            f"the data has the class {unknown[0]!r}, which the model does not know; it tells apart "
            f"{', '.join(loaded.classes[:10])}"
        )
    prepared = bool(loaded.settings.get("recipe", {}).get("train", {}).get("prepared", False))
    found = predict(loaded.model, images, prepared=prepared)
    labels = np.array([loaded.classes.index(name) for name in images.classes])[found.labels]
    return np.equal(found.classes, labels), labels
