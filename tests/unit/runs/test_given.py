"""Laws of networks given as trained: their classes are those of the data, and they know something of its images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import NAMES, Notes, tiny_images
from trained import HINTS, SPEC, trained

from basisprune.callback import NullCallback
from basisprune.data import Loaders, PreparedBatches, Splits, load_data
from basisprune.errors import ModelError
from basisprune.runs.given import Outcome, check_classes, refuse_guessing
from basisprune.tasks import CLASSIFICATION, Predictions
from basisprune.transfer.hints import Hints
from basisprune.transfer.kept import KeptModel, kept_model

ORDER = (1, 2, 0)


def splits() -> Splits:
    found = load_data(tiny_images(60), val_fraction=0.5)
    return Splits(found.train, found.val, found.test, NAMES)


def network(order=(0, 1, 2), hints: Hints = HINTS) -> KeptModel:
    return kept_model(trained(order), input_hints=hints)


def judged(model: KeptModel) -> list[str]:
    notes = Notes()
    refuse_guessing(model, splits(), callback=notes)
    return notes.lines


def test_a_network_that_knows_its_images_passes():
    assert judged(network()) == []


def test_classes_in_another_order_are_refused_and_told_from_other_images():
    with pytest.raises(ModelError, match=r"gets 0\.0% of 30 validation images right, and guessing gets 3") as caught:
        judged(network(ORDER))
    assert "with its classes in another order it would get 100.0%" in str(caught.value)
    assert "sorted by name: r, g, b" in str(caught.value)


def test_images_that_are_prepared_in_another_way_are_refused():
    with pytest.raises(ModelError, match=r"prepared in another way: pass the mean, std, size and interpolation"):
        judged(network(hints=Hints((16, 16), (0.0,), (1e4,))))


def test_the_number_of_classes_must_be_that_of_the_data():
    two = load_data(tiny_images(60), val_fraction=0.5)
    odd = Splits(two.train, two.val, two.test, ("a", "b"))
    with pytest.raises(
        ModelError, match=r"distinguishes 3 classes, and the data has 2 \(a, b\); pass the data.*new head"
    ):
        check_classes(network(), odd, None, NullCallback())


def test_names_that_are_known_are_compared():
    notes = Notes()
    for names in (None, NAMES):
        check_classes(network(), splits(), names, notes)
    assert notes.lines == []
    with pytest.raises(ModelError, match="in the order b, g, r, and the data in the order r, g, b"):
        check_classes(network(), splits(), ("b", "g", "r"), notes)
    check_classes(network(), splits(), ("red", "green", "blue"), notes)
    assert notes.lines == ["the network's classes red, green, blue are taken for r, g, b, in this order"]


def outcome(answers, labels, classes=2) -> Outcome:
    return Outcome.of(Predictions(np.array(answers), np.ones(len(answers)), np.array(labels)), classes)


def test_a_rare_class_does_not_make_a_good_network_look_like_guessing():
    labels = [0] * 190 + [1] * 10
    good = [0] * 188 + [1] * 9 + [0, 1, 1]
    assert not outcome(good, labels).is_guessing
    assert outcome([0] * 200, labels).is_guessing  # 95 %, and it knows nothing


def test_too_few_images_decide_only_against_what_is_worse_than_guessing():
    assert not outcome([0, 1], [0, 1]).is_guessing
    assert outcome([1, 0], [0, 1]).is_guessing


def test_another_order_is_known_only_where_it_is_one():
    assert outcome([0, 0, 1, 1], [1, 1, 1, 1]).reordered is None
    assert outcome([0, 1] * 8, [1, 0] * 8).fits_another_order


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 10), st.integers(2, 200), st.integers(0, 10_000))
def test_some_order_that_suits_answers_at_random_is_not_told_of(classes, images, seed):
    said, labels = np.random.default_rng(seed).integers(classes, size=(2, images))
    assert not outcome(said, labels, classes).fits_another_order


def test_nine_images_do_not_tell_of_another_order():
    assert outcome([0, 1, 2] * 3, [1, 2, 0, 1, 2, 0, 2, 0, 1], 3).reordered is None


def test_a_loader_of_ones_own_is_gone_through_as_it_is(monkeypatch):
    class Counted(list):
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return super().__iter__()

    known = list(PreparedBatches(tiny_images(60, seed=1), SPEC, batch_size=12))
    data = Loaders(train=known, val=Counted(known)).splits(CLASSIFICATION)
    len(data.val)
    monkeypatch.setattr("basisprune.runs.given.MOST_IMAGES", 10)
    Counted.passes = 0
    refuse_guessing(network(), data, callback=Notes())
    assert Counted.passes == 1
