"""How often a network that was loaded is right, on the images that a run held out or on others."""

from __future__ import annotations

from typing import Any

import numpy as np

from basisprune.data import LabelledImages, load_data
from basisprune.errors import ConfigError, DataError
from basisprune.loading import Loaded
from basisprune.predict import predict
from basisprune.search import wilson_interval

_SPLITTING = ("seed", "val_fraction", "test_fraction", "limit")


def accuracy_on(loaded: Loaded, data: Any | None = None, part: str | None = None) -> dict[str, Any]:
    """The accuracy with its interval, in total and by class, as JSON values.

    Without `data`, or with that of the run, the images are split as the run did, and by default those of the
    test part are looked at; of any other data all images are. Classes are matched by name, so that the data may
    lack some. Raises DataError for a class that the network does not know.
    """
    own = loaded.settings.get("data")
    source = own if data is None else data
    if source is None:
        raise ConfigError("evaluate: this model does not know its run's data; pass --data")
    known = {name: loaded.settings[name] for name in _SPLITTING if loaded.settings.get(name) is not None}
    wanted = part or ("test" if source == own else "all")
    splitting = {"val_fraction": 0.0, "test_fraction": 0.0} if wanted == "all" else known
    splits = load_data(source, size=loaded.spec.size, **splitting)
    parts = list(splits.parts.values()) if wanted == "all" else [splits.parts.get(wanted)]
    if parts == [None]:
        raise DataError(f"{source}: has no {wanted} part; pass --part {' or '.join(splits.parts)}, or all")
    hits, labels = zip(*(_hits(loaded, images) for images in parts if images is not None), strict=True)
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
