"""Laws of the split into parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import refused, sizes, write_images

from basisprune.data import ArrayImages, Splits, load_data, take
from basisprune.data.copies import units_of
from basisprune.data.split import groups_of, hold_out_confirmation, limit_indices, read_groups, split_indices
from basisprune.errors import DataError

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
    divided = hold_out_confirmation(splits, share, seed)
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
    splits = hold_out_confirmation(parts_of(12), 0.5, 0)
    assert hold_out_confirmation(splits, 0.5, 0) is splits
    without = replace(splits, val=None, confirm=None)
    assert hold_out_confirmation(without, 0.5, 0) is without
    alone = parts_of(3)
    assert hold_out_confirmation(alone, 0.5, 0) is alone


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


def written(folder, content: str | bytes):
    path = folder / "groups.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        "a/0.png,x\nb/1.png,y\n",
        "file,group\na/0.png,x\nb/1.png,y",
        "\ufeffFile, Group\r\n./a/0.png, x\r\n\r\nb/1.png,y\r\n",
        '"a/0.png","x"\nb/1.png,y\na/0.png,x\n',
    ],
)
def test_a_file_lists_names_and_groups(tmp_path, content):
    assert read_groups(written(tmp_path, content)) == {"a/0.png": "x", "b/1.png": "y"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,\xff\n", "write it as file,group in UTF-8"),
        ('a,"x\n', "write it as file,group in UTF-8"),
        ("", "no line file,group found"),
        ("file,group\n", "no line file,group found"),
        ("a,x,y\n", "line 1: 'a,x,y' found; file,group is needed"),
        ("a,x\nb,\n", "line 2: 'b,' found"),
        ("a,x\na,y\n", "line 2: a is in group y, but in x before"),
    ],
)
def test_what_is_no_list_of_groups_is_refused_by_line(tmp_path, content, said):
    with pytest.raises(DataError) as error:
        read_groups(written(tmp_path, content))
    assert said in str(error.value)
    assert "groups.csv" in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv: cannot be read \(No such file"):
        read_groups(tmp_path / "none.csv")


def test_images_that_the_data_does_not_have_are_listed(tmp_path):
    images = ArrayImages(np.zeros((2, 8, 8), dtype=np.uint8), [0, 1])
    splits, file = Splits(images, None, None, images.classes), tmp_path / "groups.csv"
    file.write_text("train[0],x\n")
    assert groups_of(splits, file) == {"train[0]": "x"}
    file.write_text("train[0],x\na,x\nc,x\n")
    with pytest.raises(DataError, match=r"images that the data does not have; .* as train\[0\]") as error:
        groups_of(splits, file)
    assert error.value.faults == ("a", "c")


keys_of = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.sampled_from(["", "x", "y"])), max_size=12)


@given(keys=keys_of)
def test_images_that_share_a_key_have_one_unit_and_units_are_no_larger_than_that(keys):
    units = units_of(keys).tolist()
    linked = [[any(p and p == q for p, q in zip(one, two, strict=True)) for two in keys] for one in keys]
    for i, row in enumerate(linked):
        reached, pending = {i}, [i]
        while pending:
            now = pending.pop()
            new = {j for j, link in enumerate(linked[now]) if link} - reached
            reached |= new
            pending += new
        assert {j for j, unit in enumerate(units) if unit == units[i]} == reached
        assert row is linked[i]
