"""Mean average precision and F1 against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from basisprune.errors import ConfigError, DataError
from basisprune.tasks import multilabel

seeds = st.integers(0, 10_000)


def drawn(seed: int, count: int = 12, labels: int = 3):
    random = np.random.default_rng(seed)
    scores = random.integers(-3, 4, (count, labels)).astype(np.float64)  # with ties
    true = (random.random((count, labels)) < 0.4).astype(np.float64)
    true[0] = 1  # each label is there
    return scores, true


@given(seeds)
def test_both_metrics_are_those_of_scikit_learn(seed):
    scores, true = drawn(seed)
    rows = np.concatenate([scores, true], axis=1)
    assert multilabel("ap").value(rows) == pytest.approx(average_precision_score(true, scores))
    assert multilabel("f1").value(rows) == pytest.approx(f1_score(true, scores > 0, average="macro", zero_division=0))


@given(seeds)
def test_the_order_of_examples_changes_nothing(seed):
    scores, true = drawn(seed)
    rows = np.concatenate([scores, true], axis=1)
    mixed = np.random.default_rng(seed).permutation(rows)
    for metric in ("ap", "f1"):
        assert multilabel(metric).value(rows) == pytest.approx(multilabel(metric).value(mixed))


def test_labels_that_nothing_has_do_not_count():
    scores, true = drawn(0)
    rows = np.concatenate([scores, true], axis=1)
    more = np.concatenate([scores, scores[:, :1], true, 0 * true[:, :1]], axis=1)
    assert multilabel("ap").value(rows) == multilabel("ap").value(more)
    assert multilabel("ap").value(0 * rows) == 0


def test_the_loss_and_the_rows_need_one_label_for_each_logit():
    logits, labels = torch.zeros(2, 3), torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert float(multilabel().loss(logits, labels)) == pytest.approx(np.log(2))
    assert multilabel().rows(logits, labels, 2).shape == (2, 6)
    with pytest.raises(DataError, match=r"logits \(2, 3\) and labels \(2,\) given"):
        multilabel().loss(logits, labels[:, 0])
    with pytest.raises(ConfigError, match="'map' given; allowed are ap, f1"):
        multilabel("map")
