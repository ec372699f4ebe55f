"""What is known of an image after it was opened once: its content by a hash, its depth, and whether it is sound."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from basisprune.data.decode import Depth, glance
from basisprune.data.kin import thumbnail
from basisprune.errors import DataError, pass_on
from basisprune.files import read_bytes

_Version = tuple[str, int, int, int]
_hashes: dict[_Version, str] = {}
_looks: dict[_Version, Look] = {}


@dataclass(frozen=True)
class Look:
    """The hash of an image's content, how deep it is if deeper than 8 bits, and what is wrong with it, if anything.

    The hash is empty where the content differs each time that somebody asks. By its `thumbnail` near copies are found,
    which have the same `kin` then.
    """

    sha256: str = ""
    depth: Depth | None = None
    fault: str = ""
    thumbnail: bytes = field(default=b"", repr=False)
    kin: str = ""

    @classmethod
    def at(cls, sha256: str, content: bytes, path: str | Path) -> Look:
        """What the content of a file shows; raises DataError for one that is no sound image."""
        depth, image = glance(content, path)
        return cls(sha256, depth, thumbnail=thumbnail(image))


def look_at_file(path: Path) -> Look:
    """What opening the image file shows; a file that has not changed is not read twice by one process."""
    try:
        version = _version(path)
        if version not in _looks:
            content = read_bytes(path)
            _hashes[version] = hashlib.sha256(content).hexdigest()
            _looks[version] = Look.at(_hashes[version], content, path)
        return _looks[version]
    except DataError as error:
        return Look(_hashes[version], fault=str(error))
    except (OSError, ValueError) as error:
        pass_on(error, path)
        return Look(fault=f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def look_at_content(content: bytes, name: str) -> Look:
    """What opening an image shows whose file lies in another one, and is called so."""
    sha256 = hashlib.sha256(content).hexdigest()
    try:
        return Look.at(sha256, content, name)
    except DataError as error:
        return Look(sha256, fault=str(error))


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's content; raises DataError that names a file which is missing or cannot be read."""
    try:
        version = _version(path)
        if version not in _hashes:
            _hashes[version] = hashlib.sha256(read_bytes(path)).hexdigest()
        return _hashes[version]
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        pass_on(error, path)
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def image_hash(image: object) -> str:
    """The SHA-256 of an image in memory: a tensor, an array or a PIL image, with its type and shape.

    >>> image_hash(torch.zeros(2, 2)) == image_hash(np.zeros((2, 2), dtype=np.float32)) != image_hash(torch.ones(2, 2))
    True
    """
    array = np.ascontiguousarray(image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image))
    mode = image.mode if isinstance(image, Image.Image) else ""
    digest = hashlib.sha256(f"{mode} {array.dtype.str} {array.shape}".encode())
    digest.update(array.tobytes())
    return digest.hexdigest()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Whatever is drawn inside, the random numbers of Python, NumPy and PyTorch go on outside as if it were not."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def same_random_numbers() -> None:
    """Has whatever is drawn next from Python, NumPy and PyTorch be the same each time."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


def _version(path: Path) -> _Version:
    """The file as it is now; another content has another version."""
    known = os.stat(path)
    return os.fspath(path), known.st_ino, known.st_size, known.st_mtime_ns
