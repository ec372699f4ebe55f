"""Images whose files lie in larger files, read one by one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np

from basisprune.data.arrays import Labels, read_only
from basisprune.data.datasets import Item, LabelledImages
from basisprune.data.decode import decode_content
from basisprune.data.looks import Look, look_at_content
from basisprune.errors import DataError

MOST_BYTES = 1 << 28
"""What the file of one image may have."""


class StoredImages(LabelledImages):
    """Images that are decoded when asked for, as those in folders are; a subclass knows where their bytes are.

    `white` is what counts as white in images of more than 8 bits.
    """

    def __init__(self, labels: Labels, classes: tuple[str, ...], size: tuple[int, int]) -> None:
        self.labels, self.classes, self.size = read_only(labels), classes, size
        self.white: int | None = None

    def content(self, index: int) -> bytes:
        """The bytes of an image's file; raises DataError that names it if they cannot be had."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What an image is called in errors."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Item:
        return decode_content(self.content(index), self.name(index), self.size, self.white), int(self.labels[index])

    def look(self, index: int) -> Look:
        """What opening the image shows."""
        try:
            return look_at_content(self.content(index), self.name(index))
        except DataError as error:
            return Look(fault=str(error))

    def content_hash(self, index: int) -> str:
        """The hash of the file's content; nothing is decoded."""
        return hashlib.sha256(self.content(index)).hexdigest()

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> Self:
        """The same images."""
        other = copy.copy(self)
        other.size = self.size if size is None else size
        other.white = self.white if white is None else white
        return other


def class_names(labels: Sequence[str]) -> tuple[str, ...]:
    """The classes of training images by their labels: numbers in their order, or names in theirs.

    >>> class_names(["10", "9", "9"]), class_names(["bee", "ant"])
    (('9', '10'), ('ant', 'bee'))
    """
    found = set(labels)
    return tuple(sorted(found, key=int) if all(map(_is_number, found)) else sorted(found))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and text == str(int(text[:20]))


def as_indices(labels: Sequence[str], classes: tuple[str, ...], where: str) -> Labels:
    """The label of each image as the place of its class; raises DataError for classes that training lacks."""
    places = {name: place for place, name in enumerate(classes)}
    unknown = sorted({label for label in labels if label not in places})
    if unknown:
        raise DataError(
            f"{where}: has images of {', '.join(unknown[:10])}, which training lacks; every class needs training images"
        )
    return np.array([places[label] for label in labels], dtype=np.int64)
