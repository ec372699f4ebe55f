"""Datasets of Hugging Face, saved in a folder, as Parquet files or by name, and torchvision's by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torchvision
from platformdirs import user_cache_path
from torch import Tensor

from basisprune.data.arrays import as_indices, class_names
from basisprune.data.datasets import MOST_BYTES, ArrayImages, FileImages, LabelledImages, WrappedDataset
from basisprune.data.decode import readable
from basisprune.data.folders import PART_OF, all_files, subfolders
from basisprune.data.split import Splits
from basisprune.errors import DataError, MissingExtraError, nearest
from basisprune.files import Json, parse_json, read_bytes
from basisprune.torchkit.imports import in_folder_of_python

if TYPE_CHECKING:
    import datasets

PREFIX, TORCHVISION = "hf:", "torchvision:"
"""How the names of these datasets begin."""
_SPLITS, _STATE = "dataset_dict.json", "state.json"
_SAVED = ((_SPLITS,), (_STATE, "dataset_info.json"))
_PARQUET, _CONVERTED = ".parquet", "refs/convert/parquet"  # where the hub keeps what it made of other files
_LARGEST_STATE = 16 << 20
_NEVER_IN_NAMES = ":*?[]"  # addresses, such as hdfs::x, start programs or load libraries; patterns name other files
_PLAIN_TYPE = re.compile(
    r"null|bool|u?int(8|16|32|64)|float(16|32|64)?|double|(large_)?(string|binary)|(string|binary)_view|date(32|64)"
    r"|(timestamp|duration|time32|time64)\[.*\]|decimal(128|256)\(.*\)"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# How the datasets of torchvision name their parts: the arguments beside `root` and `download`.
_BY_FLAG: dict[str, Mapping[str, object]] = {"train": {"train": True}, "test": {"train": False}}
_BY_SPLIT = {
    ("train", "valid", "test"): ("Country211",),
    ("train", "val", "test"): ("DTD", "FGVCAircraft", "Flowers102", "PCAM", "RenderedSST2"),
    ("train", "test"): ("Food101", "GTSRB", "STL10", "SVHN", "StanfordCars"),
    ("train", "val"): ("Imagenette",),
    ("trainval", "test"): ("OxfordIIITPet",),
}
ARGUMENTS: dict[str, dict[str, Mapping[str, object]]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "USPS"), _BY_FLAG),
    "EMNIST": {part: {"split": "balanced", **flag} for part, flag in _BY_FLAG.items()},
    **{
        name: {PART_OF.get(split, "train"): {"split": split} for split in splits}
        for splits, names in _BY_SPLIT.items()
        for name in names
    },
    **{name: {"train": {}} for name in ("Caltech101", "Caltech256", "EuroSAT", "SEMEION")},
}


class HubImages(FileImages):
    """The images in a column of a dataset that is mapped into memory, decoded on access."""

    def __init__(
        self, rows: datasets.Dataset, labels: list[str], classes: tuple[str, ...], size: tuple[int, int], where: str
    ) -> None:
        super().__init__(as_indices(labels, classes, where), classes, size)
        self.rows, self.column, self.where = rows, rows.column_names[0], where

    def content(self, index: int) -> bytes:
        with readable(self.name(index), Exception):  # Arrow has many kinds of its own
            found = self.rows[index][self.column]
        content = found.get("bytes") if isinstance(found, Mapping) else None
        if not isinstance(content, bytes):
            raise DataError(f"{self.name(index)}: the image itself is not in the dataset; save it with embedded images")
        if len(content) > MOST_BYTES:
            raise DataError(f"{self.name(index)}: has {len(content):,} bytes; at most {MOST_BYTES:,} are read")
        return content

    def name(self, index: int) -> str:
        return f"{self.where}[{index}]"


def holds_dataset(folder: Path) -> bool:
    """Return whether a folder holds a dataset that `save_to_disk` wrote, or Parquet files right in it."""
    return _is_saved(folder) or (not subfolders(folder) and any(folder.glob(f"*{_PARQUET}")))


def _is_saved(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in _SAVED)


def read_hub(source: str | Path, size: tuple[int, int]) -> Splits:
    """Read the parts of a dataset by name, after `hf:`, or in a folder; no code of it is ever run."""
    where = str(source)
    found = load_hub(where)
    import datasets  # which is there, then

    parts: dict[str, datasets.Dataset] = {}
    for split, rows in found.items():
        part = PART_OF.get(str(split).casefold(), "train" if len(found) == 1 else "")
        if part in parts:
            raise DataError(f"{where}: has several splits for {part}; keep one of them")
        if part:
            parts[part] = rows
    if "train" not in parts:
        raise DataError(f"{where}: has the splits {', '.join(map(str, found))}, but no train")
    columns = {part: _columns(rows, f"{where}: {part}") for part, rows in parts.items()}
    for part, rows in parts.items():
        with readable(f"{where}: {part}", Exception):
            rows.data.table.select(columns[part]).validate(full=True)  # Arrow reads where its offsets point
    labels = {part: _labels(rows, columns[part][1], f"{where}: {part}") for part, rows in parts.items()}
    names = getattr(parts["train"].features[columns["train"][1]], "names", None)
    classes = class_names(labels["train"]) if names is None else tuple(map(str, names))
    images = {}
    for part, rows in parts.items():
        column, here = columns[part][0], f"{where}: {part}"
        with readable(f"{here}: images", Exception):
            plain = rows.select_columns([column]).with_format(None)
            undecoded = plain.cast_column(column, datasets.Image(decode=False))
        images[part] = HubImages(undecoded, labels[part], classes, size, here)
    return Splits.of(images)


def load_hub(source: str) -> Mapping[str, datasets.Dataset]:
    """Return the splits of the dataset, each mapped into memory; download it if that has not been done."""
    if find_spec("datasets") is None:
        raise MissingExtraError("datasets", extra="datasets")
    import datasets

    name = source.removeprefix(PREFIX)
    folder = Path(name).expanduser().absolute()
    advice = "; give a folder that save_to_disk wrote, a folder of Parquet files, or the name of a dataset"
    with readable(source, Exception, advice=advice), _plain_types():  # the network, the disk, Arrow, the package
        if folder.is_dir() and _is_saved(folder):
            return _saved(folder)
        files = _parquet_files(folder) if folder.is_dir() else _downloaded(name)
        with in_folder_of_python():  # or a folder called parquet in the current one would be read
            found = datasets.load_dataset("parquet", data_files=files)
    if not isinstance(found, datasets.DatasetDict):
        raise DataError(f"{source}: a {type(found).__name__} was found, whose rows have no random access")
    return cast("Mapping[str, datasets.Dataset]", found)


@contextmanager
def _plain_types() -> Iterator[None]:
    """Have types of columns be those of data alone."""
    from datasets.features import features

    to_arrow = features.string_to_arrow

    def checked(name: str) -> object:
        if not _PLAIN_TYPE.fullmatch(str(name)):
            raise DataError(f"a column has the type {str(name)[:80]!r}, which is not one of data")
        return to_arrow(name)

    features.string_to_arrow = checked
    try:
        yield
    finally:
        features.string_to_arrow = to_arrow


def _downloaded(name: str) -> dict[str, list[str]]:
    """Return the Parquet files of a dataset on the hub; its card may name files anywhere, and is not read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    if not _HUB_ID.fullmatch(name):
        raise DataError(f"{PREFIX}{name}: there is no such folder, and this is no name on the hub, such as owner/name")
    for revision in (None, _CONVERTED):
        with suppress(RevisionNotFoundError):
            found = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=[f"*{_PARQUET}"])
            if files := Path(found).is_dir() and _parquet_files(Path(found), other="other"):
                break
    else:
        raise DataError(f"{PREFIX}{name}: has no Parquet files; load it yourself, save_to_disk it, and give the folder")
    folders = {Path(path).parent for paths in files.values() for path in paths}
    homes = {each.parent if each.name.casefold() in PART_OF else each for each in folders}
    if len(homes) > 1:
        names = ", ".join(sorted(str(home.relative_to(found)) for home in homes))[:200]
        raise DataError(f"{PREFIX}{name}: has Parquet files in {names}; download those of one, and give its folder")
    return files


def _saved(folder: Path) -> Mapping[str, datasets.Dataset]:
    """Return the splits that `save_to_disk` wrote, read file by file."""
    import datasets

    splits = {"train": folder}
    if (folder / _SPLITS).is_file():
        names = _state(folder / _SPLITS).get("splits")
        splits = {name: folder / name for name in _plain_names(names, folder / _SPLITS)}
    parts = {}
    for name, inner in splits.items():
        state = _state(inner / _STATE)
        rows = state.get("_data_files")
        files = [row.get("filename") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None
        tables = [datasets.Dataset.from_file(str(inner / file)) for file in _plain_names(files, inner / _STATE)]
        parts[name] = datasets.concatenate_datasets(tables)
    return parts


def _state(path: Path) -> dict[str, Json]:
    found = parse_json(read_bytes(path, most=_LARGEST_STATE))
    return found if isinstance(found, dict) else {}


def _plain_names(names: object, where: Path) -> list[str]:
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: does not name the parts of a dataset; save it again")
    if odd := [name for name in names if name in ("", ".", "..") or set(name) & set(_NEVER_IN_NAMES + "/\\")]:
        raise DataError(f"{where}: names {odd[0][:80]!r}, which is not beside it")
    return names


def _parquet_files(folder: Path, other: str = "train") -> dict[str, list[str]]:
    paths = [path for path in all_files(folder) if path.suffix == _PARQUET]
    parts: dict[str, list[str]] = {}
    for path in paths:
        if found := set(str(path)) & set(_NEVER_IN_NAMES) - set(path.drive):
            raise DataError(f"{path}: has {found.pop()!r} in its name, which could be read as an address; rename it")
        start = path.name.casefold().split("-")[0].removesuffix(_PARQUET)
        part = PART_OF.get(start) or PART_OF.get(path.parent.name.casefold(), other)
        parts.setdefault(part, []).append(str(path))
    return parts


def _columns(rows: datasets.Dataset, where: str) -> tuple[str, str]:
    import datasets

    kinds = rows.features
    images = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    if len(labels) != 1:
        labels = [name for name in kinds if name == "label"]
    for name in labels:  # before any is read: images and other media would be opened, wherever they point
        dtype = str(kinds[name].dtype) if isinstance(kinds[name], datasets.Value) else ""
        if not (isinstance(kinds[name], datasets.ClassLabel) or dtype.endswith("string") or "int" in dtype):
            raise DataError(f"{where}: the column {name} is {str(kinds[name])[:80]}; labels are class numbers or text")
    if len(images) != 1 or len(labels) != 1:
        raise DataError(
            f"{where}: has the columns {', '.join(kinds)}, of which {len(images)} hold images; one column of images "
            "and one of class labels, or one that is called label, are needed"
        )
    return images[0], labels[0]


def _labels(rows: datasets.Dataset, column: str, where: str) -> list[str]:
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


# ------------------------------------------------------------------------------------------- torchvision


def read_torchvision(source: str, size: tuple[int, int]) -> Splits:
    """Read the parts of a torchvision dataset by name, after `torchvision:`; download them into the cache folder."""
    name = source.removeprefix(TORCHVISION)
    if name not in ARGUMENTS:
        hint = nearest(name, ARGUMENTS, most=3) or f" Known are {', '.join(sorted(ARGUMENTS))}"
        raise DataError(f"torchvision:{name}: there is no such dataset.{hint}")
    parts: dict[str, LabelledImages] = {}
    for part, arguments in ARGUMENTS[name].items():  # training first
        parts[part] = _read_part(name, arguments, size, parts["train"].classes if parts else None)
    return Splits.of(parts)


def _read_part(
    name: str, arguments: Mapping[str, object], size: tuple[int, int], classes: tuple[str, ...] | None
) -> LabelledImages:
    given = os.environ.get("BASISPRUNE_DATA")
    root = Path(given).expanduser() if given else user_cache_path("basisprune", appauthor=False)
    advice = f"; put its files into {root} as torchvision lays them out, or set BASISPRUNE_DATA to the folder of them"
    with readable(f"{TORCHVISION}{name}", Exception, advice=advice):  # the network, the disk, the archive, a reader
        root.mkdir(parents=True, exist_ok=True)
        dataset = getattr(torchvision.datasets, name)(root=str(root), download=True, **arguments)
    wrapped = WrappedDataset(dataset, classes, size=size, name=f"torchvision:{name}")
    data = getattr(dataset, "data", None)
    images = np.asarray(data) if isinstance(data, np.ndarray | Tensor) else np.empty(0)
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        return wrapped
    if images.ndim == 4 and images.shape[1] == 3 != images.shape[3]:
        images = images.transpose(0, 2, 3, 1)
    return ArrayImages(images, wrapped.labels, wrapped.classes, name=wrapped.name)
