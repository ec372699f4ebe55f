from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.data.augment import Augment, augment, move
from basisprune.errors import ConfigError, DataError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(images: torch.Tensor, x: float = 0.0, y: float = 0.0, degrees: float = 0.0, flip: bool = False):
    count = len(images)
    return move(
        images,
        shift=torch.tensor([[x, y]], dtype=images.dtype).repeat(count, 1),
        degrees=torch.full((count,), degrees, dtype=images.dtype),
        flip=torch.full((count,), flip),
    )


IMAGES = torch.rand(6, 3, 8, 10, generator=seeded(1), dtype=torch.float64)
ALL = Augment(shift=0.2, flip=True, rotation=20)


def test_all_faults_of_the_settings_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        Augment(shift=1.5, flip=1, rotation=-3)  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in ("3 faults", "shift: 1.5", "flip: 1", "rotation: -3"))


@pytest.mark.parametrize("wrong", [{"shift": float("nan")}, {"shift": "0.1"}, {"shift": True}, {"rotation": 181}])
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
