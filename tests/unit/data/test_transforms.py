""""""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as v2
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from basisprune.data.transforms import Augment, augment, blend, move, paint, prepare
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
    with pytest.raises(ConfigError, match="interpolation: 'lanczos' given, allowed are bilinear"):
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


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(images: torch.Tensor, x: float = 0.0, y: float = 0.0, degrees: float = 0.0, flip: bool = False, window=None):
    count = len(images)
    return move(
        images,
        shift=torch.tensor([[x, y]], dtype=images.dtype).repeat(count, 1),
        degrees=torch.full((count,), degrees, dtype=images.dtype),
        flip=torch.full((count,), flip),
        window=None if window is None else torch.tensor([window], dtype=images.dtype).repeat(count, 1),
    )


IMAGES = torch.rand(6, 3, 8, 10, generator=seeded(1), dtype=torch.float64)
ALL = Augment(shift=0.2, flip=True, rotation=20)


def test_all_faults_of_the_settings_are_listed_at_once():
    wrong = {
        "shift": 1.5,
        "flip": 1,
        "rotation": -3,
        "crop": 0,
        "colour": 2,
        "policy": "auto",
        "mixup": -1,
        "cutmix": "a",
    }
    with pytest.raises(ConfigError) as caught:
        Augment(**wrong)
    assert all(f"\n  - {name}: {value!r} given, " in str(caught.value) for name, value in wrong.items())
    assert "8 faults" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shift": float("nan")}, {"shift": "0.1"}, {"shift": True}, {"rotation": 181}, {"crop": 1.1}, {"crop": None},
        {"colour": float("nan")}, {"policy": 3}, {"mixup": float("inf")}, {"cutmix": True},
    ],
)  # fmt: skip
def test_a_single_fault_is_named(wrong):
    with pytest.raises(ConfigError, match=f"Augment: {next(iter(wrong))}"):
        Augment(**wrong)


def test_zero_augmentation_is_the_identity_and_draws_nothing():
    generator = seeded()
    assert augment(IMAGES, Augment(), generator) is IMAGES
    assert torch.equal(generator.get_state(), seeded().get_state())


def test_moving_nowhere_changes_nothing():
    torch.testing.assert_close(moved(IMAGES), IMAGES)


@pytest.mark.parametrize("settings_", [ALL, Augment(flip=True), Augment(shift=0.3), Augment(rotation=90)])
def test_the_same_generator_state_gives_the_same_images_and_leaves_the_input(settings_):
    before = IMAGES.clone()
    first = augment(IMAGES, settings_, seeded(3))
    assert torch.equal(first, augment(IMAGES, settings_, seeded(3)))
    assert not torch.equal(first, augment(IMAGES, settings_, seeded(4)))
    assert torch.equal(IMAGES, before)
    assert first.dtype == IMAGES.dtype
    assert first.shape == IMAGES.shape


@given(x=st.integers(-9, 9), y=st.integers(-7, 7))
@settings(deadline=None, max_examples=30)
def test_a_shift_moves_by_whole_pixels_and_repeats_the_border(x, y):
    rows = (torch.arange(8) - y).clamp(0, 7)
    columns = (torch.arange(10) - x).clamp(0, 9)
    torch.testing.assert_close(moved(IMAGES, x / 10, y / 8), IMAGES[:, :, rows][..., columns])


def test_a_random_shift_stays_within_its_bounds_and_reaches_them():
    # In a ramp along each axis, the value at the centre tells how far the image was moved.
    ramp = torch.linspace(0, 1, 101)
    images = torch.stack([ramp.expand(101, 101), ramp.view(-1, 1).expand(101, 101)]).expand(400, 2, 101, 101)
    centre = augment(images, Augment(shift=0.2), seeded())[:, :, 50, 50] - 0.5
    assert centre.abs().max() < 0.2 * 101 / 100 + 1e-5
    assert centre.abs().amax(0).min() > 0.19
    assert centre.mean(0).abs().max() < 0.02
    assert abs(torch.corrcoef(centre.T)[0, 1]) < 0.15


@given(seed=st.integers(0, 1000), shift=st.floats(0, 0.9), rotation=st.floats(0, 180))
@settings(deadline=None, max_examples=30)
def test_the_border_paints_no_foreign_colour(seed, shift, rotation):
    colour = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1).expand(3, 3, 7, 9)
    result = augment(colour, Augment(shift=shift, flip=True, rotation=rotation), seeded(seed))
    torch.testing.assert_close(result, colour)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_match_rot90(turns):
    square = IMAGES[..., :8]
    torch.testing.assert_close(moved(square, degrees=90.0 * turns), torch.rot90(square, turns, (2, 3)))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_a_rotation_of_an_oblong_image_is_a_true_one(shape):
    images = torch.rand(2, 3, *shape, dtype=torch.float64, generator=seeded())
    top, left = (shape[0] - 6) // 2, (shape[1] - 6) // 2
    middle = (..., slice(top, top + 6), slice(left, left + 6))
    torch.testing.assert_close(moved(images, degrees=90)[middle], torch.rot90(images[middle], 1, (2, 3)))


def test_a_flip_comes_before_the_rotation_and_the_shift_after_it():
    square = IMAGES[..., :8]
    by_hand = torch.rot90(square.flip(3), 1, (2, 3))[..., (torch.arange(8) - 2).clamp(0, 7)]
    torch.testing.assert_close(moved(square, x=2 / 8, degrees=90, flip=True), by_hand)


def test_flips_alone_are_exact_and_hit_about_half_of_the_images():
    images = torch.rand(400, 1, 4, 5, generator=seeded())
    result = augment(images, Augment(flip=True), seeded())
    same = (result == images).flatten(1).all(1)
    mirrored = (result == images.flip(3)).flatten(1).all(1)
    assert torch.all(same ^ mirrored)
    assert 150 < mirrored.sum() < 250


@pytest.mark.parametrize("settings_", [ALL, Augment(flip=True)])
def test_channels_last_is_kept(settings_):
    kept = augment(IMAGES.contiguous(memory_format=torch.channels_last), settings_, seeded())
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert augment(IMAGES, settings_, seeded()).is_contiguous()
    torch.testing.assert_close(kept, augment(IMAGES, settings_, seeded()), check_stride=False)


@pytest.mark.parametrize("wrong", [IMAGES[0], (IMAGES * 255).to(torch.uint8)])
def test_what_is_no_batch_of_floats_is_refused(wrong):
    with pytest.raises(DataError, match=r"augment: .*float tensor \(N, C, H, W\)"):
        augment(wrong, ALL, seeded())


# Crops, colours and policies

PHOTOGRAPHS = Augment(crop=0.3, colour=0.4, policy="trivial", flip=True)
EACH = [
    Augment(crop=0.3),
    Augment(colour=0.5),
    Augment(policy="trivial"),
    Augment(policy="rand"),
    Augment(shift=0.1, rotation=10, crop=0.5, colour=0.2, policy="rand", flip=True),
]
settings_of_photographs = st.builds(
    Augment,
    shift=st.sampled_from([0.0, 0.2]),
    flip=st.booleans(),
    rotation=st.sampled_from([0.0, 15.0]),
    crop=st.sampled_from([1.0, 0.6, 0.1]),
    colour=st.sampled_from([0.0, 0.4, 1.0]),
    policy=st.sampled_from([None, "trivial", "rand"]),
)


@given(settings_of_photographs, st.sampled_from([1, 3]), st.integers(0, 5), st.integers(0, 2**40))
@settings(deadline=None, max_examples=40)
def test_images_stay_images_and_the_same_seed_gives_the_same_ones(settings_, channels, count, seed):
    images = torch.rand(count, channels, 12, 9, generator=seeded(1))
    before, state = images.clone(), torch.get_rng_state()
    result = augment(images, settings_, seeded(seed))
    assert torch.equal(result, augment(images, settings_, seeded(seed)))
    assert torch.equal(torch.get_rng_state(), state)  # torchvision's own draws leave no trace
    assert torch.equal(images, before)
    assert (result.shape, result.dtype) == (images.shape, images.dtype)
    assert ((result >= -1e-6) & (result <= 1 + 1e-6)).all()


@pytest.mark.parametrize("settings_", EACH)
def test_each_image_is_changed_in_its_own_way_and_other_seeds_change_it_otherwise(settings_):
    images = torch.rand(1, 3, 16, 16, generator=seeded(1)).repeat(12, 1, 1, 1)
    result = augment(images, settings_, seeded())
    assert len({tuple(image.flatten().tolist()) for image in result}) > 6
    assert not torch.equal(result, augment(images, settings_, seeded(1)))


@pytest.mark.parametrize("settings_", EACH)
def test_a_batch_in_channels_last_stays_so(settings_):
    images = torch.rand(3, 3, 8, 10, generator=seeded(1))
    kept = augment(images.contiguous(memory_format=torch.channels_last), settings_, seeded())
    assert kept.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(kept, augment(images, settings_, seeded()), check_stride=False)


def test_a_window_is_cut_out_and_enlarged():
    image = torch.arange(64.0).view(1, 1, 8, 8)
    quarter = moved(image, window=(0.5, -0.5, 0.5, 0.5))  # the upper right one
    expected = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")[..., :8, 8:]
    torch.testing.assert_close(quarter, expected)
    torch.testing.assert_close(moved(image, window=(0.0, 0.0, 1.0, 1.0)), image)
    torch.testing.assert_close(  # a crop comes last
        moved(image, flip=True, degrees=90, window=(0.5, -0.5, 0.5, 0.5)),
        moved(moved(image, flip=True, degrees=90), window=(0.5, -0.5, 0.5, 0.5)),
    )


def test_crops_keep_any_part_of_the_area_down_to_the_smallest_and_stay_inside():
    across = torch.linspace(0, 1, 64).expand(64, 64)
    images = torch.stack([across, across.T]).expand(500, 2, 64, 64)
    result = augment(images, Augment(crop=0.25), seeded())
    wide, high = (values.amax((1, 2)) - values.amin((1, 2)) for values in result.unbind(1))
    area = wide * high * (64 / 63) ** 2
    assert 0.2 < area.min() < 0.3
    assert area.max() > 0.9
    assert 0.55 < area.mean() < 0.65
    assert result.amin((2, 3)).median() > 0.02
    assert 1.2 < (wide / high).max() < 1.4


factors = st.floats(0, 2).map(lambda value: round(value, 3))


@given(st.sampled_from([1, 3]), st.lists(st.tuples(factors, factors, factors), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_colours_are_those_of_torchvision(channels, wanted):
    images = torch.rand(len(wanted), channels, 6, 5, generator=seeded(), dtype=torch.float64)
    result = paint(images, *torch.tensor(wanted, dtype=torch.float64).T)
    for image, painted, (brightness, contrast, saturation) in zip(images, result, wanted, strict=True):
        by_torchvision = v2.adjust_contrast(v2.adjust_brightness(image, brightness), contrast)
        if channels == 3:
            by_torchvision = v2.adjust_saturation(by_torchvision, saturation)
        torch.testing.assert_close(painted, by_torchvision, rtol=0, atol=1e-6)


def test_a_policy_for_other_channels_than_grey_and_colour_is_refused():
    with pytest.raises(DataError, match="policy 'rand' knows grey and colour images; 4 channels given"):
        augment(torch.rand(2, 4, 8, 8), Augment(policy="rand"), seeded())


# Blends


@given(
    st.sampled_from([Augment(mixup=0.4), Augment(cutmix=1.0), Augment(mixup=1.0, cutmix=1.0)]),
    st.integers(1, 6),
    st.integers(0, 2**40),
)
@settings(deadline=None, max_examples=40)
def test_the_shares_of_the_labels_are_those_of_the_images(settings_, count, seed):
    labels = torch.arange(count) % 4
    images = torch.nn.functional.one_hot(labels, 4).float().view(-1, 4, 1, 1).expand(-1, 4, 8, 8)  # a channel a class
    state = torch.get_rng_state()
    blended, shares = blend(images, labels, settings_, classes=4, generator=seeded(seed))
    torch.testing.assert_close(blended.mean((2, 3)), shares)
    torch.testing.assert_close(shares.sum(1), torch.ones(count))
    again = blend(images, labels, settings_, classes=4, generator=seeded(seed))
    assert torch.equal(blended, again[0])
    assert torch.equal(shares, again[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_with_mixup_and_cutmix_a_batch_is_blended_by_either():
    images = torch.nn.functional.one_hot(torch.arange(2)).float().view(2, 2, 1, 1).expand(2, 2, 16, 16)
    cut = 0
    for seed in range(40):
        both = Augment(mixup=1.0, cutmix=1.0)
        blended, _ = blend(images, torch.arange(2), both, classes=2, generator=seeded(seed))
        cut += bool(((blended == 0) | (blended == 1)).all())
    assert 10 <= cut <= 30


def test_nothing_is_blended_where_nothing_is_asked_for():
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([2, 0, 1])
    same, shares = blend(images, labels, Augment(flip=True), classes=3)
    assert same is images
    assert shares.argmax(1).tolist() == labels.tolist()
    assert shares.sum() == 3
