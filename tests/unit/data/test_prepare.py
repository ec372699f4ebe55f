from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from basisprune.data import Augment, augment, prepare
from basisprune.errors import ConfigError, DataError
from basisprune.types import InputSpec

COLOUR = InputSpec(size=(8, 6), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
GREY = InputSpec(size=(8, 6), mean=(0.25,), std=(0.5,))


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def per_channel(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def normalised(unit: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    return (unit - per_channel(spec.mean)) / per_channel(spec.std)


def test_bytes_and_floats_of_the_same_image_give_the_same_input():
    images = pixels(4, 3, 8, 6)
    before = images.clone()
    result = prepare(images, COLOUR)
    torch.testing.assert_close(result, normalised(images / 255, COLOUR), check_stride=False)
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(prepare(images.to(dtype) / 255, COLOUR), result)
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("spec", [COLOUR, GREY])
@pytest.mark.parametrize("size", [(8, 6), (4, 4), (20, 16)])
def test_the_result_has_the_shape_type_and_layout_the_network_wants(channels, spec, size):
    result = prepare(pixels(2, channels, *size), spec)
    assert result.shape == (2, *spec.shape)
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_grey_becomes_three_equal_channels():
    images = pixels(2, 1, 4, 4)
    torch.testing.assert_close(prepare(images, COLOUR), prepare(images.repeat(1, 3, 1, 1), COLOUR))


def test_colour_becomes_grey_by_luma():
    images = pixels(1, 3, 8, 6)
    grey = Image.fromarray(images[0].permute(1, 2, 0).numpy()).convert("L")
    result = prepare(images, GREY) * 0.5 + 0.25
    np.testing.assert_allclose(result[0, 0].numpy() * 255, np.asarray(grey), atol=1)


@pytest.mark.parametrize(("given", "spec"), [(2, COLOUR), (4, COLOUR), (4, GREY), (0, COLOUR)])
def test_other_channels_are_refused(given, spec):
    with pytest.raises(DataError, match=f"{given} channels given, the network reads {spec.channels}"):
        prepare(pixels(2, given, 8, 6), spec)


@pytest.mark.parametrize("wrong", [torch.tensor([-2.1, 1.5]), torch.tensor([0.0, 255.0]), torch.tensor([0, torch.nan])])
def test_floats_out_of_range_are_refused_with_the_range_and_the_way_out(wrong):
    images = wrong.view(1, 1, 1, 2).expand(1, 3, 4, 2)
    with pytest.raises(DataError, match="prepared=True") as caught:
        prepare(images, COLOUR)
    assert f"from {wrong.amin():.4g} to {wrong.amax():.4g} found" in str(caught.value)


def test_rounding_errors_are_no_fault():
    white = prepare(torch.ones(1, 3, 8, 6), COLOUR)
    torch.testing.assert_close(prepare(torch.full((1, 3, 8, 6), 1 + 1e-6), COLOUR), white, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 8, 6), torch.zeros(1, 3, 8, 6, dtype=torch.int64)])
def test_other_shapes_and_types_are_refused(wrong):
    with pytest.raises(DataError, match="needed"):
        prepare(wrong, COLOUR)


def test_prepared_images_pass_unchanged():
    images = torch.randn(2, 3, 8, 6)
    torch.testing.assert_close(prepare(images, COLOUR, prepared=True), images, check_stride=False, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 1, 8, 6), torch.zeros(2, 3, 6, 8), pixels(2, 3, 8, 6)])
def test_prepared_images_that_do_not_fit_are_refused(wrong):
    with pytest.raises(DataError, match="prepared=True"):
        prepare(wrong, COLOUR, prepared=True)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(13, 11), (32, 24)])
def test_shrinking_is_that_of_pil(interpolation, size):
    images = pixels(1, 1, *size)
    spec = replace(GREY, interpolation=interpolation)
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[interpolation]
    by_pil = Image.fromarray(images[0, 0].numpy()).resize((6, 8), resample)
    result = prepare(images, spec) * 0.5 + 0.25
    np.testing.assert_allclose(result[0, 0].numpy() * 255, np.asarray(by_pil), atol=1.01)


def test_nearest_repeats_pixels_and_bicubic_invents_no_colour():
    images = torch.zeros(1, 1, 4, 3, dtype=torch.uint8)
    images[..., 1] = 255
    nearest = prepare(images, replace(GREY, interpolation="nearest"))
    torch.testing.assert_close(
        nearest, normalised((images / 255).repeat_interleave(2, 2).repeat_interleave(2, 3), GREY)
    )
    bicubic = prepare(images, replace(GREY, interpolation="bicubic"))
    assert bicubic.min() >= -0.5
    assert bicubic.max() <= 1.5


def test_an_unknown_interpolation_is_refused():
    with pytest.raises(ConfigError, match="interpolation: 'lanczos' given, one of bilinear"):
        prepare(pixels(1, 3, 8, 6), replace(COLOUR, interpolation="lanczos"))


def test_augmentation_comes_after_resizing_and_before_normalising():
    images, settings = pixels(4, 3, 16, 12), Augment(shift=0.2, flip=True, rotation=10)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    result = prepare(images, COLOUR, augmentation=settings, generator=seeded())
    resized = torch.nn.functional.interpolate(images / 255, (8, 6), mode="bilinear", antialias=True)
    by_hand = normalised(augment(resized, settings, seeded()), COLOUR)
    torch.testing.assert_close(result, by_hand, check_stride=False)
    # Moving what is prepared already comes to the same.
    plain = prepare(images, COLOUR)
    again = prepare(plain, COLOUR, prepared=True, augmentation=settings, generator=seeded())
    torch.testing.assert_close(again, result, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"colour": 0.2}, {"policy": "rand"}])
def test_images_that_are_normalised_keep_their_colours(changes):
    with pytest.raises(ConfigError, match="colour and policy need pixels, but prepared=True"):
        prepare(torch.zeros(1, 3, 8, 6), COLOUR, prepared=True, augmentation=Augment(**changes))
    with_crop = prepare(torch.zeros(1, 3, 8, 6), COLOUR, prepared=True, augmentation=Augment(crop=0.5))
    assert with_crop.shape == (1, 3, 8, 6)


def test_grey_images_are_augmented_for_a_network_of_colours():
    settings = Augment(crop=0.5, colour=0.3, policy="rand", flip=True)
    images = pixels(3, 1, 16, 12)
    results = [
        prepare(images, COLOUR, augmentation=settings, generator=torch.Generator().manual_seed(5)) for _ in range(2)
    ]
    assert results[0].shape == (3, *COLOUR.shape)
    assert torch.equal(*results)
