"""Laws of near copies."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sources import sizes, write_images
from tiny import Notes

from basisprune.data import ArrayImages, load_data, take
from basisprune.data.copies import for_each, linked, look_at, looks_of, near_copies
from basisprune.data.datasets import base_of
from basisprune.data.decode import decode_content, file_hash, thumbnail, to_pixels
from basisprune.data.load import Reading
from basisprune.data.split import reread, white_of
from basisprune.errors import DataError


def photo(seed: int, side: int = 96) -> Image.Image:
    """Something with large and small shapes, as photographs have."""
    random = np.random.default_rng(seed)
    layers = [np.kron(random.normal(size=(3, n, n)), np.ones((64 // n, 64 // n))) / n**0.8 for n in (2, 4, 8, 16, 32)]
    pixels = np.clip(128 + 75 * sum(layers), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels.transpose(1, 2, 0)).resize((side, side), Image.Resampling.BICUBIC)


def reencoded(image: Image.Image, **settings) -> Image.Image:
    file = io.BytesIO()
    image.save(file, **settings)
    return Image.open(file)


def one_bit(image: Image.Image) -> Image.Image:
    pixels = np.array(image)
    pixels[3, 5, 1] ^= 1
    return Image.fromarray(pixels)


CHANGES = {
    "JPEG": lambda image: reencoded(image, format="JPEG", quality=60),
    "WebP": lambda image: reencoded(image, format="WEBP", quality=70),
    "one bit": one_bit,
    "larger": lambda image: image.resize((200, 200)),
    "smaller": lambda image: image.resize((64, 64)),
    "shifted": lambda image: Image.fromarray(np.roll(np.array(image), (2, -3), (0, 1))),
    "cut": lambda image: image.crop((2, 1, 96, 96)),
}


def units(images) -> list[int]:
    found = near_copies([thumbnail(to_pixels(image)) for image in images])
    return linked(len(images), found).tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_an_image_is_known_again_after_what_files_go_through(change):
    first = [photo(seed) for seed in range(40)]
    assert units([*first, *map(CHANGES[change], first[:20])]) == [*range(40), *range(20)]


def test_real_digits_of_other_people_are_no_copies():
    digits = [Image.fromarray((image * 15.9).astype(np.uint8)) for image in load_digits().images[:600]]
    assert len(set(units(digits))) >= 598


def test_images_with_one_background_or_without_contrast_are_no_copies():
    random = np.random.default_rng(0)
    scene = np.array(photo(0)).astype(np.int64)
    marked, plain = [], []
    for _ in range(60):
        pixels, (row, column) = scene.copy(), random.integers(0, 80, 2)
        pixels[row : row + 12, column : column + 12] = random.integers(0, 256, 3)
        marked.append(Image.fromarray(np.clip(pixels + random.normal(0, 3, pixels.shape), 0, 255).astype(np.uint8)))
        plain.append(Image.fromarray(np.full((40, 40, 3), 200, np.uint8)))
    assert len(set(units(marked))) >= 55
    assert len(set(units(plain))) == 60  # which content tells apart


def test_colours_tell_images_apart():
    grey = np.array(photo(1).convert("L"))
    red, blue = (np.zeros((*grey.shape, 3), np.uint8) for _ in range(2))
    red[..., 0], blue[..., 2] = grey, grey
    assert units([Image.fromarray(red), Image.fromarray(blue)]) == [0, 1]


def test_prepared_inputs_have_near_copies_and_what_is_no_image_has_none():
    image = to_pixels(photo(2)).float().sub(120).div(60)
    others = [to_pixels(photo(seed)).float().sub(120).div(60) for seed in range(3, 8)]
    found = near_copies([thumbnail(each) for each in (image, *others, image + 0.01)])
    assert found.tolist() == [[0, 6]]
    assert thumbnail(torch.rand(3, 4)) == thumbnail(torch.rand(1, 4, 4)) == thumbnail("photo") == b""
    assert near_copies([b"", b""]).shape == (0, 2)


def test_ten_thousand_copies_of_a_few_images_are_found_in_no_time():
    few = [thumbnail(to_pixels(photo(seed))) for seed in range(3)]
    assert len(near_copies(few * 4000)) == 3 * 3999


class OpeningNotes(Notes):
    """Remembers how far the opening went, too."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: list[tuple[int, int]] = []

    def opened(self, done: int, total: int) -> None:
        self.progress.append((done, total))


def grey(path, value, dtype) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((4, 4), dtype=dtype)
    pixels[0, 0] = value
    pixels[3, 3] = min(int(path.stem), value)  # no two are the same
    Image.fromarray(pixels).save(path)


def test_a_damaged_image_is_left_out_and_told(tmp_path):
    write_images(tmp_path, {"ant": 10, "bee": 10})
    (tmp_path / "ant" / "3.png").write_bytes((tmp_path / "ant" / "3.png").read_bytes()[:60])
    (tmp_path / "bee" / "notes.jpg").write_text("no image")
    notes = OpeningNotes()
    splits = load_data(tmp_path, reading=Reading(callback=notes))
    assert sum(sizes(splits).values()) == 19
    assert all(len(part[index][0]) == 3 for part in splits.parts.values() for index in range(len(part)))
    first, line = notes.lines
    assert first == f"{tmp_path}: opening 21 images"
    assert all(said in line for said in ("2 images left out, which cannot be used", "3.png", "notes.jpg"))
    assert notes.progress == [(21, 21)]


def test_damaged_images_are_refused_with_strict_and_warned_of_without_a_listener(tmp_path):
    write_images(tmp_path, {"ant": 10, "bee": 10})
    (tmp_path / "ant" / "3.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"3\.png: not an image"):
        load_data(tmp_path, reading=Reading(strict=True))
    with pytest.warns(UserWarning, match=r"1 image left out(?s:.*)3\.png"):
        load_data(tmp_path)


def test_a_class_without_a_sound_image_is_refused(tmp_path):
    write_images(tmp_path, {"ant": 2, "bee": 10})
    for number in range(2):
        (tmp_path / "ant" / f"{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"train: no image of ant can be used(?s:.*)0\.png(?s:.*)1\.png"):
        load_data(tmp_path, reading=Reading(callback=OpeningNotes()))


def test_a_file_whose_name_is_no_utf8_is_left_out(tmp_path):
    write_images(tmp_path, {"ant": 5, "bee": 5})
    odd = os.fsencode(tmp_path / "ant") + b"/\xff.png"
    os.rename(tmp_path / "ant" / "0.png", odd)
    notes = OpeningNotes()
    assert sum(sizes(load_data(tmp_path, reading=Reading(callback=notes))).values()) == 9
    assert r"\xff.png: the name of the file is not valid UTF-8" in notes.lines[1]


@pytest.mark.parametrize(
    ("values", "dtype", "suffix", "white"),
    [
        ((200, 90), np.uint16, "png", 255),
        ((200, 90), np.int32, "tif", 255),
        ((3000, 90), np.uint16, "png", 4095),
        ((40000, 90), np.uint16, "tif", 65535),
        ((40000, 90), np.int32, "tif", 65535),
        ((0.9, 0.2), np.float32, "tif", 1),
        ((200.0, 0.5), np.float32, "tif", 255),
    ],
)
def test_all_deep_images_of_a_dataset_are_scaled_by_one_white_which_is_said(tmp_path, values, dtype, suffix, white):
    for name, value in zip(("ant", "bee"), values, strict=True):
        for number in range(4):
            grey(tmp_path / name / f"{number}.{suffix}", value, dtype)
    notes = OpeningNotes()
    splits = load_data(tmp_path, size=(4, 4), val_fraction=0, test_fraction=0, reading=Reading(callback=notes))
    for image, label in splits.train:
        assert abs(image[0, 0, 0].item() - values[label] * 255 / white) <= 0.5
    assert white_of(splits) == white
    assert [f"{white} is taken as white" in line for line in notes.lines] == [False, True]


def test_deep_images_of_two_kinds_are_refused(tmp_path):
    for number in range(4):
        grey(tmp_path / "ant" / f"{number}.tif", 0.9, np.float32)
        grey(tmp_path / "bee" / f"{number}.png", 900, np.uint16)
    with pytest.raises(DataError, match="integers up to 4095 and images of floats up to 1, so that what is white"):
        load_data(tmp_path)


def test_images_of_8_bits_have_no_white(tmp_path):
    splits = load_data(write_images(tmp_path, {"ant": 5, "bee": 5}))
    assert white_of(splits) is None


def test_nothing_is_looked_at_twice_and_random_numbers_go_on(monkeypatch):
    images = ArrayImages(np.arange(32, dtype=np.uint8).reshape(8, 2, 2), [0, 1] * 4)
    seen = []
    monkeypatch.setattr(ArrayImages, "look", lambda self, index: seen.append(index) or torch.rand(()))
    state = torch.get_rng_state()
    look_at([take(images, [1, 5]), take(images, [5, 2])])
    look_at([images])
    assert sorted(seen) == list(range(8))
    assert torch.equal(torch.get_rng_state(), state)
    assert looks_of(take(images, [5, 2])) == [images.looks[5], images.looks[2]]


def test_files_are_opened_on_several_threads_at_once(tmp_path, monkeypatch):
    base, _ = base_of(load_data(write_images(tmp_path, {"ant": 10, "bee": 10})).train)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=60)  # nobody passes alone
    assert dict(for_each(base, [0, 1, 2, 3], lambda index: both.wait() in (0, 1))) == dict.fromkeys(range(4), True)


def test_the_same_images_are_read_at_another_size(tmp_path):
    splits = load_data(write_images(tmp_path, {"ant": 10, "bee": 10}), size=(4, 4))
    other = reread(splits, size=(6, 5))
    assert sizes(other) == sizes(splits)
    assert {part[0][0].shape for part in other.parts.values()} == {(3, 6, 5)}
    assert {part[0][0].shape for part in splits.parts.values()} == {(3, 4, 4)}
    assert other.train.dataset is other.val.dataset
    assert [part.labels.tolist() for part in other.parts.values()] == [p.labels.tolist() for p in splits.parts.values()]


# ------------------------------------------------------------------------------- faults of the machine

OF_THE_MACHINE = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES]


@pytest.mark.parametrize("number", OF_THE_MACHINE)
def test_what_the_machine_cannot_do_is_no_fault_of_an_image(number, tmp_path, monkeypatch):
    folder = write_images(tmp_path, {"ant": 6, "bee": 6})
    path, normal = folder / "ant" / "3.png", open

    def failing(name, *args, **options):
        if str(name) == str(path):
            raise OSError(number, os.strerror(number))
        return normal(name, *args, **options)

    monkeypatch.setattr("builtins.open", failing)
    for look in (lambda: load_data(folder, size=(4, 4)), lambda: file_hash(path)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            look()
        assert (caught.value.errno, caught.value.filename) == (number, str(path))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError(), OSError(errno.EMFILE, "x")])
def test_nor_is_what_it_cannot_do_while_an_image_is_decoded(error, tmp_path, monkeypatch):
    folder = write_images(tmp_path, {"ant": 6, "bee": 6})

    def failing(*_args: object) -> None:
        raise error

    monkeypatch.setattr("basisprune.data.decode.to_pixels", failing)
    with pytest.raises(type(error)):
        load_data(folder, size=(4, 4))
    with pytest.raises(type(error)):
        decode_content((folder / "ant" / "3.png").read_bytes(), "3.png", (4, 4))


def test_too_few_open_files_end_a_command_with_what_to_do(tmp_path):
    folder = write_images(tmp_path / "data", {"ant": 6, "bee": 6})
    code = (
        "import resource, os, sys\n"
        "from basisprune.data import load_data\n"
        "from basisprune.cli.common import told_errors\n"
        "with told_errors():\n"
        "    from basisprune.data.decode import decode_content\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(os.open('/dev/null', 0))\n"
        "    except OSError: pass\n"
        f"    load_data({str(folder)!r}, size=(4, 4))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Too many open files; allow more open files (ulimit -n)" in done.stderr
    assert "left out" not in done.stderr
