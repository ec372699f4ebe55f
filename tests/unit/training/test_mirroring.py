"""Laws of which images may be mirrored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_images

from basisprune.data import ArrayImages
from basisprune.demo import demo_data
from basisprune.training.choosing import may_be_mirrored
from basisprune.types import InputSpec

SPEC = InputSpec((16, 16), (0.5,) * 3, (0.25,) * 3)


def images(pixels: np.ndarray, labels: np.ndarray) -> ArrayImages:
    return ArrayImages(pixels.clip(0, 255).astype(np.uint8), labels)


def test_colours_may_be_mirrored():
    assert may_be_mirrored(tiny_images(120), SPEC)


def test_digits_stay_upright():
    assert not may_be_mirrored(demo_data().train, InputSpec((32, 32), (0.5,), (0.25,)))


@pytest.mark.parametrize("is_swapped", [True, False])
def test_classes_that_are_mirror_images_of_one_another_stay_as_they_are(is_swapped):
    rng, labels = np.random.default_rng(0), np.arange(120) % 2
    pixels = rng.normal(100, 30, (120, 16, 16, 3))
    pixels[labels == 0, :, :5] += 60
    pixels[labels == 1, :, -5 if is_swapped else 0 :] += 60 if is_swapped else -60
    assert may_be_mirrored(images(pixels, labels), SPEC) is not is_swapped


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(10, 80))
def test_images_that_lie_either_way_as_often_are_hardly_ever_left_upright(seed, classes, count):
    rng, labels = np.random.default_rng(seed), np.arange(count) % classes
    pattern = rng.normal(0, 40, (classes, 16, 16, 3))[labels]
    either = rng.random(count) < 0.5
    pattern[either] = pattern[either][:, :, ::-1]
    pixels = np.concatenate([pattern, pattern[:, :, ::-1]]) + rng.normal(128, 40, (2 * count, 16, 16, 3))
    assert may_be_mirrored(images(pixels, np.concatenate([labels, labels])), SPEC)
