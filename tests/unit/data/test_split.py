"""Laws of the split into parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import refused, sizes, write_images

from basisprune.data import load_data
from basisprune.data.split import limit_indices, split_indices

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
