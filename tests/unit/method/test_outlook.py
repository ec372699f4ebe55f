"""Laws of what is expected before pruning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_images, tiny_model

from basisprune import PlanConfig, PreparedBatches, decompose
from basisprune.coupling import trace_coupling
from basisprune.errors import TooMuchError
from basisprune.importance.loss import filter_loss, loss_scores
from basisprune.method.scoring import Outlook, expected_of_basis, expected_of_filters
from basisprune.planning import plan_basis, plan_filters
from basisprune.types import LayerScores, Scores

scores = st.lists(st.floats(0, 10), min_size=2, max_size=20)


@given(scores, scores, st.floats(0, 0.5))
def test_what_a_plan_is_expected_to_cost_is_half_of_all_that_goes(one, other, ratio):
    known = Scores("loss", {"a": LayerScores(tuple(one)), "b": LayerScores(tuple(other))})
    plan = plan_basis(known, ratio, PlanConfig(min_share=0.0, min_keep=1))
    gone = [
        value
        for name, layer in known.layers.items()
        for place, value in enumerate(layer.values)
        if place not in plan.layers[name].keep
    ]
    assert expected_of_basis(plan, known) == pytest.approx(sum(gone) / 2, abs=1e-9)


@given(st.floats(0.01, 1), st.floats(1, 8))
def test_share_and_loss_are_inverse_and_fall_together(scale, power):
    outlook = Outlook.of(lambda share: scale * (share**-power - 1), 0.02)
    assert np.all(np.diff(outlook.shares) < 0)
    assert np.all(np.diff(outlook.losses) >= 0)
    for share in (1.0, 0.7, 0.33, 0.02):
        assert outlook.share(outlook.loss(share)) == pytest.approx(share, rel=1e-6)


def test_it_ends_where_nothing_more_can_be_removed():
    def rise(share: float) -> float:
        if share < 0.5:
            raise TooMuchError("no more")
        return 1 - share

    outlook = Outlook.of(rise, 0.02)
    assert 0.5 <= outlook.shares[-1] < 0.56
    assert outlook.share(10.0) == outlook.shares[-1]


def test_removing_nothing_costs_nothing_and_more_costs_more():
    model = tiny_model().eval()
    batches = PreparedBatches(tiny_images(24), model.input_spec, batch_size=8)
    split = decompose(model, scale_init=1.0, basis="loss", batches=batches)
    basis = loss_scores(split, batches)
    coupling = trace_coupling(model, torch.zeros(2, *model.input_spec.shape))
    filters, config = filter_loss(model, coupling, batches).scores, PlanConfig()
    rises = [
        (
            expected_of_basis(plan_basis(basis, ratio), basis),
            expected_of_filters(model, plan_filters(model, filters, ratio, coupling=coupling), filters, config),
        )
        for ratio in (0.0, 0.2, 0.4)
    ]
    assert rises[0] == (0, 0)
    assert np.all(np.diff(np.array(rises), axis=0) >= 0)
    assert rises[-1][1] > 0
