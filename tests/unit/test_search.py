"""Laws of the search, on a pipeline whose accuracies are given instead of trained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from basisprune.errors import ConfigError, TooMuchError
from basisprune.pipeline import Stage, State
from basisprune.search import Budget, Search, SearchConfig

IMAGES = 1000


@dataclass
class FakePipeline:
    """Networks that keep their accuracy up to a share of basis vectors and one of filters, and lose it beyond."""

    basis_limit: float
    filter_limit: float
    tuned: list[tuple[float, float]] = field(default_factory=list)
    interrupt_at: int = 1000
    least: float = 0.0

    def decomposed(self) -> State:
        return self._state(1.0, 1.0)

    dense = decomposed

    def prune_basis(self, state: State, ratio: float, *, enough) -> State:
        return self._tuned(state.model.basis * (1 - ratio), state.model.filters, enough)

    def prune_filters(self, state: State, method: str, ratio: float, *, enough) -> State:
        return self._tuned(state.model.basis, state.model.filters * (1 - ratio), enough)

    def polish(self, state: State) -> State:
        return replace(self._state(state.model.basis, state.model.filters), hits=np.arange(IMAGES) < 960)

    def say(self, line: str) -> None:
        pass

    def claim_folder(self) -> None:
        pass

    def _tuned(self, basis: float, filters: float, enough) -> State:
        if basis < self.least - 1e-3:
            raise TooMuchError(f"{basis} is not possible")
        state = self._state(basis, filters)
        if enough is None or not enough(0, float(state.hits.mean())):
            if len(self.tuned) == self.interrupt_at:
                raise KeyboardInterrupt
            self.tuned.append((basis, filters))
        return state

    def _state(self, basis: float, filters: float) -> State:
        good = basis >= self.basis_limit - 1e-3 and filters >= self.filter_limit - 1e-3
        parameters = round(1e6 * basis * filters)
        return State(
            f"{basis:.4f} {filters:.4f}",
            SimpleNamespace(basis=basis, filters=filters),
            (Stage("stage", 0.0, parameters, 0, parameters, ()),),
            hits=np.arange(IMAGES) < (950 if good else 500),
        )


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    def size(search, state):
        return (*(state.stages[-1].parameters,) * 2, 1.0 * state.stages[-1].parameters)

    monkeypatch.setattr(Search, "_size", size)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.03, 1), st.floats(0.03, 1))
def test_the_smallest_shares_within_the_budget_are_found_to_within_the_tolerance(basis_limit, filter_limit):
    found = Search(FakePipeline(basis_limit, filter_limit), Budget(max_drop=0.01), SearchConfig(tolerance=0.1)).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    for kept, limit in ((1 - chosen.basis_ratio, basis_limit), (1 - chosen.filter_ratio, filter_limit)):
        assert limit - 2e-3 <= kept <= limit / 0.9 + 2e-3
    assert chosen.parameters == min(c.parameters for c in found.candidates if c.passed)
    assert len(found.candidates) <= 2 * (1 + 6 + 4)


@pytest.mark.parametrize(("warm", "kept"), [(True, [0.5, 0.25, 0.125]), (False, [0.5, 0.25, 0.125])])
def test_the_search_gallops_as_long_as_candidates_pass(warm, kept):
    config = SearchConfig(framework="basis", tolerance=0.49, warm_start=warm)
    found = Search(FakePipeline(0.2, 1.0), Budget(max_drop=0.01), config).run()
    tried = [1 - candidate.basis_ratio for candidate in found.candidates[1:4]]
    assert tried == pytest.approx(kept)


@pytest.mark.parametrize(
    ("framework", "axes"),
    [("l1", {"filters"}), ("basis", {"basis"}), ("basis+hrank", {"basis", "filters"}), ("taylor", {"filters"})],
)
def test_a_framework_prunes_what_its_name_says(framework, axes):
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(framework=framework)).run()
    chosen = found.candidates[found.chosen]
    pruned = {"basis": chosen.basis_ratio, "filters": chosen.filter_ratio}
    assert {axis for axis, ratio in pruned.items() if ratio > 0} == axes


def test_the_chosen_network_is_polished():
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01)).run()
    assert found.candidates[found.chosen].accuracy == 0.96
    assert found.chosen == len(found.candidates) - 1
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(polish=False)).run()
    assert found.candidates[found.chosen].accuracy == 0.95


def test_where_even_the_mildest_pruning_loses_too_much_the_model_stays_unpruned():
    found = Search(FakePipeline(1.0, 1.0), Budget(max_drop=0.01)).run()
    assert found.chosen == 0
    assert found.state is found.reference


def test_a_least_accuracy_is_a_budget_too():
    found = Search(FakePipeline(0.5, 0.5), Budget(min_accuracy=0.4), SearchConfig(polish=False)).run()
    assert found.candidates[found.chosen].accuracy == 0.5  # 500 of 1000 hits are good enough


def test_the_reference_may_be_another_network():
    pipeline = FakePipeline(0.5, 0.5)
    better = replace(pipeline.dense(), hits=np.arange(IMAGES) < 970)
    found = Search(pipeline, Budget(max_drop=0.01), reference=better).run()
    assert found.chosen == 0
    assert found.reference is better


def test_ctrl_c_ends_with_the_best_so_far():
    pipeline = FakePipeline(0.2, 0.2, interrupt_at=0)
    found = Search(pipeline, Budget(max_drop=0.01)).run()
    assert found.interrupted
    assert found.candidates[found.chosen].basis_ratio == pytest.approx(0.75)


def test_each_candidate_is_told_as_it_is_judged():
    told = []
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), watch=told.append).run()
    assert tuple(told) == found.candidates


@pytest.mark.parametrize("target", ["target_params", "target_macs", "target_latency"])
def test_a_size_is_reached_with_as_little_pruning_as_possible_and_few_trainings(target):
    pipeline = FakePipeline(0.0, 0.0)
    found = Search(pipeline, Budget(**{target: 400_000})).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert 0.94 * 400_000 <= chosen.parameters <= 400_000
    assert chosen.filter_ratio == 0
    assert len(pipeline.tuned) == 2  # in two steps, each of which keeps half or more


def test_a_network_that_cannot_be_exported_is_timed_in_pytorch(monkeypatch):
    def measure_latency(models, shape, *, batch_sizes, backends):
        if "onnxruntime" in backends:
            raise RuntimeError("no such operator")
        return SimpleNamespace(rows=[SimpleNamespace(seconds=0.25)])

    monkeypatch.setattr("basisprune.search.measure_latency", measure_latency)
    monkeypatch.setattr("basisprune.search.has_onnx", lambda: True)
    said = []
    pipeline = SimpleNamespace(spec=SimpleNamespace(shape=(3, 8, 8)), say=said.append, dense=None, decomposed=None)
    assert Search(pipeline, Budget(target_latency=1.0), moves=[])._milliseconds(nn.Identity()) == 250
    assert "no such operator" in said[0]


def test_filters_go_too_where_the_basis_alone_cannot_reach_the_size():
    found = Search(FakePipeline(0.0, 0.0), Budget(target_params=10_000)).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert chosen.filter_ratio > 0


def test_an_unreachable_size_ends_with_the_smallest():
    found = Search(FakePipeline(0.0, 0.0), Budget(target_params=10_000), SearchConfig(framework="basis")).run()
    chosen = found.candidates[found.chosen]
    assert not chosen.passed
    assert chosen.parameters == min(c.parameters for c in found.candidates)


@pytest.mark.parametrize("budget", [Budget(max_drop=0.01), Budget(target_params=100)])
def test_as_much_goes_as_can_where_a_ratio_asks_for_more(budget):
    found = Search(FakePipeline(0.0, 0.0, least=0.6), budget, SearchConfig(framework="basis", tolerance=0.1)).run()
    assert 0.6 - 2e-3 <= 1 - found.candidates[found.chosen].basis_ratio <= 0.6 / 0.9 + 2e-3


def test_a_size_that_tuning_moved_out_of_reach_is_gone_after():
    class Drifting(FakePipeline):
        """Networks that come out a little larger when they were tuned on the way."""

        def _state(self, basis: float, filters: float) -> State:
            state = super()._state(basis, filters)
            larger = round(state.stages[-1].parameters * 1.02 ** len(self.tuned))
            return replace(state, stages=(replace(state.stages[-1], parameters=larger, macs=larger),))

    found = Search(Drifting(0.0, 0.0), Budget(target_params=300_000)).run()
    assert found.candidates[found.chosen].passed


def test_the_paper_tunes_every_candidate_fully():
    search = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(tune_fully=True))
    search.run()
    assert not search._enough(0, 0.99)


def test_tuning_ends_when_it_is_good_enough_or_hopeless():
    search = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(give_up_margin=0.1))
    search.run()
    assert search._enough(0, 0.94)
    assert search._enough(1, 0.80)
    assert not search._enough(0, 0.80)  # tuning may bring it back
    assert not search._enough(1, 0.86)


def test_faults_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="exactly one is needed"):
        Budget()
    with pytest.raises(ConfigError, match="exactly one is needed"):
        Budget(max_drop=0.01, target_params=5)
    with pytest.raises(ConfigError, match=r"1 % is 0\.01"):
        Budget(max_drop=1.0)
    with pytest.raises(ConfigError, match="above 0"):
        Budget(target_latency=0.0)
    with pytest.raises(ConfigError, match="5 faults"):
        SearchConfig(framework="tailor", step=1, tolerance=0, smallest=1, give_up_margin=0)
