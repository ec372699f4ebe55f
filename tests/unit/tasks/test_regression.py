"""R2 and errors against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from basisprune.errors import ConfigError, DataError
from basisprune.tasks import regression


@given(st.integers(0, 10_000))
def test_the_metrics_are_those_of_scikit_learn(seed):
    generator = torch.Generator().manual_seed(seed)
    said, are = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    wanted = {"r2": r2_score(are, said), "mae": -mean_absolute_error(are, said), "mse": -mean_squared_error(are, said)}
    for metric, value in wanted.items():
        task = regression(metric)
        rows = task.rows(said, are, 9)
        assert task.value(rows) == pytest.approx(value)
        assert task.value(np.random.default_rng(seed).permutation(rows)) == pytest.approx(value)


def test_errors_are_those_of_each_example():
    said, are = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])
    for metric in ("r2", "mae", "mse"):
        task = regression(metric)
        assert task.errors(task.rows(said, are, 2)).tolist() == pytest.approx([0.5, 2.0])


def test_a_column_of_outputs_fits_single_targets_and_nothing_else_does():
    assert float(regression().loss(torch.ones(3, 1), torch.zeros(3))) == 1.0
    with pytest.raises(DataError, match=r"outputs \(3, 2\), the targets are \(3, 1\)"):
        regression().loss(torch.ones(3, 2), torch.zeros(3))
    with pytest.raises(ConfigError, match="'rmse' given; allowed are r2, mae, mse"):
        regression("rmse")


def test_targets_that_do_not_vary_are_met_or_not():
    assert regression().value(np.array([[1.0, 1.0], [1.0, 1.0]])) == 1.0
    assert regression().value(np.array([[2.0, 1.0], [1.0, 1.0]])) == 0.0
