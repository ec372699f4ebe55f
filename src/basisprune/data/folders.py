"""Folders of class folders -> datasets."""

from __future__ import annotations

from pathlib import Path

from basisprune.data.datasets import FolderImages
from basisprune.data.decode import EXTENSIONS
from basisprune.data.split import Splits
from basisprune.errors import DataError

PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}

Files = dict[str, list[Path]]


def read_folder(folder: Path, size: tuple[int, int]) -> Splits:
    """The parts that the folder has: class folders, or train/, val/ and test/ with class folders each.

    Other folders beside train/ are no part of the data. Raises DataError, which names the folder, if it is
    empty, a class is without images, there is one class only, or the parts differ in their classes.
    """
    names = {entry.name for entry in _subfolders(folder)}
    if "train" in names and _subfolders(folder / "train"):
        found = {part: _part_folder(folder, part, names) for part in PARTS}
    elif names and names <= {alias for aliases in PARTS.values() for alias in aliases}:
        raise DataError(f"{folder}: holds {', '.join(sorted(names))} but no train/ with a folder for each class in it")
    else:
        found = {"train": folder}
    files = {part: _class_files(path) for part, path in found.items() if path is not None}
    classes = tuple(files["train"])
    for part, listed in files.items():
        _check_same_classes(folder, part, set(listed), set(classes))
    datasets = {
        part: FolderImages(
            [(path, label) for label, name in enumerate(classes) for path in listed[name]], classes, size
        )
        for part, listed in files.items()
    }
    return Splits(datasets["train"], datasets.get("val"), datasets.get("test"), classes)


def _part_folder(folder: Path, part: str, names: set[str]) -> Path | None:
    present = [alias for alias in PARTS[part] if alias in names]
    if len(present) > 1:
        raise DataError(f"{folder}: holds both {' and '.join(present)}; keep one of them")
    return folder / present[0] if present else None


def _class_files(folder: Path) -> Files:
    """The image files of every class folder, by name, both sorted."""
    files = {entry.name: _image_files(entry) for entry in _subfolders(folder)}
    if not files:
        raise DataError(f"{folder}: holds no class folders; put the images of each class into a folder of its own")
    if len(files) == 1:
        raise DataError(f"{folder}: holds one class only ({next(iter(files))}); at least two are needed")
    return files


def _image_files(folder: Path) -> list[Path]:
    """The images in the folder, however deep; hidden files and files of other kinds are passed over."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(name.startswith(".") for name in path.relative_to(folder).parts)
    )
    images = [path for path in files if path.suffix.lower() in EXTENSIONS]
    if not images:
        others = f"only {len(files)} other files, such as {files[0].name}" if files else "it is empty"
        raise DataError(
            f"{folder}: the class folder holds no image ({others}); add images ({' '.join(EXTENSIONS)}) "
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


def _subfolders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
