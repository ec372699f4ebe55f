"""Laws of folders of class folders."""

from __future__ import annotations

import errno
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sources import SHADES, refused, sizes, write_images

from basisprune.data import Reading, Splits, image_files, load_data
from basisprune.data.folders import ShardImages, expanded, read_shards
from basisprune.data.load import recall
from basisprune.data.manifest import manifest_of
from basisprune.errors import DataError


def test_class_folders_become_three_parts(tmp_path):
    splits = load_data(write_images(tmp_path, {"cat": 10, "ant": 20, "bee": 3}), size=(8, 9))
    assert splits.classes == ("ant", "bee", "cat")
    assert splits.num_classes == 3
    assert sizes(splits) == {"train": 14 + 1 + 7, "val": 4 + 1 + 2, "test": 2 + 1 + 1}
    for part in splits.parts.values():
        assert part.classes == splits.classes
        for image, label in part:
            assert image.shape == (3, 8, 9)
            assert image.unique().tolist() == [SHADES[splits.classes[label]]]


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_part_folders_are_taken_as_they_are(tmp_path, val):
    for part, count in (("train", 5), (val, 2), ("test", 3)):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    write_images(tmp_path / "extra", {"dog": 2})
    splits = load_data(tmp_path)
    assert sizes(splits) == {"train": 10, "val": 4, "test": 6}
    assert splits.classes == ("ant", "bee")


def test_a_class_may_be_called_train(tmp_path):
    assert load_data(write_images(tmp_path, {"bus": 4, "train": 4})).classes == ("bus", "train")


def test_nested_images_are_found_and_hidden_or_other_files_passed_over(tmp_path):
    write_images(tmp_path, {"ant": 3, "bee": 3})
    write_images(tmp_path / "ant", {"deep": 1, ".cache": 1})
    write_images(tmp_path, {".git": 2})
    (tmp_path / "bee" / "notes.txt").write_text("x")
    (tmp_path / "bee" / "._0.png").write_text("x")
    (tmp_path / "bee" / "3.PNG").write_bytes((tmp_path / "bee" / "0.png").read_bytes())
    splits = load_data(tmp_path, val_fraction=0, test_fraction=0)
    assert np.bincount(splits.train.labels).tolist() == [4, 4]


@pytest.mark.parametrize(
    "names", [("Train", "VAL", "Test"), ("TRAINING", "Valid", "TESTING"), ("training", "validation", "test")]
)
def test_parts_are_known_by_their_names_in_any_case(tmp_path, names):
    for part, count in zip(names, (5, 2, 3), strict=True):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    splits = load_data(tmp_path)
    assert sizes(splits) == {"train": 10, "val": 4, "test": 6}
    assert splits.classes == ("ant", "bee")


@pytest.mark.parametrize(
    "folders",
    [
        {"train": ("ant", "bee"), "test_images": ("ant", "bee")},
        {"train_set": ("ant", "bee"), "test_set": ("ant", "bee")},
        {"": ("ant", "bee"), "val": ("ant", "bee")},
        {"": ("ant", "bee"), "Evaluation": ("bee",)},
    ],
)
def test_a_folder_that_may_be_meant_as_a_part_is_asked_about(tmp_path, folders):
    for folder, classes in folders.items():
        write_images(tmp_path / folder, dict.fromkeys(classes, 4))
    refused(tmp_path, "looks like a part of the data", "call the parts train/, val/ and test/")


def test_classes_may_be_called_like_parts(tmp_path):
    write_images(tmp_path, {"valid": 4, "invalid": 4, "tested": 4})
    write_images(tmp_path / "tested", {"twice": 2})
    assert load_data(tmp_path).classes == ("invalid", "tested", "valid")


def test_two_training_folders_are_refused(tmp_path):
    for name in ("Train", "training"):
        write_images(tmp_path / name, {"ant": 3, "bee": 3})
    refused(tmp_path, "both Train and training")


def test_a_class_whose_name_is_no_utf8_is_refused(tmp_path):
    write_images(tmp_path, {"ant": 3})
    os.mkdir(os.fsencode(tmp_path) + b"/b\xffe")
    refused(tmp_path, "the name of the class is not valid UTF-8")


def test_a_class_that_is_a_link_to_another_is_refused(tmp_path):
    write_images(tmp_path, {"ant": 3, "bee": 3})
    (tmp_path / "cat").symlink_to(tmp_path / "ant")
    refused(tmp_path, str(tmp_path / "cat"), "read already")


def test_an_empty_folder_is_refused(tmp_path):
    refused(tmp_path, str(tmp_path), "no class folders")
    Image.new("RGB", (4, 4)).save(tmp_path / "loose.png")
    refused(tmp_path, str(tmp_path), "no class folders")


@pytest.mark.parametrize("extra", [(), ("a.txt", "b.txt")])
def test_a_class_without_images_is_refused(tmp_path, extra):
    write_images(tmp_path, {"ant": 3, "bee": 0})
    for name in extra:
        (tmp_path / "bee" / name).write_text("x")
    refused(tmp_path, str(tmp_path / "bee"), "no image", "2 other files, such as a.txt" if extra else "it is empty")


def test_one_class_only_is_refused(tmp_path):
    refused(write_images(tmp_path, {"ant": 3}), str(tmp_path), "one class only (ant)")


@pytest.mark.parametrize("part", ["val", "test"])
def test_parts_that_differ_in_classes_are_refused(tmp_path, part):
    write_images(tmp_path / "train", {"ant": 3, "bee": 3})
    write_images(tmp_path / part, {"ant": 3, "cat": 3})
    refused(tmp_path, str(tmp_path), f"only in train/: bee; only in {part}/: cat")


def test_two_validation_folders_or_no_training_folder_are_refused(tmp_path):
    for name in ("val", "valid"):
        write_images(tmp_path / name, {"ant": 1, "bee": 1})
    refused(tmp_path, str(tmp_path), "no train/")
    write_images(tmp_path / "train", {"ant": 3, "bee": 3})
    refused(tmp_path, str(tmp_path), "both val and valid")


def found(folder, within=None) -> list[str]:
    return [str(path.relative_to(within or folder)) for path in image_files(folder)]


def test_images_are_found_however_deep_and_hidden_ones_passed_over(tmp_path):
    write_images(tmp_path, {"b": 2, "a": 1, "a/deep": 1, ".hidden": 1, "a/.cache/inner": 1})
    (tmp_path / "a" / "._0.png").write_bytes(b"x")
    (tmp_path / "a" / "notes.txt").write_bytes(b"x")
    (tmp_path / "LOUD.JPG").write_bytes(b"x")
    assert found(tmp_path) == ["LOUD.JPG", "a/0.png", "a/deep/0.png", "b/0.png", "b/1.png"]


def test_a_folder_that_is_hidden_itself_can_be_asked_for(tmp_path):
    write_images(tmp_path, {".hidden": 1})
    assert found(tmp_path / ".hidden") == ["0.png"]


def test_links_are_followed(tmp_path):
    write_images(tmp_path / "elsewhere", {"more": 2})
    write_images(tmp_path, {"class": 1})
    (tmp_path / "class" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    (tmp_path / "class" / "one.png").symlink_to(tmp_path / "elsewhere" / "more" / "0.png")
    assert found(tmp_path / "class") == ["0.png", "more/0.png", "more/1.png", "one.png"]


@pytest.mark.parametrize("target", [".", "deep", "../class"])
def test_a_link_to_what_is_read_already_is_refused_by_name(tmp_path, target):
    write_images(tmp_path, {"class/deep": 1})
    (tmp_path / "class" / "round").symlink_to(target)
    with pytest.raises(DataError, match=r"read already; remove the link"):
        image_files(tmp_path / "class")


def test_what_is_called_an_image_and_is_no_file_is_refused_by_name(tmp_path):
    write_images(tmp_path, {"class": 1})
    path = tmp_path / "class" / "gone.png"
    for make in (lambda: path.symlink_to("nowhere"), lambda: path.symlink_to("gone.png"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(DataError, match=r"gone\.png: is a link to nothing, a pipe or a device"):
            image_files(tmp_path)
        path.unlink()


def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    def fail(path):
        raise NotADirectoryError(20, "Not a directory")

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(DataError, match=r"cannot be read \(Not a directory\)"):
        image_files(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_what_the_system_refuses_is_said_as_such_with_the_name(number, tmp_path, monkeypatch):
    def fail(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        image_files(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))


SIZE = (6, 5)


def write_shard(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return path


def picture(number: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format=kind)
    return buffer.getvalue()


def samples(count: int, start: int = 0, classes: int = 3) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number in range(start, start + count):
        found |= {f"{number:04d}.png": picture(number), f"{number:04d}.cls": str(number % classes).encode()}
    return found


@pytest.fixture
def shards(tmp_path) -> Path:
    """A folder of three shards, ten images each."""
    for number in range(3):
        write_shard(tmp_path / "data" / f"photos-{number:03d}.tar", samples(10, 10 * number))
    return tmp_path / "data"


def everything(splits: Splits) -> dict[str, tuple[torch.Tensor, int]]:
    return {
        entry.name: part[index]
        for role, part in splits.parts.items()
        for index, entry in enumerate(manifest_of(splits).parts[role])
    }


def test_a_pattern_a_folder_and_a_single_file_give_the_same_images(shards):
    by_folder = load_data(shards, size=SIZE)
    by_pattern = load_data(f"wds:{shards}/photos-{{000..002}}.tar", size=SIZE)
    assert sizes(by_folder) == sizes(by_pattern) == {"train": 21, "val": 6, "test": 3}
    assert manifest_of(by_folder).digest == manifest_of(by_pattern).digest
    single = load_data(shards / "photos-001.tar", size=SIZE, val_fraction=0, test_fraction=0)
    assert len(single.train) == 10
    assert single.classes == ("0", "1", "2")


def test_images_are_those_of_the_files_with_their_labels(shards):
    found = everything(load_data(shards, size=(5, 6)))
    assert len(found) == 30
    image, label = found["photos-001.tar/0013.png"]
    expected = np.asarray(Image.open(io.BytesIO(picture(13)))).transpose(2, 0, 1)
    assert np.array_equal(image.numpy(), expected)
    assert label == 13 % 3


def test_labels_can_be_names_and_folders_are_classes_where_there_are_no_labels(tmp_path):
    named = {f"{number}.{end}": value for number, (name, shade) in enumerate([("bee", 1), ("ant", 2)] * 6)
             for end, value in (("jpg", picture(number * 9 + shade, "JPEG")), ("cls", name.encode()))}  # fmt: skip
    assert read_shards(write_shard(tmp_path / "a.tar", named), SIZE).classes == ("ant", "bee")
    photos = write_images(tmp_path / "photos", {"bee": 4, "ant": 4})
    files = {str(path.relative_to(photos)): path.read_bytes() for path in sorted(photos.rglob("*.png"))}
    splits = read_shards(write_shard(tmp_path / "b.tar", files), SIZE)
    assert splits.classes == ("ant", "bee")
    assert splits.train.labels.tolist() == [0] * 4 + [1] * 4


def test_shards_that_are_called_so_are_parts(tmp_path):
    for part, start in (("train", 0), ("val", 30), ("test", 60)):
        write_shard(tmp_path / "named" / f"{part}-000.tar", samples(9, start))
        write_shard(tmp_path / "inside" / part / "000.tar", samples(9, start))
    for folder in ("named", "inside"):
        assert sizes(load_data(tmp_path / folder, size=SIZE)) == {"train": 9, "val": 9, "test": 9}
    write_shard(tmp_path / "named" / "more.tar", samples(3, 90))
    refused(tmp_path / "named", "more.tar", "beside shards that are called train")
    (tmp_path / "inside" / "train" / "000.tar").unlink()
    refused(tmp_path / "inside", "test, val", "none of train")


def test_a_limit_and_the_roles_of_a_run_hold_for_shards(shards):
    splits = load_data(shards, size=SIZE, limit=6, confirm_fraction=0.5)
    assert sizes(splits) == {"train": 6, "val": 3, "confirm": 3, "test": 3}
    manifest = manifest_of(splits)
    again = load_data(shards, size=SIZE, reading=Reading(manifest=manifest))
    assert manifest_of(again).digest == manifest.digest
    changed = manifest.parts["test"][0].name
    shard, name = changed.split("/")
    start = 10 * int(shard[-5])
    write_shard(shards / shard, {**samples(10, start), name: picture(99)})
    with pytest.raises(ValueError, match=f"{changed}: replaced"):
        recall(shards, SIZE, manifest, ("train", "val", "confirm", "test"), Reading())


def test_damaged_images_are_left_out_and_other_files_are_never_read(shards):
    class Trap:
        def __reduce__(self):
            return (Path(shards / "ran").touch, ())

    files = {**samples(9, 30), "0030.png": b"no image", "0031.pyd": pickle.dumps(Trap()), "0032.json": b"{"}
    write_shard(shards / "photos-003.tar", files)
    with pytest.warns(UserWarning, match=r"1 image left out.*\n.*photos-003.tar/0030.png"):
        splits = load_data(shards, size=SIZE)
    assert sum(sizes(splits).values()) == 38
    assert not (shards / "ran").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.png": b"x", "a.cls": b""}, "a.cls holds no label"),
        ({"a.png": b"x", "a.cls": b"\xff\xfe"}, "a.cls holds no label"),
        ({"a.png": b"x", "a.cls": b"1" * 2000}, "a.cls holds no label"),
        ({"a.png": b"x", "b.png": b"x", "a.cls": b"1"}, "b has no label"),
        ({"a.png": b"x"}, "a has no label"),
        ({"a.png": b"x", "a.jpg": b"x", "a.cls": b"1"}, "a has several images"),
        ({"a.txt": b"x"}, "contains no images"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, files, said):
    refused(write_shard(tmp_path / "a.tar", files), "a.tar", said)


def test_what_is_no_tar_file_of_this_machine_is_refused(shards, tmp_path):
    (tmp_path / "no.tar").write_bytes(b"x" * 4000)
    refused(tmp_path / "no.tar", "no.tar: cannot be read (", "write it again")
    whole = (shards / "photos-000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:2000])
    refused(tmp_path / "cut.tar", "cut.tar")
    for source in ("wds:pipe:touch ran", "wds:https://example.org/a.tar"):
        refused(source, "nothing is downloaded, and no command is run")
    refused(f"wds:{shards}/photos-{{000..009}}.tar", "photos-003.tar: there is no such file")
    (tmp_path / "a.tar.gz").touch()
    refused(f"wds:{tmp_path}/a.tar.gz", "unpack compressed ones")
    refused("wds:{0..99999999}.tar", "are allowed")


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a file, which may tell lies about its size."""
    about = tarfile.TarInfo(name)
    about.type = kind
    block = bytearray(about.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "content",
    [
        header("a/0.png", 0) + header("a/back", -512) + bytes(1024),
        header("a", 0, tarfile.XHDTYPE) * 2000 + bytes(1024),
        header("long", 2 << 20, tarfile.GNUTYPE_LONGNAME) + b"a" * (2 << 20) + header("a/0.png", 0) + bytes(1024),
    ],
    ids=["goes back for ever", "headers of headers", "a header as long as you like"],
)
def test_headers_that_lie_are_refused(content, tmp_path):
    (tmp_path / "trap.tar").write_bytes(content)
    refused(tmp_path / "trap.tar", "trap.tar: cannot be read (")


def test_ranges_keep_their_zeros():
    assert expanded("a{1..2}-{09..10}.tar") == ["a1-09.tar", "a1-10.tar", "a2-09.tar", "a2-10.tar"]
    assert expanded("a.tar") == ["a.tar"]


def test_an_image_that_the_shard_has_no_longer_is_an_error(shards):
    images = read_shards(shards, SIZE).train
    assert isinstance(images, ShardImages)
    path = shards / "photos-002.tar"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(ValueError, match="ends before the image does"):
        images[29]


# ------------------------------------------------------------------------------- members that are no plain files


def shard_of(path: Path, *members: tuple[str, bytes | tuple[bytes, str]], kind: int = tarfile.PAX_FORMAT) -> Path:
    """A shard of files, and of members of a type that lead to a name."""
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                about.type, about.linkname = content
                archive.addfile(about)
            else:
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))
    return path


TWO = (("a/1.png", picture(1)), ("b/2.png", picture(2)))


def test_a_hard_link_is_the_file_that_it_leads_to(tmp_path):
    links = (("a/3.png", (tarfile.LNKTYPE, "b/2.png")), ("a/4.png", (tarfile.LNKTYPE, "data.bin")))
    shard = shard_of(tmp_path / "a.tar", ("data.bin", picture(5)), *TWO, *links)
    images = read_shards(shard, (5, 6)).train
    assert images.labels.tolist() == [0, 1, 0, 0]
    assert torch.equal(images[1][0], images[2][0])
    assert np.array_equal(images[3][0].numpy(), np.asarray(Image.open(io.BytesIO(picture(5)))).transpose(2, 0, 1))


def test_a_label_may_be_a_hard_link_too(tmp_path):
    files = {**samples(2), "2.png": picture(2)}
    shard = shard_of(tmp_path / "a.tar", *files.items(), ("2.cls", (tarfile.LNKTYPE, "0001.cls")))
    assert read_shards(shard, SIZE).train.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("kind", "to", "said"),
    [
        (tarfile.LNKTYPE, "nothing.png", "is a hard link to 'nothing.png', which is no file before it"),
        (tarfile.LNKTYPE, "/etc/passwd", "is a hard link to '/etc/passwd', which is no file before it"),
        (tarfile.LNKTYPE, "b/3.png", "is a hard link to 'b/3.png', which is no file before it"),
        (tarfile.SYMTYPE, "../a/1.png", "is a link"),
        (tarfile.FIFOTYPE, "", "is a pipe or a device"),
        (tarfile.CHRTYPE, "", "is a pipe or a device"),
        (tarfile.GNUTYPE_SPARSE, "", "is a sparse file"),
    ],
)
@pytest.mark.parametrize("name", ["b/3.png", "b/3.cls"])
def test_images_and_labels_that_are_no_files_are_refused_by_name(kind, to, said, name, tmp_path):
    shard = shard_of(tmp_path / "a.tar", *TWO, (name, (kind, to)), kind=tarfile.GNU_FORMAT)
    refused(shard, f"a.tar: {name} {said}")


def test_other_members_may_be_anything(tmp_path):
    others = (("d", (tarfile.DIRTYPE, "")), ("x.json", (tarfile.SYMTYPE, "/etc")), ("a/._1.png", b"resource fork"))
    assert len(read_shards(shard_of(tmp_path / "a.tar", *others, *TWO), SIZE).train) == 2


def test_two_labels_of_one_image_are_refused(tmp_path):
    twice = (*samples(2).items(), ("0001.cls", b"0"))
    refused(shard_of(tmp_path / "a.tar", *twice), "0001 has several labels, such as 0001.cls")


@pytest.mark.parametrize("name", ["b/\udcff.png", "b/\x1b[2J.png", "b/new\nline.png"])
def test_names_that_cannot_be_shown_are_refused(name, tmp_path):
    refused(shard_of(tmp_path / "a.tar", *TWO, (name, picture(3)), kind=tarfile.GNU_FORMAT), "is no name in UTF-8")


def test_folders_that_lead_upwards_are_no_classes(tmp_path):
    refused(shard_of(tmp_path / "a.tar", *TWO, ("../3.png", picture(3))), "../3 has no label")
