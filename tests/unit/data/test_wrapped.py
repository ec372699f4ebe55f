"""Laws of datasets of somebody else: known by file or by content, whatever they draw at random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sources import SHADES, write_images
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from basisprune.data import WrappedDataset, load_data, make_loader
from basisprune.data.looks import file_hash
from basisprune.data.reading import Reading
from basisprune.data.roles import manifest_of, names_of
from basisprune.errors import DataError


class Noise(Dataset):
    """Noise that is drawn anew for each item, by PyTorch or by a generator of its own."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = np.random.default_rng(0) if own else None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index):
        values = torch.rand(3, 4, 4) if self.own is None else torch.from_numpy(self.own.random((3, 4, 4)))
        return values.float() * (index + 1) / 20, index % 2


@pytest.fixture
def photos(tmp_path):
    write_images(tmp_path, {"ant": 10, "bee": 10})
    for index, path in enumerate(sorted(tmp_path.rglob("*.png"))):
        Image.open(path).resize((9 + index, 30 - index)).save(path)
    return tmp_path


def test_photos_of_different_sizes_in_an_image_folder_are_read_as_from_a_path(photos):
    dataset = ImageFolder(str(photos))
    splits = load_data(dataset, size=(8, 6))
    assert names_of(splits)["test"] == [f"train/{name}" for name in names_of(load_data(photos))["test"]]
    for images, labels in make_loader(splits.train, 4):
        assert images.shape[1:] == (3, 8, 6)
        assert images[:, 0, 0, 0].tolist() == [list(SHADES.values())[label] for label in labels.tolist()]
    assert next(iter(make_loader(dataset, 4, size=(8, 6))))[0].shape == (4, 3, 8, 6)


def test_files_of_a_dataset_are_known_by_their_content_whatever_is_done_to_them(photos):
    transform = v2.RandomResizedCrop(8)
    wrapped = WrappedDataset(Subset(ImageFolder(str(photos), transform=transform), [3, 12]))
    assert wrapped.in_parallel
    assert [wrapped.look(index).sha256 for index in (0, 1)] == [file_hash(path) for path in wrapped.paths]
    manifest = manifest_of(load_data(ImageFolder(str(photos), transform=transform)))
    write_images(photos / "new", {"ant": 1})
    (photos / "new" / "ant" / "0.png").rename(photos / "ant" / "00.png")  # sorts before most others
    (photos / "new" / "ant").rmdir()
    (photos / "new").rmdir()
    found = load_data(ImageFolder(str(photos), transform=transform), reading=Reading(manifest=manifest))
    assert manifest_of(found).digest == manifest.digest


def test_a_damaged_file_in_an_image_folder_is_left_out(photos):
    (photos / "ant" / "3.png").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1 image left out(?s:.*)item 3"):
        splits = load_data(ImageFolder(str(photos)))
    assert sum(map(len, splits.parts.values())) == 19


def test_random_images_are_known_by_content_where_their_random_numbers_can_be_repeated():
    manifests = [manifest_of(load_data(Noise())) for _ in range(2)]
    assert manifests[0] == manifests[1]
    assert all(entry.sha256 for entry in manifests[0].parts["train"])


def test_images_that_differ_each_time_are_known_by_place_alone():
    manifests = [manifest_of(load_data(Noise(own=True))) for _ in range(2)]
    assert manifests[0] == manifests[1]
    assert not any(entry.sha256 for entry in manifests[0].parts["train"])
    load_data(Noise(own=True), reading=Reading(manifest=manifests[0]))


@pytest.mark.parametrize("groups", [[1, 2], [[1]] * 20, [0.5] * 20, object()])
def test_groups_that_do_not_fit_are_refused(groups):
    dataset = Noise()
    dataset.groups = groups
    with pytest.raises(DataError, match=r"groups .* given"):
        load_data(dataset)
