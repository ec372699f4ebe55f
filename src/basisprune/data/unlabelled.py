"""Images without labels: only those on which two networks differ are ever labelled, to certify one of them."""

from __future__ import annotations

import copy

import numpy as np

from basisprune.data.copies import look_at, looks_of, note_near_copies, units_of
from basisprune.data.datasets import LabelledImages, base_of, take
from basisprune.data.folders import FolderImages, image_files
from basisprune.data.load import DEFAULT_SIZE, Reading, Source, folder_of_images, read_undivided
from basisprune.data.manifest import Manifest, recalled
from basisprune.data.split import Splits, reread, white_of
from basisprune.errors import DataError


def with_unlabelled(
    splits: Splits, source: Source, size: tuple[int, int] | None, reading: Reading, manifest: Manifest | None = None
) -> Splits:
    """Return the splits with the images of the source to confirm, without their labels.

    A folder may hold images as it likes; of other sources, which `load_data` reads, they are those to train on. Damaged
    images, copies of images in the splits and all but the first of copies among themselves are left out and reported.
    With a `manifest`, exactly its images are used.
    """
    size = size or DEFAULT_SIZE
    images, where = _read(source, splits, size)
    if manifest is None:
        images = _distinct(images, splits, reading, where)
    else:
        given = images.root if isinstance(images, FolderImages) and images.root else Splits.of({"train": images})
        images = recalled(given, manifest, size, roles=("train",), callback=reading.callback)["train"]
        images = reread(Splits.of({"train": images}), white=white_of(splits)).train
    images.labelled = base_of(images)[0].labelled = False
    return splits.with_parts({**splits.parts, "confirm": images})


def _read(source: Source, splits: Splits, size: tuple[int, int]) -> tuple[LabelledImages, str]:
    if path := folder_of_images(source, "unlabelled"):
        if not (files := image_files(path)):
            raise DataError(f"{path}: contains no images; those to confirm the budget are needed")
        images = FolderImages([(file, 0) for file in files], splits.classes, size, root=path, white=white_of(splits))
        return images, str(path)
    parts, where = read_undivided(source, size)
    found = copy.copy(parts.train)
    found.labels, found.classes = np.zeros(len(found), dtype=np.int64), splits.classes
    return found, where


def _distinct(images: LabelledImages, splits: Splits, reading: Reading, where: str) -> LabelledImages:
    """Return the images that can be used, and show what no other image shows."""
    if reading.callback is not None:
        reading.callback.log(f"{where}: opening {len(images):,} images without labels")
    look_at([images], reading.callback)
    looks = looks_of(images)
    if faults := [look.fault for look in looks if look.fault]:
        reading.report(f"{where}: {len(faults)} images left out, which cannot be used", faults)
    images = take(images, [place for place, look in enumerate(looks) if not look.fault])
    note_near_copies([*splits.parts.values(), images])
    keys = [(look.sha256, look.cluster) for look in looks_of(images)]
    known = {key for part in splits.parts.values() for look in looks_of(part) for key in (look.sha256, look.cluster)}
    known.discard("")
    first = set(np.unique(units_of(keys), return_index=True)[1].tolist())
    kept = [place for place, each in enumerate(keys) if place in first and known.isdisjoint(each)]
    if not kept:
        raise DataError(f"{where}: no image is left that is not a copy of a labelled one")
    base, indices = base_of(images)
    if left := sorted(set(range(len(images))) - set(kept)):
        names = [base.manifest_name(int(indices[place]), "train") for place in left]
        reading.report(f"{where}: {len(left)} images without labels are copies of others, and are left out", names)
    return take(images, kept)
