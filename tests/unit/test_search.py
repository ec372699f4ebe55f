"""Laws of the search, on a pipeline whose accuracies are given instead of trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from basisprune.errors import ConfigError
from basisprune.pipeline import Stage, State
from basisprune.search import Budget, Search, SearchConfig, paired_drop, wilson_interval

IMAGES = 1000


@dataclass
class FakePipeline:
    """Networks that keep their accuracy up to a ratio of basis vectors and one of filters, and lose it beyond."""

    basis_limit: float
    filter_limit: float
    model: nn.Module = field(default_factory=lambda: nn.Linear(10, 100))
    made: list[tuple[float, float]] = field(default_factory=list)

    def decomposed(self) -> State:
        return self._state(0.0, 0.0)

    def prune_basis(self, state: State, ratio: float, *, stop) -> State:
        basis, filters = state.plans
        return self._state(1 - (1 - basis) * (1 - ratio), filters)

    def prune_filters(self, state: State, method: str, ratio: float, *, stop) -> State:
        basis, filters = state.plans
        return self._state(basis, 1 - (1 - filters) * (1 - ratio))

    def hits(self, model: SimpleNamespace) -> np.ndarray:
        good = model.basis <= self.basis_limit and model.filters <= self.filter_limit
        return np.arange(IMAGES) < (950 if good else 500)

    def _state(self, basis: float, filters: float) -> State:
        self.made.append((basis, filters))
        parameters = round(1000 * (1 - basis) * (1 - filters))
        stage = Stage("stage", 0.0, parameters, 0, parameters, ())
        return State(
            f"{basis:.4f} {filters:.4f}", SimpleNamespace(basis=basis, filters=filters), (stage,), (basis, filters)
        )


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    size = SimpleNamespace(parameters=1000, macs=1000)
    monkeypatch.setattr("basisprune.search.measure", lambda model: size)


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 0.9), st.floats(0, 0.9))
def test_the_largest_ratios_within_the_budget_are_found_to_within_the_tolerance(basis_limit, filter_limit):
    pipeline = FakePipeline(basis_limit, filter_limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("basisprune.search.measure", lambda model: SimpleNamespace(parameters=1000, macs=1000))
        found = Search(pipeline, Budget(max_drop=0.01), SearchConfig(tolerance=0.05)).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert basis_limit - 0.05 <= chosen.basis_ratio <= basis_limit + 1e-9
    assert filter_limit - 0.05 <= chosen.filter_ratio <= filter_limit + 1e-9
    assert chosen.parameters == min(c.parameters for c in found.candidates if c.passed)
    assert len(pipeline.made) <= 1 + 2 * 5


def test_each_candidate_starts_from_the_nearest_that_passed():
    pipeline = FakePipeline(0.6, 0.0)
    Search(pipeline, Budget(max_drop=0.01), SearchConfig(filter_method="none")).run()
    ratios = [basis for basis, _ in pipeline.made]
    assert ratios == pytest.approx([0, 0.475, 0.7125, 0.59375, 0.653125, 0.6234375])


def test_where_even_the_mildest_pruning_loses_too_much_the_model_stays_unpruned():
    found = Search(FakePipeline(0.0, 0.0), Budget(max_drop=0.01)).run()
    assert found.chosen == 0
    assert found.state is found.reference


def test_a_least_accuracy_is_a_budget_too():
    found = Search(FakePipeline(0.5, 0.5), Budget(min_accuracy=0.4)).run()
    assert found.candidates[found.chosen].accuracy == 0.5  # 500 of 1000 hits are good enough


@pytest.mark.parametrize("budget", [Budget(target_params=400), Budget(target_macs=400)])
def test_a_size_is_reached_with_as_little_pruning_as_possible(budget):
    found = Search(FakePipeline(0.9, 0.9), budget, SearchConfig(tolerance=0.02)).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert chosen.parameters <= 400
    assert chosen.basis_ratio == pytest.approx(0.6, abs=0.025)


def test_an_unreachable_size_ends_with_the_smallest():
    found = Search(FakePipeline(0.9, 0.9), Budget(target_params=10)).run()
    chosen = found.candidates[found.chosen]
    assert not chosen.passed
    assert chosen.parameters == min(c.parameters for c in found.candidates)


def test_hopeless_trainings_are_given_up_and_others_are_not():
    search = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(give_up_margin=0.1))
    search.run()
    assert search._hopeless([SimpleNamespace(val_accuracy=0.80)])
    assert not search._hopeless([SimpleNamespace(val_accuracy=0.86)])


def test_an_undecided_candidate_says_so():
    before = np.ones(50, dtype=bool)
    after = before.copy()
    after[0] = False
    drop, (low, high) = paired_drop(before, after)
    assert drop == 0.02
    assert low < 0.01 < high


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 500), st.data())
def test_wilsons_interval_is_scipys(count, data):
    hits = data.draw(st.integers(0, count))
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_the_drop_lies_in_its_interval_and_turns_round_with_the_order(pairs):
    before, after = (np.array(column) for column in zip(*pairs, strict=True))
    drop, (low, high) = paired_drop(before, after)
    assert low < drop < high
    assert drop == pytest.approx(before.mean() - after.mean())
    assert paired_drop(after, before)[0] == pytest.approx(-drop)


def test_faults_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="exactly one is needed"):
        Budget()
    with pytest.raises(ConfigError, match="exactly one is needed"):
        Budget(max_drop=0.01, target_params=5)
    with pytest.raises(ConfigError, match=r"1 % is 0\.01"):
        Budget(max_drop=1.0)
    with pytest.raises(ConfigError, match="4 faults"):
        SearchConfig(filter_method="tailor", tolerance=0, max_ratio=1, give_up_margin=0)
