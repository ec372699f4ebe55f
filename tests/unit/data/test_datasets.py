"""Laws of labelled images in memory, in files and in datasets of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sources import SHADES, write_images
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from basisprune.data import ArrayImages, FolderImages, WrappedDataset, load_data, make_loader, take
from basisprune.data.decode import file_hash
from basisprune.data.load import Reading
from basisprune.data.manifest import manifest_of
from basisprune.data.split import names_of
from basisprune.errors import DataError

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2]


class Listing(Dataset):
    """A dataset of the given items, with any other attributes."""

    def __init__(self, items, **attributes) -> None:
        self.items = items
        self.reads = 0
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy, lambda a: a.astype(np.int64)])
def test_an_array_yields_its_images_channels_first(make):
    images = ArrayImages(make(COLOURS.copy()), LABELS)
    assert len(images) == 6
    image, label = images[4]
    assert (image.dtype, label, type(label)) == (torch.uint8, 1, int)
    np.testing.assert_array_equal(image.numpy(), COLOURS[4].transpose(2, 0, 1))


def test_grey_arrays_and_labels_in_a_column_are_taken():
    images = ArrayImages(COLOURS[..., 0], np.array(LABELS)[:, None], ("a", "b", "c"))
    assert images[0][0].shape == (1, 5, 4)
    assert images.labels.tolist() == LABELS
    assert images.classes == ("a", "b", "c")


def test_an_array_that_must_not_be_written_is_taken_without_a_warning():
    frozen = COLOURS[::-1]
    frozen.flags.writeable = False
    np.testing.assert_array_equal(ArrayImages(frozen, LABELS)[0][0].numpy(), COLOURS[5].transpose(2, 0, 1))


def test_a_batch_is_the_same_as_its_items():
    images = ArrayImages(COLOURS, LABELS)
    batch = images.__getitems__([4, 0, 4])
    for (image, label), index in zip(batch, [4, 0, 4], strict=True):
        assert torch.equal(image, images[index][0])
        assert label == images[index][1]


def test_a_plain_pytorch_loader_can_batch_it():
    pixels, labels = next(iter(DataLoader(ArrayImages(COLOURS, LABELS), 6)))
    np.testing.assert_array_equal(pixels.numpy(), COLOURS.transpose(0, 3, 1, 2))
    assert labels.tolist() == LABELS


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (COLOURS / 255, LABELS, r"float64 images from .* to 1 given.*\(images \* 255\).*uint8"),
        (COLOURS.astype(np.float32), LABELS, r"float32 images from 0 to 255 given.*images\.round\(\)"),
        (np.full((6, 5, 4), np.nan), LABELS, "NaN"),
        (COLOURS.astype(np.int32) + 1, LABELS, "int32 images from 1 to 256 given"),
        (COLOURS > 3, LABELS, "bool images given"),
        (COLOURS.transpose(0, 3, 1, 2), LABELS, r"shape \(6, 3, 5, 4\) given.*transpose"),
        (COLOURS[0, 0], LABELS, r"shape \(4, 3\) given"),
        (COLOURS[:0], [], r"shape \(0, 5, 4, 3\) given"),
        (COLOURS, LABELS[:5], "5 labels given for 6 images"),
        (COLOURS, [0.5] * 6, "float64 labels given .*0.5.*integers"),
        (COLOURS, np.eye(6, dtype=int), r"labels of shape \(6, 6\) given.*argmax"),
        (COLOURS, [0, 1, 2, 0, 1, -2], "item 5: label -2 given, 0..2 is allowed"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(images, labels, message):
    with pytest.raises(DataError, match=f"^mine: .*{message}"):
        ArrayImages(images, labels, name="mine")


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(DataError, match=r"item 2: label 2 given, 0\.\.1 is allowed"):
        ArrayImages(COLOURS, LABELS, ("a", "b"))


def test_labels_cannot_be_changed_by_accident():
    with pytest.raises(ValueError, match="read-only"):
        ArrayImages(COLOURS, LABELS).labels[0] = 1


def test_files_are_decoded_when_asked_for_and_resized(tmp_path):
    path = tmp_path / "late.png"
    images = FolderImages([(path, 1)], ("a", "b"), (6, 9))
    Image.new("RGB", (8, 8), (10, 20, 30)).save(path)
    image, label = images[0]
    assert label == 1
    assert image.shape == (3, 6, 9)
    assert image[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    "convert",
    [
        Image.fromarray,
        lambda a: a,
        lambda a: torch.from_numpy(a.transpose(2, 0, 1).copy()),
        lambda a: a.transpose(2, 0, 1),
        lambda a: a[:, ::-1][:, ::-1],
    ],
    ids=["pil", "array", "tensor", "channels-first array", "view"],
)
def test_images_of_every_type_become_tensors(convert):
    wrapped = WrappedDataset(Listing([(convert(image), label) for image, label in zip(COLOURS, LABELS, strict=True)]))
    for index in range(6):
        image, label = wrapped[index]
        np.testing.assert_array_equal(image.numpy(), COLOURS[index].transpose(2, 0, 1))
        assert label == LABELS[index]
    assert wrapped.classes == ("0", "1", "2")


def test_floats_stay_floats_and_flat_images_get_a_channel():
    wrapped = WrappedDataset(Listing([(np.zeros((4, 5)), 0), (torch.zeros(4, 5), 1)]))
    assert [image.shape for image, _ in wrapped] == [(1, 4, 5)] * 2
    assert [image.dtype for image, _ in wrapped] == [torch.float64, torch.float32]


def test_pil_images_are_resized_if_asked():
    wrapped = WrappedDataset(Listing([(Image.new("L", (9, 7)), 0)]), size=(4, 6))
    assert wrapped[0][0].shape == (3, 4, 6)


@pytest.mark.parametrize("name", ["targets", "labels", "y"])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_listed_labels_spare_reading_the_images(name, convert):
    listing = Listing(list(zip(COLOURS, LABELS, strict=True)) * 5, **{name: convert(LABELS * 5)})
    wrapped = WrappedDataset(listing)
    assert listing.reads == 0
    assert wrapped.labels.tolist() == LABELS * 5
    assert listing.reads <= 3


@pytest.mark.parametrize(
    "listed", [[1, 1, 0, 2, 2, 2], [0, 1], [[0]] * 6, [0.5] * 6, ["a"] * 6, [[0], [1, 2], 1, 1, 1, 1], None]
)
def test_labels_are_read_from_the_items_if_the_list_is_not_plausible(listed):
    wrapped = WrappedDataset(Listing(list(zip(COLOURS, LABELS, strict=True)), targets=listed))
    assert wrapped.labels.tolist() == LABELS


def test_labels_and_classes_are_seen_through_subsets():
    listing = Listing(list(zip(COLOURS, LABELS, strict=True)), targets=LABELS, classes=["a", "b", "c"])
    wrapped = WrappedDataset(Subset(Subset(listing, [5, 4, 3, 1]), [1, 2, 3]))
    assert wrapped.labels.tolist() == [1, 0, 1]
    assert wrapped.classes == ("a", "b", "c")
    assert listing.reads <= 3


@pytest.mark.parametrize("label", [np.int64(1), torch.tensor(1), np.array(1), True])
def test_integers_of_every_type_are_labels(label):
    assert WrappedDataset(Listing([(COLOURS[0], label)]), ("a", "b"))[0][1] == 1


@pytest.mark.parametrize("label", [0.5, "cat", None, torch.tensor(1.0), [0, 1]])
def test_a_label_that_is_no_integer_is_refused_with_its_index(label):
    wrapped = WrappedDataset(Listing([(COLOURS[0], 0), (COLOURS[0], label)]), ("a", "b"), name="train dataset")
    with pytest.raises(DataError, match=r"train dataset: item 1: label .* given, an integer is needed"):
        wrapped[1]


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_out_of_range_is_refused_with_its_index(label):
    wrapped = WrappedDataset(Listing([(COLOURS[0], 0), (COLOURS[0], label)]), ("a", "b"))
    with pytest.raises(DataError, match=rf"item 1: label {label} given, 0\.\.1 is allowed"):
        wrapped[1]


def test_negative_labels_are_refused_when_they_are_counted():
    with pytest.raises(DataError, match="item 1: label -1 given, 0 or more"):
        _ = WrappedDataset(Listing([(COLOURS[0], 0), (COLOURS[0], -1)])).labels


@pytest.mark.parametrize("item", [COLOURS[0], (COLOURS[0],), (COLOURS[0], 0, 0)])
def test_an_item_that_is_no_pair_is_refused_with_its_index(item):
    with pytest.raises(DataError, match=r"item 0: .* given, \(image, label\) is needed"):
        WrappedDataset(Listing([item]), ("a",))[0]


@pytest.mark.parametrize(
    "image", ["a.png", COLOURS[0].astype(int), torch.zeros(3, 4, 4, dtype=torch.int64), torch.zeros(1, 3, 4, 4)]
)
def test_an_image_of_another_type_is_refused_with_its_index(image):
    with pytest.raises(DataError, match=r"item 0: .* given as image; a PIL image"):
        WrappedDataset(Listing([(image, 0)]), ("a",))[0]


def test_a_dataset_without_length_or_items_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="Stream given, a map-style dataset is needed"):
        WrappedDataset(Stream())


def test_a_tensor_dataset_works():
    wrapped = WrappedDataset(TensorDataset(torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 1, 0])))
    assert wrapped.labels.tolist() == [0, 1, 1, 0]
    assert wrapped[1][1] == 1


def test_taking_keeps_labels_and_classes_and_composes():
    images = ArrayImages(COLOURS, LABELS, ("a", "b", "c"))
    chosen = take(take(images, [5, 3, 1]), np.array([2, 0]))
    assert chosen.labels.tolist() == [1, 2]
    assert chosen.classes == images.classes
    assert chosen.dataset is images
    for position, index in enumerate([1, 5]):
        assert torch.equal(chosen[position][0], images[index][0])
        assert torch.equal(chosen.__getitems__([position])[0][0], images[index][0])


def test_taking_what_is_not_there_is_refused():
    with pytest.raises(IndexError):
        take(ArrayImages(COLOURS, LABELS), [6])


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
