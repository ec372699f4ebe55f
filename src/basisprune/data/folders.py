"""Folders of class folders -> datasets."""

from __future__ import annotations

from pathlib import Path

from basisprune.data.datasets import FolderImages
from basisprune.data.decode import EXTENSIONS
from basisprune.data.listing import Place, all_files, subfolders
from basisprune.data.split import Splits
from basisprune.errors import DataError

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""What the folders of the parts may be called, in capital letters or not."""
_BEGINNINGS = ("train", "val", "test", "eval", "dev")

Files = dict[str, list[Path]]


def read_folder(folder: Path, size: tuple[int, int]) -> Splits:
    """The parts that the folder has: class folders, or train/, val/ and test/ with class folders each.

    Other folders beside train/ are no part of the data. Raises DataError, which names the folder, if it is
    empty, a class is without images, there is one class only, the parts differ in their classes, or a folder may be
    meant as a part and is not called one.
    """
    parts = _part_folders(folder)
    _refuse_likely_parts(folder, parts)
    files = {part: _class_files(path) for part, path in (parts or {"train": folder}).items()}
    classes = tuple(files["train"])
    for part, listed in files.items():
        _check_same_classes(folder, part, set(listed), set(classes))
    datasets = {
        part: FolderImages(
            [(path, label) for label, name in enumerate(classes) for path in listed[name]], classes, size, root=folder
        )
        for part, listed in files.items()
    }
    return Splits(datasets["train"], datasets.get("val"), datasets.get("test"), classes)


def _part_folders(folder: Path) -> dict[str, Path]:
    """The folder of each part that there is; none where the folder holds the classes themselves."""
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
    """Raises DataError for a folder called like a part, but not quite, that holds the classes that others hold too."""
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


def _class_files(folder: Path) -> Files:
    """The image files of every class folder, by name, both sorted."""
    seen: set[Place] = set()
    files = {_checked_name(entry): _images(entry, seen) for entry in subfolders(folder)}
    if not files:
        raise DataError(f"{folder}: contains no class folders; put the images of each class into a folder of its own")
    if len(files) == 1:
        raise DataError(f"{folder}: holds one class only ({next(iter(files))}); at least two are needed")
    return files


def _checked_name(folder: Path) -> str:
    try:
        folder.name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{str(folder)!r}: the name of the class is not valid UTF-8; rename the folder") from error
    return folder.name


def _images(folder: Path, seen: set[Place]) -> list[Path]:
    files = all_files(folder, seen)
    images = [path for path in files if path.suffix.lower() in EXTENSIONS]
    if not images:
        others = f"only {len(files)} other files, such as {files[0].name}" if files else "it is empty"
        raise DataError(
            f"{folder}: the class folder contains no images ({others}); add images ({' '.join(EXTENSIONS)}) "
            "or remove the folder"
        )
    return images


def _check_same_classes(folder: Path, part: str, given: set[str], classes: set[str]) -> None:
    if given != classes:
        only_train = ", ".join(sorted(classes - given)) or "none"
        only_part = ", ".join(sorted(given - classes)) or "none"
        raise DataError(
            f"{folder}: the classes in train/ and in {part}/ differ (only in train/: {only_train}; "
            f"only in {part}/: {only_part}); all parts need the same class folders"
        )
