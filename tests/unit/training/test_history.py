"""Laws of what the epochs of a training showed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from basisprune.training.checkpoint import EpochRecord, best_epoch, out_of_patience

accuracies = st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=8)


def records(values, losses=None):
    losses = losses or [1.0] * len(values)
    pairs = zip(values, losses, strict=True)
    return [EpochRecord(place, 0.1, 1.0, 0.5, loss, value) for place, (value, loss) in enumerate(pairs)]


@given(accuracies)
def test_the_best_epoch_is_the_first_of_the_highest_accuracy(values):
    assert best_epoch(records(values)) == (values.index(max(values)) if values else None)


@given(accuracies.filter(bool), st.randoms())
def test_of_equal_accuracies_the_smaller_loss_is_better(values, random):
    losses = [random.random() for _ in values]
    best = best_epoch(records(values, losses))
    equals = [place for place, value in enumerate(values) if value == max(values)]
    assert best == min(equals, key=lambda place: losses[place])


@given(accuracies, st.integers(1, 9))
def test_patience_ends_when_so_many_epochs_brought_nothing_better(values, patience):
    ended = out_of_patience(records(values), patience)
    assert ended == (len(values) > patience and max(values[:-patience]) >= max(values[-patience:]))
    assert not out_of_patience(records(values), None)


def test_what_was_not_validated_has_no_best_epoch():
    history = [EpochRecord(0, 0.1, 1.0, 0.5, None, None)] * 5
    assert best_epoch(history) is None
    assert not out_of_patience(history, 1)
