"""Image files -> predictions; an unreadable file does not affect the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from basisprune.data import image_files as list_images
from basisprune.data.decode import EXTENSIONS, decode
from basisprune.data.transforms import prepare
from basisprune.errors import DataError
from basisprune.runs.load import Loaded, refuse_other_tasks

_BATCH = 32


@dataclass(frozen=True)
class Answer:
    """The prediction for one file: the probability of each class, most likely first; or the error."""

    file: Path
    classes: tuple[tuple[str, float], ...] = ()
    error: str = ""


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """The given files, and all images in the given folders, as `compress` would find them.

    Raises DataError for a folder without images; a missing file is noticed only when it is read.
    """
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


def classify_files(loaded: Loaded, files: Iterable[Path]) -> Iterator[Answer]:
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
            yield from _answers(loaded, batch)
            batch = []
    yield from _answers(loaded, batch)


@torch.inference_mode()
def _answers(loaded: Loaded, batch: list[tuple[Path, Tensor | str]]) -> Iterator[Answer]:
    images = [image for _, image in batch if isinstance(image, Tensor)]
    scores = loaded.model(prepare(torch.stack(images), loaded.spec)) if images else torch.empty(0)
    shares = iter(scores.float().softmax(-1).tolist())
    for file, image in batch:
        if isinstance(image, str):
            yield Answer(file, error=image)
        else:
            named = zip(loaded.classes, next(shares), strict=True)
            yield Answer(file, tuple(sorted(named, key=lambda pair: -pair[1])))
