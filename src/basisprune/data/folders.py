"""Folders of class folders, and shards of WebDataset, tar files of many images each -> datasets.

Shards are indexed by where each image lies: unlike a stream in the order of the shards, that allows splits, limits and
manifests as for folders. Nothing is extracted, and only images and labels are read.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import numpy as np

from basisprune.data.arrays import Labels, as_indices, as_labels, check_labels, class_names
from basisprune.data.datasets import MOST_BYTES, FileImages, path_from, shown_path
from basisprune.data.decode import EXTENSIONS, Look, file_hash, look_at_file, readable
from basisprune.data.split import Splits
from basisprune.errors import DataError
from basisprune.files import open_file, read_bytes
from basisprune.signatures import ImageSize, checked

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""What the folders and files of the parts may be called, in any case."""
PART_OF = {name: part for part, names in PARTS.items() for name in names}
_BEGINNINGS = ("train", "val", "test", "eval", "dev")
SHARDS = "wds:"
_SUFFIX, _LABEL = ".tar", ".cls"
_MOST_SHARDS = 1_000_000
_LONGEST_LABEL = 1000  # bytes
_LONGEST_HEADER = 1 << 20  # bytes; names that are longer than usual have headers of their own
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
_UNSHOWN = re.compile("[\0-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8
_Seen = set[tuple[int, int]]  # folders by their device and number, however they are called


class FolderImages(FileImages):
    """Images in files of their own; `root` is the folder from which a manifest names them."""

    @checked
    def __init__(
        self,
        files: Iterable[tuple[str | Path, int]],
        classes: Sequence[str],
        size: ImageSize = (224, 224),
        *,
        root: Path | None = None,
        white: int | None = None,
    ) -> None:
        try:
            listed = [(Path(path), label) for path, label in files]
        except (TypeError, ValueError) as error:
            raise DataError(f"FolderImages: {error}; (path, label) is needed for each file") from error
        labels = as_labels([label for _, label in listed], len(listed), "FolderImages")
        super().__init__(labels, classes, size, white)
        self.paths, self.root = tuple(path for path, _ in listed), root
        check_labels(self.labels, self.classes, "FolderImages")

    def content(self, index: int) -> bytes:
        with readable(self.paths[index]):
            return read_bytes(self.paths[index])

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def _look(self, index: int) -> Look:
        path = self.paths[index]
        if shown_path(path) != str(path):
            return Look(fault=f"{shown_path(path)}: the name of the file is not valid UTF-8; rename it")
        return look_at_file(path)

    def content_hash(self, index: int) -> str:
        return file_hash(self.paths[index])

    def manifest_name(self, index: int, part: str) -> str:  # noqa: ARG002
        return path_from(self.paths[index], self.root)


def image_files(folder: Path, seen: _Seen | None = None) -> list[Path]:
    """List the images in the folder, however deep, sorted; hidden files and files of other kinds are ignored."""
    return [path for path in all_files(folder, seen) if path.suffix.lower() in EXTENSIONS]


def all_files(folder: Path, seen: _Seen | None = None) -> list[Path]:
    """List the files of every kind as `image_files` does."""
    known: _Seen = set() if seen is None else seen
    files: list[Path] = []
    with readable(folder):
        for here, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
            place = os.stat(here)
            if (place.st_dev, place.st_ino) in known:
                raise DataError(f"{here}: leads to {Path(here).resolve()}, which is read already; remove the link")
            known.add((place.st_dev, place.st_ino))
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(here, name) for name in names if not name.startswith(".")):
                if path.is_file():
                    files.append(path)
                elif path.suffix.lower() in EXTENSIONS:
                    raise DataError(f"{path}: is a link to nothing, a pipe or a device, and no image; remove it")
    return sorted(files)


def _refuse(error: OSError) -> None:
    raise error


def subfolders(folder: Path) -> list[Path]:
    """List the folders right in the folder, sorted, without hidden ones."""
    with readable(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())


def read_folder(folder: Path, size: tuple[int, int]) -> Splits:
    """Read the parts that the folder has: class folders, or train/, val/ and test/ with class folders each."""
    parts = _part_folders(folder)
    _refuse_likely_parts(folder, parts)
    files = {part: _class_files(path) for part, path in (parts or {"train": folder}).items()}
    classes = tuple(files["train"])
    datasets = {}
    for part, listed in files.items():
        if listed.keys() != set(classes):
            only_train = ", ".join(sorted(set(classes) - listed.keys())) or "none"
            only_part = ", ".join(sorted(listed.keys() - set(classes))) or "none"
            raise DataError(
                f"{folder}: the classes in train/ and in {part}/ differ (only in train/: {only_train}; "
                f"only in {part}/: {only_part}); all parts need the same class folders"
            )
        labelled = [(path, label) for label, name in enumerate(classes) for path in listed[name]]
        datasets[part] = FolderImages(labelled, classes, size, root=folder)
    return Splits.of(datasets)


def _part_folders(folder: Path) -> dict[str, Path]:
    inner = subfolders(folder)
    named = {part: [path for path in inner if path.name.casefold() in names] for part, names in PARTS.items()}
    if not any(subfolders(path) for path in named["train"]):
        if inner and sum(map(len, named.values())) == len(inner):
            listed = ", ".join(path.name for path in inner)
            raise DataError(f"{folder}: holds {listed} but no train/ with a folder for each class in it")
        return {}
    for paths in named.values():
        if len(paths) > 1:
            raise DataError(f"{folder}: holds both {' and '.join(path.name for path in paths)}; keep one of them")
    return {part: paths[0] for part, paths in named.items() if paths}


def _refuse_likely_parts(folder: Path, parts: dict[str, Path]) -> None:
    beside = subfolders(folder)
    likely = [path for path in beside if path.name.casefold().startswith(_BEGINNINGS)]
    held = {path: {inner.name for inner in subfolders(path)} for path in likely}
    for path in likely:
        others = {other.name for other in beside}.union(*(held[other] for other in likely if other != path))
        if path not in parts.values() and held[path] & others:
            raise DataError(
                f"{path}: looks like a part of the data, as it holds {min(held[path] & others)}/ like another folder; "
                "call the parts train/, val/ and test/, or move it elsewhere"
            )


def _class_files(folder: Path) -> dict[str, list[Path]]:
    seen: _Seen = set()
    files = {}
    for entry in subfolders(folder):
        if shown_path(entry.name) != entry.name:
            raise DataError(f"{str(entry)!r}: the name of the class is not valid UTF-8; rename the folder")
        found = all_files(entry, seen)
        files[entry.name] = [path for path in found if path.suffix.lower() in EXTENSIONS]
        if not files[entry.name]:
            others = f"only {len(found)} other files, such as {found[0].name}" if found else "it is empty"
            raise DataError(
                f"{entry}: the class folder contains no images ({others}); add images ({' '.join(EXTENSIONS)}) "
                "or remove the folder"
            )
    if not files:
        raise DataError(f"{folder}: contains no class folders; put the images of each class into a folder of its own")
    if len(files) == 1:
        raise DataError(f"{folder}: holds one class only ({next(iter(files))}); at least two are needed")
    return files


# ------------------------------------------------------------------------------------------- shards


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
            raise DataError(f"{self.name(index)}: the shard ends before the image does; write it again")
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
    given = str(source).removeprefix(SHARDS)
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
            raise DataError(f"{path}: there is no such file; give a folder of shards, or {SHARDS}a-{{00..09}}.tar")
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
    with readable(shard, *kinds, advice="; write it again as a tar file"):
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
