"""Folders of class folders -> datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from basisprune.data.arrays import as_labels, check_labels
from basisprune.data.datasets import FileImages, path_from, shown_path
from basisprune.data.decode import EXTENSIONS, Look, file_hash, look_at_file, readable
from basisprune.data.split import Splits
from basisprune.errors import DataError
from basisprune.files import read_bytes
from basisprune.signatures import ImageSize, checked

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""What the folders and files of the parts may be called, in any case."""
PART_OF = {name: part for part, names in PARTS.items() for name in names}
_BEGINNINGS = ("train", "val", "test", "eval", "dev")
_Seen = set[tuple[int, int]]  # folders by their device and number, however they are called


class FolderImages(FileImages):
    """Images in files of their own; `root` is the folder from which a manifest names them.

    Raises DataError, which names the file, when an image turns out to be damaged or none.
    """

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
    """List the image files of every class folder, by name, both sorted."""
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
