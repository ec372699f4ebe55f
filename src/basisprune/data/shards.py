"""Shards of WebDataset, tar files of many images each -> datasets.

They are indexed by where each image lies: unlike a stream in the order of the shards, that allows splits, limits and
manifests as for folders. Nothing is extracted, and only images and labels are read.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import numpy as np

from basisprune.data.arrays import Labels, as_indices, class_names
from basisprune.data.datasets import MOST_BYTES, FileImages, path_from
from basisprune.data.decode import EXTENSIONS, readable
from basisprune.data.folders import PART_OF, all_files, subfolders
from basisprune.data.split import Splits
from basisprune.errors import DataError
from basisprune.files import open_file

PREFIX = "wds:"
_SUFFIX, _LABEL = ".tar", ".cls"
_MOST_SHARDS = 1_000_000
_LONGEST_LABEL = 1000  # bytes
_LONGEST_HEADER = 1 << 20  # bytes; names that are longer than usual have headers of their own
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
_UNSHOWN = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8


@dataclass(frozen=True)
class Place:
    """Where the file of an image lies: its shard, its first byte and its number of bytes."""

    shard: Path
    name: str
    offset: int
    size: int
    label: str


class ShardImages(FileImages):
    """Images in tar files, decoded on access; `root` is the folder from which a manifest names the shards."""

    def __init__(
        self, places: Sequence[Place], labels: Labels, classes: tuple[str, ...], size: tuple[int, int], root: Path
    ) -> None:
        super().__init__(labels, classes, size)
        self.root = root
        self.shards = tuple(dict.fromkeys(place.shard for place in places))
        numbers = {shard: number for number, shard in enumerate(self.shards)}
        self._names = tuple(place.name for place in places)
        # Arrays, because a million objects would take a hundred times as much memory.
        rows = [(numbers[place.shard], place.offset, place.size) for place in places]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 3)

    def content(self, index: int) -> bytes:
        number, offset, size = self._rows[index].tolist()
        if size > MOST_BYTES:
            raise DataError(f"{self.name(index)}: has {size:,} bytes; at most {MOST_BYTES:,} are read")
        with readable(self.name(index)), open_file(self.shards[number]) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise DataError(f"{self.name(index)}: the shard ends before the image does; write it anew")
        return content

    def name(self, index: int) -> str:
        return f"{self.shards[int(self._rows[index, 0])]}/{self._names[index]}"

    def manifest_name(self, index: int, part: str) -> str:  # noqa: ARG002
        return f"{path_from(self.shards[int(self._rows[index, 0])].absolute(), self.root)}/{self._names[index]}"


def holds_shards(folder: Path) -> bool:
    """Return whether a folder holds tar files, right in it or in train/, val/ and test/, and no folders of images."""
    inner = subfolders(folder)
    if any(path.name.casefold() not in PART_OF or subfolders(path) for path in inner):
        return False
    return any(entry.suffix == _SUFFIX for path in (folder, *inner) for entry in path.iterdir())


def read_shards(source: str | Path, size: tuple[int, int]) -> Splits:
    """Read the parts in tar files: a path with {000..009} for numbers, the folder of the files, or a single one."""
    shards = _listed(source)
    root = Path(os.path.commonpath([path.absolute().parent for path in shards]))
    parts = _by_part(shards, root)
    found = {part: list(chain.from_iterable(map(_index, paths))) for part, paths in parts.items()}
    labels = {part: [place.label for place in places] for part, places in found.items()}
    classes = class_names(labels["train"])
    datasets = {
        part: ShardImages(places, as_indices(labels[part], classes, f"{root}: {part}"), classes, size, root)
        for part, places in found.items()
    }
    return Splits.of(datasets)


def _listed(source: str | Path) -> list[Path]:
    """List the tar files that are meant."""
    given = str(source).removeprefix(PREFIX)
    if "://" in given or given.startswith("pipe:"):
        raise DataError(f"{source}: shards are read from files; nothing is downloaded, and no command is run")
    pattern = Path(given).expanduser()
    if pattern.is_dir():
        paths = [path for path in all_files(pattern) if path.suffix == _SUFFIX]
        if not paths:
            raise DataError(f"{pattern}: holds no {_SUFFIX} files")
        return paths
    paths = [Path(name) for name in expanded(str(pattern))]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file; give a folder of shards, or {PREFIX}a-{{00..09}}.tar")
        if path.suffix != _SUFFIX:
            raise DataError(f"{path}: is no {_SUFFIX} file; unpack compressed ones")
    return paths


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges of numbers stands for.

    >>> expanded("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    ranges = [(first, range(int(first), int(last) + 1)) for first, last in _RANGE.findall(pattern)]
    count = int(np.prod([len(numbers) for _, numbers in ranges], dtype=np.float64))
    if not 0 < count <= _MOST_SHARDS:
        raise DataError(f"{pattern}: stands for {count:,} shards; 1 to {_MOST_SHARDS:,} are allowed")
    texts = _RANGE.split(pattern)[::3]
    filled = product(*([f"{number:0{len(first)}d}" for number in numbers] for first, numbers in ranges))
    return ["".join(chain.from_iterable(zip(texts, (*numbers, ""), strict=True))) for numbers in filled]


def _by_part(shards: Sequence[Path], root: Path) -> dict[str, list[Path]]:
    """Return the shards of each part, training first; all are for training unless they are called as parts."""
    parts: dict[str, list[Path]] = {"train": []}
    others = []
    for path in shards:
        start = re.split("[^a-z]", path.name.casefold())[0]
        names = (start, *(each.casefold() for each in path.absolute().relative_to(root).parent.parts))
        part = next((PART_OF[name] for name in names if name in PART_OF), None)
        if part is None:
            others.append(path)
        else:
            parts.setdefault(part, []).append(path)
    if not parts["train"]:
        if len(parts) > 1 and not others:
            raise DataError(f"{root}: has shards of {', '.join(list(parts)[1:])}, but none of train")
        return {"train": list(shards)} if len(parts) == 1 else {**parts, "train": others}
    if others:
        raise DataError(f"{others[0]}: lies beside shards that are called train; call it train, val or test too")
    return parts


def _index(shard: Path) -> list[Place]:
    kinds = (OSError, tarfile.TarError, EOFError, OverflowError, ValueError, RecursionError)
    with readable(shard, *kinds, advice="; write it anew as a tar file"):
        images, labels = _members(shard)
    if not images:
        raise DataError(f"{shard}: contains no images ({' '.join(EXTENSIONS)})")
    if not labels:
        labels = {key: PurePosixPath(key).parent.name.replace("..", "") for key in images}
    missing = [key for key in images if not labels.get(key)]
    if missing:
        raise DataError(f"{shard}: {missing[0]} has no label; add {missing[0]}{_LABEL}, or use class folders")
    return [Place(shard, *images[key], labels[key]) for key in images]


def _members(shard: Path) -> tuple[dict[str, tuple[str, int, int]], dict[str, str]]:
    """Return the name, first byte and size of each image, and the labels, both by the start of the name."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    files: dict[str, tuple[int, int]] = {}  # all of them, for hard links
    with open_file(shard) as file, tarfile.open(fileobj=cast("BinaryIO", _Bounded(file)), mode="r:") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            if member.size < 0:  # from which it would go back, for ever
                raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
            key, suffix = _split_name(member.name)
            is_image, is_label = suffix.endswith(EXTENSIONS), suffix == _LABEL
            if member.isreg() and not member.issparse():
                files[member.name] = member.offset_data, member.size
            if member.isdir() or not (is_image or is_label) or PurePosixPath(member.name).name.startswith("."):
                continue
            offset, size = _place(member, files, shard)
            if key in (labels if is_label else images):
                what = "labels" if is_label else "images"
                raise DataError(f"{shard}: {key} has several {what}, such as {member.name}; one is needed")
            if is_label:
                labels[key] = _label(file, offset, size, f"{shard}: {member.name}")
            else:
                images[key] = member.name, offset, size
    return images, labels


def _place(member: tarfile.TarInfo, files: dict[str, tuple[int, int]], shard: Path) -> tuple[int, int]:
    if _UNSHOWN.search(member.name):
        raise DataError(f"{shard}: {member.name!r} is no name in UTF-8, or has control characters; call it otherwise")
    found = files.get(member.linkname if member.islnk() else member.name)
    if found is not None and (member.islnk() or (member.isreg() and not member.issparse())):
        return found
    kinds = {
        tarfile.LNKTYPE: f"a hard link to {member.linkname!r}, which is no file before it",
        tarfile.SYMTYPE: "a link",
    }
    kind = "a sparse file" if member.issparse() else kinds.get(member.type, "a pipe or a device")
    raise DataError(f"{shard}: {member.name} is {kind}; write the shard with whole files (tar --hard-dereference -h)")


class _Bounded:
    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._read(size)


def _split_name(name: str) -> tuple[str, str]:
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}{slash}{stem}", f"{dot}{suffix}".casefold()


def _label(file: BinaryIO, offset: int, size: int, where: str) -> str:
    try:
        file.seek(offset)
        text = file.read(size).decode().strip() if size <= _LONGEST_LABEL else ""
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        raise DataError(f"{where} holds no label; a number or a name in UTF-8 is needed")
    return text
