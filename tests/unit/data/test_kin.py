"""Laws of near copies."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from basisprune.data.decode import to_pixels
from basisprune.data.groups import linked
from basisprune.data.kin import near_copies, thumbnail


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
    return linked(len(images), found.tolist()).tolist()


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
