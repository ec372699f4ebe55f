"""Datasets of Hugging Face, saved in a folder, as Parquet files or by name -> datasets of ours."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from basisprune.data.folders import PARTS
from basisprune.data.listing import all_files, subfolders
from basisprune.data.split import Splits
from basisprune.data.stored import MOST_BYTES, StoredImages, as_indices, class_names
from basisprune.errors import DataError, MissingExtraError, pass_on
from basisprune.files import parse_json, read_bytes

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"
_SAVED = (("dataset_dict.json",), ("state.json", "dataset_info.json"))
_PARQUET = ".parquet"
_LARGEST_STATE = 16 << 20
_PART = {name: part for part, names in PARTS.items() for name in names}


class HubImages(StoredImages):
    """The images in a column of a dataset, which is mapped into memory and decoded when asked for."""

    def __init__(
        self,
        rows: datasets.Dataset,
        column: str,
        labels: list[str],
        classes: tuple[str, ...],
        size: tuple[int, int],
        where: str,
    ) -> None:
        super().__init__(as_indices(labels, classes, where), classes, size)
        self.rows, self.column, self.where = rows, column, where

    def content(self, index: int) -> bytes:
        """The bytes of the image's file."""
        try:
            found = self.rows[index][self.column]
        except Exception as error:  # Arrow has many of its own
            pass_on(error, self.name(index))
            raise DataError(f"{self.name(index)}: cannot be read ({type(error).__name__}: {error})") from error
        content = found.get("bytes") if isinstance(found, Mapping) else None
        if not isinstance(content, bytes):
            raise DataError(
                f"{self.name(index)}: the image itself is not in the dataset; save it with its images embedded"
            )
        if len(content) > MOST_BYTES:
            raise DataError(f"{self.name(index)}: has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
        return content

    def name(self, index: int) -> str:
        """The dataset, its part and the row."""
        return f"{self.where}[{index}]"


def holds_dataset(folder: Path) -> bool:
    """Whether a folder holds a dataset that `save_to_disk` wrote, or Parquet files right in it."""
    return _is_saved(folder) or (not subfolders(folder) and any(folder.glob(f"*{_PARQUET}")))


def _is_saved(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in _SAVED)


def fetch_hub(name: str) -> None:
    """Downloads the dataset, unless that has been done."""
    _load(name)


def read_hub(source: str | Path, size: tuple[int, int]) -> Splits:
    """The parts of a dataset by name, after `hf:`, or in a folder; no code of it is ever run.

    It needs one column of images, and one of class labels or one that is called `label`. Splits that are not called
    train, validation or test are no part of the data; a single one is training's. Raises DataError for what does not
    fit, MissingExtraError without the package.
    """
    where = str(source)
    found = _load(where)
    parts: dict[str, datasets.Dataset] = {}
    for split, rows in found.items():
        part = _PART.get(str(split).casefold(), "train" if len(found) == 1 else "")
        if part in parts:
            raise DataError(f"{where}: has several splits for {part}; keep one of them")
        if part:
            parts[part] = rows
    if "train" not in parts:
        raise DataError(f"{where}: has the splits {', '.join(map(str, found))}, but no train")
    image, label = _columns(parts["train"], where)
    labels = {part: _labels(rows, label, f"{where}: {part}") for part, rows in parts.items()}
    names = getattr(parts["train"].features[label], "names", None)
    classes = class_names(labels["train"]) if names is None else tuple(map(str, names))
    images = {
        part: HubImages(_undecoded(rows, image, where), image, labels[part], classes, size, f"{where}: {part}")
        for part, rows in parts.items()
    }
    return Splits(images["train"], images.get("val"), images.get("test"), classes)


def _load(source: str) -> Mapping[str, datasets.Dataset]:
    """The splits of the dataset, each mapped into memory."""
    if find_spec("datasets") is None:
        raise MissingExtraError("datasets", extra="datasets")
    import datasets

    name = source.removeprefix(PREFIX)
    folder = Path(name).expanduser()
    try:
        if not folder.is_dir():
            _refuse_local_builder(name)
            found = datasets.load_dataset(name)
        elif _is_saved(folder):
            _refuse_files_elsewhere(folder)
            found = datasets.load_from_disk(str(folder), keep_in_memory=False)
        else:
            found = datasets.load_dataset("parquet", data_files=_parquet_files(folder))
    except Exception as error:  # from the network, the disk, Arrow or the package itself
        pass_on(error, source)
        raise DataError(
            f"{source}: could not be read as a dataset of Hugging Face ({type(error).__name__}: {error}); give the "
            "folder that save_to_disk wrote, a folder of Parquet files, or the name of a dataset without code"
        ) from error
    if isinstance(found, datasets.Dataset):
        return {"train": found}
    if not isinstance(found, datasets.DatasetDict):
        raise DataError(f"{source}: a {type(found).__name__} was found, whose rows cannot be had by their number")
    return cast("Mapping[str, datasets.Dataset]", found)


def _refuse_local_builder(name: str) -> None:
    """Raise DataError for the builders of the package, such as "csv", which read what lies in the current folder."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if name in _PACKAGED_DATASETS_MODULES:
        raise DataError(f"{PREFIX}{name}: is a format, not a dataset; give the folder of its files")


def _refuse_files_elsewhere(folder: Path) -> None:
    """Raise DataError if a saved dataset refers to files outside its folder."""
    for state in (folder / "state.json", *folder.glob("*/state.json")):
        if not state.is_file():
            continue
        said = parse_json(read_bytes(state, most=_LARGEST_STATE))
        files = said.get("_data_files") if isinstance(said, dict) else None
        rows = files if isinstance(files, list) else []
        names = [each.get("filename") if isinstance(each, dict) else None for each in rows]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise DataError(f"{state}: refers to files outside its folder")


def _parquet_files(folder: Path) -> dict[str, list[str]]:
    """The files of each part, by how their names begin; all are training's unless they are called as parts."""
    paths = [path for path in all_files(folder) if path.suffix == _PARQUET]
    parts: dict[str, list[str]] = {}
    for path in paths:
        start = path.name.casefold().split("-")[0].removesuffix(_PARQUET)
        parts.setdefault(_PART.get(start, "train"), []).append(str(path))
    return parts


def _columns(rows: datasets.Dataset, where: str) -> tuple[str, str]:
    """The names of the columns of images and of labels."""
    import datasets

    kinds = rows.features
    images = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    if len(labels) != 1:
        labels = [name for name in kinds if name == "label"]
    for name in labels:  # before any is read: images and other media would be opened, wherever they point
        if not _is_label_column(kinds[name]):
            raise DataError(
                f"{where}: the column {name} is {str(kinds[name])[:80]}; labels are a ClassLabel, whole numbers or text"
            )
    if len(images) != 1 or len(labels) != 1:
        raise DataError(
            f"{where}: has the columns {', '.join(kinds)}, of which {len(images)} hold images; one column of images "
            "and one of class labels, or one that is called label, are needed"
        )
    return images[0], labels[0]


def _is_label_column(kind: object) -> bool:
    """Return whether a column holds numbers or text, which reading does not open."""
    import datasets

    if isinstance(kind, datasets.ClassLabel):
        return True
    return isinstance(kind, datasets.Value) and (kind.dtype in ("string", "large_string") or "int" in kind.dtype)


def _labels(rows: datasets.Dataset, column: str, where: str) -> list[str]:
    """The label of each row as text: the name of its class where the dataset names them."""
    names = getattr(rows.features[column], "names", None)
    found = list(rows.select_columns([column]).with_format(None)[:][column])
    wrong = next((index for index, label in enumerate(found) if not _is_label(label, names)), None)
    if wrong is not None:
        raise DataError(f"{where}[{wrong}]: the label {found[wrong]!r} given; a number of a class or a name is needed")
    return [str(label) if names is None else str(names[label]) for label in found]


def _is_label(label: object, names: list[str] | None) -> bool:
    if names is not None:
        return isinstance(label, int) and 0 <= label < len(names)
    return isinstance(label, int | str) and not isinstance(label, bool) and str(label) != ""


def _undecoded(rows: datasets.Dataset, column: str, where: str) -> datasets.Dataset:
    """The rows with the bytes of their images, and nothing else."""
    import datasets

    try:
        return rows.select_columns([column]).with_format(None).cast_column(column, datasets.Image(decode=False))
    except Exception as error:
        raise DataError(f"{where}: its images cannot be read ({type(error).__name__}: {error})") from error
