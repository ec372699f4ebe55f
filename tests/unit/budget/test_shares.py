"""Laws of the default shares: all images have one role, more of them certify more, and what is promised holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.budget import Budget
from basisprune.budget.certify import Guarantee, certifiable, images_needed
from basisprune.budget.shares import LEAST, MOST, shares

numbers = st.integers(1, 60_000)
budgets = st.builds(lambda value: Budget(max_drop=value), st.floats(0, 0.5)) | st.builds(
    lambda value: Budget(min_accuracy=value), st.floats(0, 1, exclude_max=True)
)
guarantees = st.none() | st.builds(
    Guarantee, budgets, st.floats(0.5, 0.999), st.sampled_from(["accuracy", "balanced", "worst-class"])
)
drops = st.builds(
    lambda drop, sure: Guarantee(Budget(max_drop=drop), sure), st.floats(0.001, 0.5), st.floats(0.6, 0.99)
)
sources = st.fixed_dictionaries(
    {"validation": st.none() | st.integers(0, 20_000), "has_test": st.booleans(), "unlabelled": st.booleans()}
)


@given(numbers, guarantees, sources)
def test_every_image_has_one_role(images, guarantee, source):
    found = shares(images, guarantee, **source)
    judging, own = found.search + found.confirm, source["validation"]
    assert min(found.train, found.search, found.confirm, found.test) >= 0
    assert found.train + found.test + (judging if own is None else 0) == images
    assert own is None or judging == own
    assert found.train > 0
    assert not (source["has_test"] and found.test)
    assert not (found.confirm and (guarantee is None or source["unlabelled"]))
    assert all(0 <= each < 1 for each in found.fractions[1:])
    assert found.sentence


@given(numbers, st.integers(0, 5000), guarantees, st.booleans())
def test_more_images_are_never_fewer_to_judge_with(images, more, guarantee, drawn):
    few, many = (
        shares(each, guarantee) if drawn else shares(100, guarantee, validation=each)
        for each in (images, images + more)
    )
    assert few.confirm <= many.confirm
    assert few.test <= many.test
    assert few.search <= many.search or not drawn
    if drawn and bool(few.confirm) == bool(many.confirm):
        assert few.train <= many.train + 3  # each of three roundings


@given(numbers, drops)
def test_images_confirm_exactly_where_they_can_certify(images, guarantee):
    found, drop = shares(images, guarantee), guarantee.budget.value
    if found.confirm:
        assert certifiable(found.confirm, confidence=guarantee.confidence) <= drop
        assert found.confirm <= MOST * images
        assert found.confirm >= int(LEAST * images)
    elif images > 2:  # of which one can be held out
        assert certifiable(max(int(0.97 * MOST * images) - 2, 1), confidence=guarantee.confidence) > drop


@given(numbers, drops)
def test_no_more_confirm_than_are_enough_unless_there_are_many(images, guarantee):
    confirm = shares(images, guarantee).confirm
    enough = images_needed(guarantee.budget.value, confidence=guarantee.confidence)
    assert confirm <= max(1.02 * enough + 1, LEAST * images)
    if 1.02 * enough + 1 <= MOST * images:
        assert confirm >= enough


@pytest.mark.parametrize(
    ("images", "drop", "parts"),
    [
        (60, 0.01, (45, 12, 0, 3)),
        (1_000, 0.01, (800, 150, 0, 50)),
        (1_000, 0.02, (400, 150, 400, 50)),
        (1_000, 0.05, (604, 150, 196, 50)),
        (9_000, 0.01, (3_937, 900, 3_263, 900)),
        (50_000, 0.01, (35_000, 5_000, 5_000, 5_000)),
    ],
)
def test_the_shares_of_some_datasets(images, drop, parts):
    found = shares(images, Guarantee(Budget(max_drop=drop)))
    assert (found.train, found.search, found.confirm, found.test) == parts


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (shares(1000, None), ["80% train", "no accuracy is to be certified"]),
        (shares(1000, Guarantee(Budget(max_drop=0.01)), unlabelled=True), ["images without labels confirm"]),
        (shares(1000, Guarantee(Budget(max_drop=0.01))), ["estimate", "8,200 labelled", "3,199 without labels"]),
        (shares(1000, Guarantee(Budget(max_drop=0.0))), ["any number"]),
        (shares(1000, Guarantee(Budget(max_drop=0.02))), ["400 images, the most", "871 do in four of five"]),
        (shares(9000, Guarantee(Budget(max_drop=0.01))), ["3,263 images certify a loss of 1 point of accuracy"]),
        (shares(1000, Guarantee(Budget(min_accuracy=0.9))), ["may certify accuracy of at least 90%"]),
        (shares(50, Guarantee(Budget(min_accuracy=0.99))), ["more images, a looser budget"]),
        (shares(900, Guarantee(Budget(max_drop=0.02)), validation=800), ["the data's 800", "80% confirm", "5% of the"]),
    ],
)
def test_a_sentence_says_what_was_chosen_and_why(found, said):
    for words in said:
        assert words in found.sentence
