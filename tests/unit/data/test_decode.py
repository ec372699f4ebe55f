"""Laws of image files: every kind becomes RGB, and what cannot be read is named."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import basisprune.data.decode as decoding
from basisprune.data import FolderImages
from basisprune.data.decode import (
    Depth,
    decode_content,
    depth_of,
    file_hash,
    image_hash,
    look_at_content,
    look_at_file,
    random_numbers_kept,
    to_pixels,
)
from basisprune.errors import DataError

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)


def one(path: Path, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    """The decoded image as (H, W, C)."""
    image, label = FolderImages([(path, 0)], ("a",), size)[0]
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    assert label == 0
    return image.permute(1, 2, 0).numpy()


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def flat(mode: str, colour) -> Image.Image:
    return Image.new(mode, (8, 8), colour)


@pytest.mark.parametrize(
    ("image", "suffix", "colour"),
    [
        (flat("L", 77), "png", (77, 77, 77)),
        (flat("1", 1), "png", (255, 255, 255)),
        (flat("RGB", (255, 0, 0)).quantize(4), "gif", (255, 0, 0)),
        (flat("RGBA", (255, 0, 0, 0)), "png", (255, 255, 255)),
        (flat("RGBA", (0, 0, 0, 51)), "png", (204, 204, 204)),
        (flat("LA", (0, 51)), "png", (204, 204, 204)),
        (flat("CMYK", (0, 255, 255, 0)), "tif", (255, 0, 0)),
        (Image.fromarray(np.full((8, 8), 128 * 257, dtype=np.uint16)), "png", (128, 128, 128)),
        (Image.fromarray(np.full((8, 8), 65535, dtype=np.int32)), "tif", (255, 255, 255)),
    ],
    ids=["grey", "bits", "palette", "transparent", "translucent", "grey-alpha", "cmyk", "16-bit", "16-in-32-bit"],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, image, suffix, colour):
    pixels = one(saved(tmp_path / f"image.{suffix}", image))
    assert (pixels == colour).all(), pixels[0, 0]


def test_a_cmyk_jpeg_becomes_rgb(tmp_path):
    pixels = one(saved(tmp_path / "image.jpg", flat("CMYK", (0, 255, 255, 0))))
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() < 8


def test_transparent_colours_of_palettes_and_greys_are_seen_on_white(tmp_path):
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert (one(saved(tmp_path / "p.png", palette, transparency=1)) == 255).all()
    assert (one(saved(tmp_path / "q.png", palette, transparency=0)) == 9).all()
    assert (one(saved(tmp_path / "b.png", palette, transparency=bytes([255, 0]))) == 255).all()
    assert (one(saved(tmp_path / "l.png", flat("L", 7), transparency=7)) == 255).all()


def test_exif_orientation_is_followed(tmp_path):
    image = Image.fromarray(np.array([[250, 250, 0, 0]] * 2, dtype=np.uint8)).convert("RGB").resize((64, 32), 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise: the left half comes to the top
    pixels = one(saved(tmp_path / "turned.jpg", image, exif=exif), (64, 32))
    assert pixels[:24].min() > 200
    assert pixels[40:].max() < 50


def test_a_large_photograph_keeps_its_content(tmp_path):
    ramp = np.tile(np.linspace(0, 255, 640, dtype=np.uint8), (480, 1))
    pixels = one(saved(tmp_path / "large.jpg", Image.fromarray(ramp), quality=95), (12, 16))
    np.testing.assert_allclose(pixels[..., 0], np.tile(np.linspace(8, 247, 16), (12, 1)), atol=4)


def test_a_truncated_image_is_refused_with_its_name_and_the_cause(tmp_path):
    noise = Image.fromarray(RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for suffix in ("png", "jpg", "bmp"):
        path = saved(tmp_path / f"cut.{suffix}", noise)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DataError, match=rf"cut\.{suffix}: the image is damaged.*truncated"):
            one(path)


def test_a_damaged_image_is_refused_with_its_name(tmp_path):
    path = saved(tmp_path / "bent.png", Image.fromarray(COLOURS[0]))
    content = bytearray(path.read_bytes())
    content[45:55] = bytes(10)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bent\.png: the image is damaged"):
        one(path)


@pytest.mark.parametrize("content", [b"", b"not an image at all"])
def test_what_is_no_image_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "text.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"text\.jpg: not an image"):
        one(path)


@pytest.mark.parametrize(
    "start", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\xc5\xd0\xd3\xc6" + bytes(40), b"P6 1 1 255\n"]
)
@pytest.mark.parametrize("suffix", ["jpg", "png", "gif"])
def test_only_six_formats_are_read_whatever_a_file_is_called(tmp_path, monkeypatch, start, suffix):
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda *command, **_: started.append(command))
    monkeypatch.setattr("subprocess.check_call", lambda *command, **_: started.append(command))
    path = tmp_path / f"text.{suffix}"
    path.write_bytes(start + b"/x { (ls) run } def\n" * 20)
    with pytest.raises(DataError, match=rf"text\.{suffix}: not an image of a kind that is read"):
        one(path)
    assert started == []


def png(width: int, height: int, body: bytes, *, bits: int = 8, kind: int = 2) -> bytes:
    """A PNG file of these bytes, whatever its header says."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(body))]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [*chunks, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("most", [None, Image.MAX_IMAGE_PIXELS])
def test_an_image_beyond_reason_is_refused_before_memory_is_taken(tmp_path, monkeypatch, most):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    path = tmp_path / "bomb.png"
    path.write_bytes(png(60_000, 60_000, bytes(100)))  # it claims to be that large
    with pytest.raises(DataError, match=r"bomb\.png.*(too many|exceeds limit)"):
        one(path)


def test_a_pipe_or_a_device_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    for name, kind in (("pipe", "a pipe"), ("device", "a device"), ("folder", "a folder")):
        with pytest.raises(DataError, match=rf"{name}\.jpg: cannot be read \(it is {kind}, no file\)"):
            one(tmp_path / f"{name}.jpg")


@pytest.mark.parametrize("name", ["x" * 300 + ".jpg", "a\0.jpg"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="cannot be read"):
        one(tmp_path / name)


def test_a_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jpg: cannot be read \(No such file"):
        one(tmp_path / "gone.jpg")


@pytest.mark.parametrize("array", [np.full((8, 8), -0.5, dtype=np.float32), np.full((8, 8), 70000, dtype=np.int32)])
def test_pixels_of_unknown_range_are_refused(tmp_path, array):
    path = saved(tmp_path / "deep.tif", Image.fromarray(array))
    with pytest.raises(DataError, match=r"deep\.tif.*unknown range; convert"):
        one(path)


def deep_colour(path: Path, colour: tuple[int, ...]) -> Path:
    """A PNG of 16 bits for each colour, which Pillow cannot write."""
    row = b"\0" + np.full((8, len(colour)), colour, dtype=">u2").tobytes()
    path.write_bytes(png(8, 8, row * 8, bits=16, kind={3: 2, 4: 6}[len(colour)]))
    return path


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((10, 100, 200), (10, 100, 200)),
        ((10 * 257, 100 * 257, 200 * 257), (10, 100, 200)),
        ((0, 819, 4095), (0, 51, 255)),
        ((10, 100, 200, 65535), (10, 100, 200)),
        ((10 * 257, 100 * 257, 200 * 257, 0), (255, 255, 255)),
    ],
)
def test_colours_of_16_bits_keep_their_brightness(tmp_path, colour, expected):
    assert (one(deep_colour(tmp_path / "deep.png", colour)) == expected).all()


@pytest.mark.parametrize(("value", "dtype"), [(200, np.uint16), (200, np.int32), (200.0, np.float32)])
def test_values_of_8_bits_in_deeper_images_keep_their_brightness(tmp_path, value, dtype):
    path = saved(tmp_path / "deep.tif", Image.fromarray(np.full((8, 8), value, dtype=dtype)))
    assert (one(path) == 200).all()
    assert to_pixels(Image.open(path)).unique().tolist() == [200]


def test_white_may_be_given_and_what_is_brighter_is_white(tmp_path):
    path = saved(tmp_path / "deep.png", Image.fromarray(np.array([[0, 819, 60000]], dtype=np.uint16)))
    assert decode_content(path.read_bytes(), path, (1, 3), 4095)[0, 0].tolist() == [0, 51, 255]
    assert decode_content(path.read_bytes(), path, (1, 3))[0, 0].tolist() == [0, 3, 233]


def test_a_file_that_says_12_bits_is_believed():
    image = Image.new("I;16", (2, 2))
    assert depth_of(np.full((2, 2), 9, dtype=np.uint16), image) == Depth(255)
    image.tag_v2 = {258: (12,)}  # as of a TIFF file
    assert depth_of(np.full((2, 2), 9, dtype=np.uint16), image) == Depth(4095)


def test_a_look_sees_what_decoding_would_see(tmp_path):
    noise = Image.fromarray(RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for suffix in ("png", "jpg", "bmp"):
        content = saved(tmp_path / f"cut.{suffix}", noise).read_bytes()
        assert look_at_content(content, "x").depth is None
        assert look_at_content(content[: len(content) // 2], "x").fault.startswith("x: the image is damaged")
    deep = deep_colour(tmp_path / "deep.png", (1, 2, 3000)).read_bytes()
    assert look_at_content(deep, "x").depth == Depth(4095)
    assert look_at_content(b"", "x").fault.startswith("x: not an image")


def test_a_row_that_the_decoder_has_no_memory_for_is_a_fault_of_the_image(tmp_path):
    path = tmp_path / "wide.png"
    path.write_bytes(png(50_000_000, 1, b"", kind=0))
    with pytest.raises(DataError, match=r"wide\.png: .*50000000 x 1 pixels are too many"):
        decode_content(path.read_bytes(), path, (8, 8))


@pytest.mark.parametrize(("colour", "channels", "times"), [(0, 1, 12), (2, 3, 30)])
def test_deep_images_take_memory_like_flat_ones(colour, channels, times, tmp_path):
    side = 3000
    path = tmp_path / "deep.png"
    row = b"\0" + bytes(range(250)) * (2 * channels * side // 250)
    path.write_bytes(png(side, side, row * side, bits=16, kind=colour))
    tracemalloc.start()
    try:
        decode_content(path.read_bytes(), path, (8, 8))
        assert tracemalloc.get_traced_memory()[1] < times * side * side
    finally:
        tracemalloc.stop()


def saved_of_looks(path, array):
    Image.fromarray(array).save(path)
    return path


def test_a_look_tells_content_and_depth(tmp_path):
    flat = saved_of_looks(tmp_path / "flat.png", np.full((4, 4), 7, dtype=np.uint8))
    assert look_at_file(flat).sha256 == file_hash(flat) == hashlib.sha256(flat.read_bytes()).hexdigest()
    assert look_at_file(flat).depth is None
    deep = saved_of_looks(tmp_path / "deep.png", np.full((4, 4), 3000, dtype=np.uint16))
    assert look_at_file(deep).depth == Depth(4095)


def test_a_file_that_has_not_changed_is_read_once_and_one_that_has_is_read_again(tmp_path, monkeypatch):
    read, path = [], saved_of_looks(tmp_path / "a.png", np.zeros((4, 4), dtype=np.uint8))
    original = decoding.read_bytes
    monkeypatch.setattr(decoding, "read_bytes", lambda path: (read.append(path), original(path))[1])
    first = look_at_file(path)
    assert (look_at_file(path), file_hash(path), len(read)) == (first, first.sha256, 1)
    saved_of_looks(path, np.ones((4, 4), dtype=np.uint8))
    os.utime(path, ns=(0, 0))
    assert look_at_file(path) != first
    assert len(read) == 2


def test_what_is_wrong_is_told_and_not_raised(tmp_path):
    (tmp_path / "text.png").write_text("text")
    assert "text.png: not an image" in look_at_file(tmp_path / "text.png").fault
    assert look_at_file(tmp_path / "text.png").sha256 == hashlib.sha256(b"text").hexdigest()
    assert "none.png: cannot be read (No such file" in look_at_file(tmp_path / "none.png").fault
    assert "a folder" in look_at_file(tmp_path).fault
    with pytest.raises(DataError, match=r"none\.png: cannot be read \(No such file"):
        file_hash(tmp_path / "none.png")
    with pytest.raises(DataError, match="cannot be read"):
        file_hash(tmp_path)


def test_images_in_memory_are_told_apart_by_values_type_shape_and_mode():
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    kinds = [array, array.T, array.reshape(4, 3), array.astype(np.int8), array + 1, array[None]]
    kinds += [Image.fromarray(array), Image.fromarray(array).convert("RGB"), Image.fromarray(array).convert("P")]
    assert len({image_hash(kind) for kind in kinds}) == len(kinds)
    assert image_hash(torch.from_numpy(array).T) == image_hash(array.T)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_inside_are_not_missed_outside_and_can_be_the_same():
    with random_numbers_kept():
        expected = draw()
    with random_numbers_kept(seed=0):
        first = draw()
    assert draw() == expected
    with random_numbers_kept(seed=0):
        assert draw() == first != expected
