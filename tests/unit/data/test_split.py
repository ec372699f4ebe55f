"""Laws of the split into parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import refused, sizes, write_images

from basisprune.data import ArrayImages, Splits, load_data, take
from basisprune.data.split import limit_indices, set_aside, split_indices

labels_of = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)
fractions_of = st.tuples(st.floats(0, 0.49), st.floats(0, 0.49))


@given(labels=labels_of, fractions=fractions_of, seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_parts_are_disjoint_cover_everything_and_repeat(labels, fractions, seed):
    parts = split_indices(labels, fractions, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part, again in zip(parts, split_indices(labels, fractions, seed), strict=True):
        assert part.tolist() == again.tolist() == sorted(part.tolist())


@given(labels=labels_of, fractions=fractions_of, seed=st.integers(0, 9))
@settings(deadline=None)
def test_parts_are_stratified_and_hold_every_class_of_three_images(labels, fractions, seed):
    train, *parts = split_indices(labels, fractions, seed)
    assert set(labels[train]) == set(labels)
    for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
        for part, fraction in zip(parts, fractions, strict=True):
            size = int((labels[part] == label).sum())
            assert abs(size - fraction * count) <= 1
            assert (size > 0) == (fraction > 0) or count < 3


@given(labels=labels_of, seed=st.integers(0, 9), data=st.data())
@settings(deadline=None)
def test_a_limit_is_met_stratified_and_nested(labels, seed, data):
    present, counts = np.unique(labels, return_counts=True)
    limit = data.draw(st.integers(len(present), len(labels)))
    chosen = limit_indices(labels, limit, seed)
    assert len(set(chosen.tolist())) == len(chosen) == limit
    assert chosen.tolist() == limit_indices(labels, limit, seed).tolist() == sorted(chosen.tolist())
    assert set(chosen.tolist()) <= set(limit_indices(labels, min(limit + 1, len(labels)), seed).tolist())
    for label, count in zip(present, counts, strict=True):
        size = (labels[chosen] == label).sum()
        assert size >= 1
        # all classes start at once, so each has at most one more than its share, and the smallest give way least
        assert -len(present) * count / len(labels) <= size - limit * count / len(labels) <= 1


@st.composite
def units_and_labels(draw):
    """Labels and units; each unit is of one class, or of any."""
    units = np.array(draw(st.lists(st.integers(0, 25), min_size=1, max_size=80)))
    if draw(st.booleans()):
        return units, np.array(draw(st.lists(st.integers(0, 3), min_size=26, max_size=26)))[units]
    return units, np.array(draw(st.lists(st.integers(0, 3), min_size=len(units), max_size=len(units))))


@given(drawn=units_and_labels(), fractions=fractions_of, seed=st.integers(0, 99))
def test_units_never_straddle_two_parts(drawn, fractions, seed):
    units, labels = drawn
    parts = split_indices(labels, fractions, seed, units)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    held = [set(units[part].tolist()) for part in parts]
    assert sum(map(len, held)) == len(set(units.tolist()))
    for part, again in zip(parts, split_indices(labels, fractions, seed, units), strict=True):
        assert part.tolist() == again.tolist() == sorted(part.tolist())


@given(
    units=st.lists(st.integers(0, 25), min_size=1, max_size=80).map(np.array),
    class_of=st.lists(st.integers(0, 3), min_size=26, max_size=26).map(np.array),
    fractions=fractions_of,
    seed=st.integers(0, 9),
)
def test_every_class_that_can_has_an_image_in_each_part(units, class_of, fractions, seed):
    labels = class_of[units]
    train, *parts = split_indices(labels, fractions, seed, units)
    assert set(labels[train]) == set(labels)
    wanted = [part for part, fraction in zip(parts, fractions, strict=True) if fraction > 0]
    for label in set(labels.tolist()):
        if len(set(units[labels == label].tolist())) > len(wanted):
            assert all((labels[part] == label).any() for part in wanted)


def test_units_of_a_few_images_are_divided_by_the_fractions():
    random = np.random.default_rng(0)
    units = random.integers(0, 300, 1000)
    labels = random.integers(0, 4, 300)[units]
    for seed in range(3):
        parts = split_indices(labels, [0.2, 0.1], seed, units)
        for label in range(4):
            shares = [(labels[part] == label).sum() / (labels == label).sum() for part in parts]
            np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=0.03)


def test_units_of_one_image_change_nothing():
    labels = np.arange(90) % 4
    for one, two in zip(split_indices(labels, [0.2], 3), split_indices(labels, [0.2], 3, np.arange(90)), strict=True):
        assert one.tolist() == two.tolist()


def parts_of(count: int) -> Splits:
    images = ArrayImages(np.zeros((count, 2, 2), dtype=np.uint8), np.arange(count) % 3)
    return Splits(images, take(images, np.arange(count)), None, images.classes)


@given(count=st.integers(3, 60), share=st.floats(0, 0.99), seed=st.integers(0, 9))
def test_images_set_aside_are_a_stratified_share_of_validation(count, share, seed):
    splits = parts_of(count)
    divided = set_aside(splits, share, seed)
    assert divided.train is splits.train
    if share == 0 or count < 4:
        assert divided is splits or count >= 4
        return
    both = np.concatenate([divided.val.indices, divided.confirm.indices])
    assert sorted(both.tolist()) == list(range(count))
    for label in range(3):
        found, every = ((part.labels == label).sum() for part in (divided.confirm, splits.val))
        assert abs(found - share * every) <= 1
        assert every < 2 or 0 < found < every


def test_nothing_is_set_aside_twice_or_where_there_is_nothing():
    splits = set_aside(parts_of(12), 0.5, 0)
    assert set_aside(splits, 0.5, 0) is splits
    without = replace(splits, val=None, confirm=None)
    assert set_aside(without, 0.5, 0) is without
    alone = parts_of(3)
    assert set_aside(alone, 0.5, 0) is alone


def test_another_seed_draws_another_split():
    labels = np.zeros(50, dtype=np.int64)
    drawn = {tuple(split_indices(labels, [0.2], seed)[1].tolist()) for seed in range(5)}
    assert len(drawn) == 5


def test_the_description_has_a_line_for_each_part(tmp_path):
    write_images(tmp_path, {"ant": 20, "bee": 10})
    train, val = load_data(tmp_path, test_fraction=0).describe().splitlines()
    assert train == "train: 24 images, smallest class 'bee' (8), largest 'ant' (16)"
    assert val == "val: 6 images, smallest class 'bee' (2), largest 'ant' (4)"


def test_classes_too_small_to_split_are_refused(tmp_path):
    write_images(tmp_path, {"ant": 1, "bee": 1})
    refused(tmp_path, str(tmp_path), "val part", "val_fraction=0")
    assert sizes(load_data(tmp_path, val_fraction=0, test_fraction=0)) == {"train": 2}
