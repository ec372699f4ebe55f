"""Laws of datasets of Hugging Face."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import sys
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import fsspec
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torchvision
from PIL import Image
from sources import refused, sizes

import basisprune.data.hub
from basisprune.data import ArrayImages, Reading, load_data
from basisprune.data.hub import ARGUMENTS
from basisprune.data.manifest import manifest_of
from basisprune.errors import MissingExtraError

datasets = pytest.importorskip("datasets")
SIZE = (5, 6)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def rows(count: int = 30, start: int = 0, *, names: tuple[str, ...] | None = ("ant", "bee", "cat"), **more):
    numbers = range(start, start + count)
    label = datasets.Value("int64") if names is None else datasets.ClassLabel(names=list(names))
    columns = {"image": [{"bytes": picture(number), "path": None} for number in numbers]}
    columns["label"] = [number % 3 for number in numbers]
    kinds = datasets.Features({"image": datasets.Image(), "label": label})
    return datasets.Dataset.from_dict({**columns, **more}, features=kinds)


def saved(folder: Path, dataset) -> Path:
    dataset.save_to_disk(folder)
    return folder


def test_a_saved_dataset_is_split_and_its_images_are_those_that_went_in(tmp_path):
    splits = load_data(saved(tmp_path / "data", rows()), size=SIZE)
    assert sizes(splits) == {"train": 21, "val": 6, "test": 3}
    assert splits.classes == ("ant", "bee", "cat")
    for role, part in splits.parts.items():
        for index, entry in enumerate(manifest_of(splits).parts[role]):
            number = int(entry.name.removeprefix("train[").removesuffix("]"))
            image, label = part[index]
            expected = np.asarray(Image.open(io.BytesIO(picture(number)))).transpose(2, 0, 1)
            assert np.array_equal(image.numpy(), expected)
            assert label == number % 3


def test_its_splits_are_parts_and_others_are_not(tmp_path):
    parts = {"train": rows(12), "validation": rows(9, 20), "test": rows(6, 40), "unlabelled": rows(3, 60)}
    splits = load_data(saved(tmp_path / "data", datasets.DatasetDict(parts)), size=SIZE)
    assert sizes(splits) == {"train": 12, "val": 9, "test": 6}
    refused(saved(tmp_path / "other", datasets.DatasetDict({"a": rows(3), "b": rows(3, 9)})), "a, b, but no train")


def test_parquet_files_are_a_source(tmp_path):
    folder = tmp_path / "parquet"
    folder.mkdir()
    rows(15).to_parquet(folder / "train-0.parquet")
    rows(6, 20).to_parquet(folder / "test-0.parquet")
    assert sizes(load_data(folder, size=SIZE, val_fraction=0)) == {"train": 15, "test": 6}


def test_a_limit_and_the_roles_of_a_run_hold(tmp_path):
    folder = saved(tmp_path / "data", rows())
    splits = load_data(f"hf:{folder}", size=SIZE, limit=6, confirm_fraction=0.5)
    assert sizes(splits) == {"train": 6, "val": 3, "confirm": 3, "test": 3}
    again = load_data(folder, size=SIZE, reading=Reading(manifest=manifest_of(splits)))
    assert manifest_of(again).digest == manifest_of(splits).digest
    other = saved(tmp_path / "other", rows(start=3))
    with pytest.raises(ValueError, match="replaced"):
        load_data(other, size=SIZE, reading=Reading(manifest=manifest_of(splits)))


def test_labels_without_names_are_numbers(tmp_path):
    assert load_data(saved(tmp_path / "data", rows(names=None)), size=SIZE).classes == ("0", "1", "2")


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path):
    refused("hf:somebody/something", "hf:somebody/something: cannot be read (", "the name of a dataset")
    no_label = rows().rename_column("label", "kind").cast_column("kind", datasets.Value("int64"))
    refused(saved(tmp_path / "a", no_label), "image, kind", "one that is called label")


def test_a_path_in_a_dataset_is_not_followed():
    kinds = datasets.Features({"image": datasets.Image(decode=False)})
    elsewhere = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": "/etc/hostname"}]}, features=kinds)
    images = basisprune.data.hub.HubImages(elsewhere, ["a"], ("a",), SIZE, "data: train")
    assert images.look(0).fault.startswith("data: train[0]: the image itself is not in the dataset")


@pytest.mark.parametrize("kind", [datasets.Image(), datasets.List(datasets.Image()), datasets.Value("float32")])
def test_labels_that_reading_would_open_are_not_read(tmp_path, kind):
    elsewhere = {"bytes": None, "path": str(tmp_path / "opened.png")}
    label = {"Image": elsewhere, "List": [elsewhere]}.get(type(kind).__name__, 0.5)
    kinds = datasets.Features({"image": datasets.Image(), "label": kind}).arrow_schema
    table = pa.table({"image": [{"bytes": picture(0), "path": None}] * 9, "label": [label] * 9}, schema=kinds)
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(table, folder / "train.parquet")
    opened: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:  # it stays for the rest of the process
        if event == "open" and str(args[0]) == str(tmp_path / "opened.png"):
            opened.append(event)

    sys.addaudithook(hook)
    refused(folder, "the column label is")
    assert not opened


def test_the_labels_of_every_split_are_looked_at_before_they_are_read(tmp_path):
    folder = saved(tmp_path / "data", datasets.DatasetDict({"train": rows(), "validation": rows(9, 30)}))
    shutil.rmtree(folder / "validation")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Image()})
    held = {"image": [{"bytes": picture(0), "path": None}], "label": [{"bytes": picture(1), "path": None}]}
    saved(folder / "validation", datasets.Dataset.from_dict(held, features=kinds))
    refused(folder, "data: val", "the column label is")


def test_a_saved_dataset_names_no_files_elsewhere_and_an_address_is_no_dataset(tmp_path):
    folder = saved(tmp_path / "data", rows(9))
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"][0]["filename"] = f"../data/{state['_data_files'][0]['filename']}"
    (folder / "state.json").write_text(json.dumps(state))
    refused(folder, "which is not beside it")
    for name in ("hdfs::Photos", "https://host/x.json", "../x", "a/b/c"):
        refused(f"hf:{name}", "no name on the hub")


CARD = "---\nconfigs:\n- config_name: default\n  data_files: '{}'\n---\n"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub in whose one dataset anything may be; the files of each revision are in a folder."""
    asked = []

    def snapshot_download(name, *, repo_type, revision, allow_patterns):
        asked.append((name, repo_type, revision))
        assert allow_patterns == ["*.parquet"]
        found = tmp_path / str(revision).replace("/", "-")
        if revision is not None and not found.is_dir():  # of an empty one there is no folder
            raise huggingface_hub.errors.RevisionNotFoundError("404", response=Mock())
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # where the package itself would go, it fails
    return asked


def parquet(path: Path, count: int, start: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows(count, start).to_parquet(path)


def local_only(function):
    def checked(kind=None, **options):
        assert kind in (None, "file", "local")
        return function(kind, **options)

    return checked


@pytest.mark.parametrize("address", ["reference://a.csv::http://127.0.0.1/refs.json", "hdfs://127.0.0.1/a.csv"])
def test_of_a_dataset_on_the_hub_only_its_parquet_files_are_read(tmp_path, monkeypatch, hub, address):
    for function in ("filesystem", "get_filesystem_class"):
        monkeypatch.setattr(fsspec.core, function, local_only(getattr(fsspec.core, function)))
    home = tmp_path / "None"
    parquet(home / "data" / "train-00000-of-00001.parquet", 15)
    parquet(home / "data" / "validation-00000-of-00001.parquet", 6, 20)
    parquet(home / "data" / "unlabelled-00000-of-00001.parquet", 3, 40)
    (home / "README.md").write_text(CARD.format(address))
    assert sizes(load_data("hf:some/photos", size=SIZE, test_fraction=0)) == {"train": 15, "val": 6}
    assert hub == [("some/photos", "dataset", None)]


def test_what_the_hub_converted_is_read_and_a_choice_is_not_guessed(tmp_path, hub):
    refused("hf:some/photos", "hf:some/photos: has no Parquet files", "save_to_disk")
    for part, count in (("train", 12), ("test", 6)):
        parquet(tmp_path / "refs-convert-parquet" / "default" / part / "0000.parquet", count, 20 * (part == "test"))
    assert sizes(load_data("hf:some/photos", size=SIZE, val_fraction=0)) == {"train": 12, "test": 6}
    assert [revision for _, _, revision in hub[-2:]] == [None, "refs/convert/parquet"]
    parquet(tmp_path / "refs-convert-parquet" / "small" / "train" / "0000.parquet", 3)
    refused("hf:some/photos", "has Parquet files in default, small; download those of one")


def forged(folder: Path, kind: str, dtype: str = "int64") -> Path:
    """A folder whose files say that a third column has this type."""
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    features["extra"] = {"_type": "Value", "dtype": dtype}
    images = [{"bytes": picture(number), "path": None} for number in range(30)]
    columns = {
        "image": pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        "label": pa.array([number % 2 for number in range(30)], pa.int64()),
        "extra": pa.array([0] * 30, pa.int64()),
    }
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    folder.mkdir()
    if kind == "parquet":
        pq.write_table(table, folder / "train.parquet")
        return folder
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("dtype", ["have_libhdfs", "show_info", "create_library_symlinks", "get_libraries"])
def test_a_type_of_a_column_calls_nothing_of_arrow(tmp_path, monkeypatch, kind, dtype):
    called = []
    monkeypatch.setattr(pa, dtype, lambda *_: called.append(dtype))
    refused(forged(tmp_path / "photos", kind, dtype), "which is not one of data", size=SIZE)
    assert called == []


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("dtype", ["int64", "float32", "string", "timestamp[ms]", "decimal128(5, 2)"])
def test_columns_of_data_may_stand_beside(tmp_path, kind, dtype):
    types = {"float32": pa.float32(), "string": pa.string(), "timestamp[ms]": pa.timestamp("ms")}
    dataset = rows(names=("a", "b", "c")).add_column("extra", pa.nulls(30, types.get(dtype, pa.int64())).to_pylist())
    if dtype in types:
        dataset = dataset.cast_column("extra", datasets.Value(dtype))
    folder = tmp_path / "photos"
    if kind == "arrow":
        dataset.save_to_disk(folder)
    else:
        folder.mkdir()
        dataset.to_parquet(folder / "train.parquet")
    assert len(load_data(folder, size=SIZE).train) > 0


def test_offsets_beyond_a_file_are_refused_before_they_are_followed(tmp_path):
    folder = forged(tmp_path / "photos", "arrow")
    path = folder / "data.arrow"
    with pa.memory_map(str(path)) as file:
        images = pa.ipc.open_stream(file).read_all().column("image").chunk(0).field("bytes")
        offsets = np.frombuffer(images.buffers()[1], np.int32)[:31].copy()
    content = bytearray(path.read_bytes())
    place = bytes(content).find(offsets.tobytes())
    offsets[1:] += 0x7000_0000
    content[place : place + offsets.nbytes] = offsets.tobytes()
    path.write_bytes(content)
    refused(folder, "cannot be read", size=SIZE)


@pytest.mark.parametrize("name", ["hdfs::Photos", "reference::refs.json", "simplecache::x", "github::x"])
def test_no_name_is_read_as_an_address(tmp_path, monkeypatch, name):
    saved(tmp_path / "sound", rows(9)).rename(tmp_path / name)
    for function in ("filesystem", "get_filesystem_class"):
        monkeypatch.setattr(f"fsspec.core.{function}", lambda protocol, **_: pytest.fail(protocol))
    monkeypatch.chdir(tmp_path)
    assert len(load_data(name, size=SIZE).train) > 0
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet" / f"{name}.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "parquet")
    refused(".", "could be read as an address")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    folder = saved(tmp_path / "data", rows(9))
    monkeypatch.setattr(basisprune.data.hub, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[datasets\]"):
        load_data(folder, size=SIZE)


def write_mnist(root: Path, counts: dict[str, int]) -> None:
    """MNIST's own files, with few images."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in counts.items():
        noise = np.random.default_rng(len(part)).bytes(count * 784)
        images = struct.pack(">4i", 2051, count, 28, 28) + noise
        labels = struct.pack(">2i", 2049, count) + bytes(number % 10 for number in range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)
        for kind in ("images-idx3", "labels-idx1"):  # some releases look for the archives too
            packed = gzip.compress((raw / f"{part}-{kind}-ubyte").read_bytes())
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(packed)


def test_torchvision_data_is_found_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    write_mnist(tmp_path, {"train": 50, "t10k": 20})
    splits = load_data("torchvision:MNIST")
    assert isinstance(splits.test, ArrayImages)
    assert sizes(splits) == {"train": 40, "val": 10, "test": 20}
    assert splits.num_classes == 10
    assert splits.train[0][0].shape == (1, 28, 28)


class Photos:
    """Stands for a torchvision dataset of image files."""

    def __init__(self, root, split="train", download=False) -> None:
        self.classes = ["a", "b"]
        self._labels = [0, 1] * {"trainval": 10, "test": 3}[split]
        self.height = len(split)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index):
        return Image.new("RGB", (7 + index, self.height)), self._labels[index]


def test_torchvision_files_are_resized_to_stack(tmp_path, monkeypatch):
    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", Photos)
    splits = load_data("torchvision:OxfordIIITPet", size=(8, 6))
    assert sizes(splits) == {"train": 16, "val": 4, "test": 6}
    assert splits.classes == ("a", "b")
    assert {image.shape for image, _ in splits.train} == {(3, 8, 6)}


def test_torchvision_arrays_with_channels_first_are_taken_from_memory(tmp_path, monkeypatch):
    class Numbers:
        data = np.arange(30 * 90, dtype=np.uint8).reshape(30, 3, 6, 5)
        labels = np.arange(30) % 3

        def __init__(self, root, split, download) -> None:
            if split == "test":
                self.data = 255 - self.data

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index):
            return Image.new("RGB", (5, 6)), int(self.labels[index])

    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "SVHN", Numbers)
    splits = load_data("torchvision:SVHN")
    assert isinstance(splits.test, ArrayImages)
    np.testing.assert_array_equal(splits.test[3][0].numpy(), 255 - Numbers.data[3])


def test_every_known_name_is_one_of_torchvision():
    assert all(hasattr(torchvision.datasets, name) for name in ARGUMENTS)


def test_an_unknown_name_is_refused_with_the_nearest():
    refused("torchvision:cifar10", "torchvision:cifar10", "Did you mean", "CIFAR10")
    refused("torchvision:FashonMNIST", "FashionMNIST")
    refused("torchvision:zzzzzz", "Known are", *ARGUMENTS)


def test_a_failed_download_says_where_to_put_the_files(tmp_path, monkeypatch):
    def fail(self) -> None:
        raise URLError("no route to host")

    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", fail)
    refused("torchvision:CIFAR10", "torchvision:CIFAR10", "no route to host", str(tmp_path), "BASISPRUNE_DATA")
