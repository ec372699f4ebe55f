"""Laws of the search, on a pipeline whose accuracies are given instead of trained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import Notes
from torch import nn

from basisprune.budget import Budget, Ratios
from basisprune.budget.certify import LIKELY, SURE, Guarantee
from basisprune.budget.metrics import value_of
from basisprune.budget.planning import CostPlanner
from basisprune.callback import NullCallback
from basisprune.errors import TooMuchError
from basisprune.method.scoring import Outlook
from basisprune.method.states import FULLY, NOT_AT_ALL, Stage, State, Tuning
from basisprune.recipes import LOOKED_AT, POLISHED, RECIPES, TUNED, Framework, Move, Recipe, Step
from basisprune.search import Search, SearchConfig, search
from basisprune.search.candidates import Scale, Size
from basisprune.search.stepping import Stepping
from basisprune.tasks import CLASSIFICATION, Predictions, Task
from basisprune.types import BasisPlan, Block, BlockPlan, LayerPlan

IMAGES = 1000


@dataclass
class FakePipeline:
    """Networks that keep their accuracy up to a share of basis vectors and one of filters, and lose it beyond."""

    basis_limit: float
    filter_limit: float
    tuned: list[tuple[float, float]] = field(default_factory=list)
    interrupt_at: int = 1000
    least: float = 0.0
    notify: NullCallback = field(default_factory=NullCallback)
    settings: Recipe = field(default_factory=lambda: RECIPES["paper"])
    claimed: int = 0
    tunings: list[Tuning] = field(default_factory=list)
    sources: list[tuple[float, float]] = field(default_factory=list)
    looked: list[float] = field(default_factory=list)
    given_hits: int = 100
    foresees: bool = False
    scale: float = 0.05
    planner: CostPlanner | None = None
    task: Task = CLASSIFICATION

    def start(self, framework: Framework) -> State:
        return self._state((Step(framework.start),), 1.0, 1.0)

    def dense(self) -> State:
        return self._state((Step("dense"),), 1.0, 1.0)

    def given(self) -> State:
        state = self._state((Step("given"),), 1.0, 1.0)
        return replace(state, outcomes=Predictions.of_hits(np.arange(IMAGES) < self.given_hits))

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        self.tunings.append(tuning)
        self.sources.append((state.model.basis, state.model.filters))
        steps, left = (
            state.after(Step(move.scores, ratio)),
            {"basis": state.model.basis, "filters": state.model.filters},
        )
        for axis in move.axes:
            left[axis] *= 1 - ratio
        if left["basis"] < self.least - 1e-3:
            raise TooMuchError(f"{left} is not possible")
        pruned = self._state(steps, **left)
        if not tuning.may_end(0, pruned.outcomes.value):
            if len(self.tuned) == self.interrupt_at:
                raise KeyboardInterrupt
            self.tuned.append((left["basis"], left["filters"]))
        return pruned

    def remove(self, state: State, move: Move, ratios: Ratios) -> State:
        return self.prune(state, move, ratios.of(move.axis))

    def outlook(self, state: State, move: Move, smallest: float) -> Outlook | None:
        if not self.foresees:
            return None
        limit = max(self.basis_limit if "basis" in move.axes else 0, self.filter_limit if "filters" in move.axes else 0)
        return Outlook.of(lambda share: self.scale * (limit / share) ** 4, smallest)

    def polish(self, state: State) -> State:
        polished = self._state(state.after(POLISHED), state.model.basis, state.model.filters)
        return replace(polished, outcomes=Predictions.of_hits(np.arange(IMAGES) < 960))

    def look(self, state: State) -> State:
        self.looked.append(state.model.basis)
        return replace(state, steps=state.after(LOOKED_AT))

    def tune_fully(self, state: State) -> State:
        if len(self.tuned) == self.interrupt_at:
            raise KeyboardInterrupt
        self.tuned.append((state.model.basis, state.model.filters))
        return replace(state, steps=state.after(TUNED))

    def claim_folder(self) -> None:
        self.claimed += 1

    def _state(self, steps: tuple[Step, ...], basis: float, filters: float) -> State:
        good = basis >= self.basis_limit - 1e-3 and filters >= self.filter_limit - 1e-3
        parameters = round(1e6 * basis * filters)
        return State(
            steps,
            SimpleNamespace(basis=basis, filters=filters),
            (Stage("stage", 0.0, parameters, 0, parameters, ()),),
            outcomes=Predictions.of_hits(np.arange(IMAGES) < (950 if good else 500)),
        )


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    def size(scale, state):
        return Size(*(state.stages[-1].parameters,) * 2, 1.0 * state.stages[-1].parameters)

    monkeypatch.setattr(Scale, "deployed", lambda scale, state: nn.Identity())
    monkeypatch.setattr(Scale, "size", size)


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


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.03, 1), st.floats(0.005, 0.5))
def test_a_search_that_foresees_the_loss_finds_the_limit_even_where_accuracy_falls_off_a_cliff(limit, scale):
    pipeline = FakePipeline(limit, limit, foresees=True, scale=scale)
    config = SearchConfig(framework="loss+basis", tolerance=0.2, tunings=None)
    found = Search(pipeline, Budget(max_drop=0.01), config).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert chosen.basis_ratio == chosen.filter_ratio
    assert limit - 2e-3 <= 1 - chosen.basis_ratio <= limit / 0.89 + 2e-3
    assert len(found.candidates) <= 12


def test_candidates_start_from_the_last_one_that_passed_whether_or_not_the_loss_is_foreseen():
    for foresees in (True, False):
        pipeline = FakePipeline(0.2, 0.2, foresees=foresees)
        Search(pipeline, Budget(max_drop=0.01), SearchConfig(framework="loss+basis")).run()
        sources = [basis for basis, _ in pipeline.sources]
        assert sources == sorted(sources, reverse=True)
        assert len(set(sources)) > 1
        assert min(sources) >= 0.199  # never from one that failed


@pytest.mark.parametrize(("warm", "sources"), [(True, [1.0, 0.5, 0.25]), (False, [1.0, 1.0, 1.0])])
def test_the_search_gallops_as_long_as_candidates_pass_from_the_last_one_or_from_the_start(warm, sources):
    config, pipeline = SearchConfig(framework="basis", tolerance=0.49, warm_start=warm), FakePipeline(0.2, 1.0)
    found = Search(pipeline, Budget(max_drop=0.01), config).run()
    tried = [1 - candidate.basis_ratio for candidate in found.candidates[1:4]]
    assert tried == pytest.approx([0.5, 0.25, 0.125])
    assert [basis for basis, _ in pipeline.sources[:3]] == pytest.approx(sources)


@pytest.mark.parametrize(
    ("framework", "axes"),
    [("l1", {"filters"}), ("basis", {"basis"}), ("basis+hrank", {"basis", "filters"}), ("taylor", {"filters"})],
)
def test_a_framework_prunes_what_its_name_says(framework, axes):
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(framework=framework)).run()
    chosen = found.candidates[found.chosen]
    pruned = {"basis": chosen.basis_ratio, "filters": chosen.filter_ratio}
    assert {axis for axis, ratio in pruned.items() if ratio > 0} == axes
    assert chosen.steps[0].name == ("decomposed" if "basis" in axes else "dense")
    assert {step.name for step in chosen.steps[1:-1]} == set(framework.split("+"))


@pytest.mark.parametrize(("asked", "pruned"), [(None, {"basis", "hrank"}), ("l1", {"l1"})])
def test_the_framework_is_that_of_the_recipe_unless_another_is_asked_for(asked, pruned):
    pipeline = FakePipeline(0.5, 0.5, settings=replace(RECIPES["paper"], framework="basis+hrank"))
    found = Search(pipeline, Budget(max_drop=0.01), SearchConfig(framework=asked, polish=False)).run()
    assert {step.name for step in found.state.steps[1:]} == pruned


def test_a_framework_that_is_given_goes_before_the_one_of_the_config():
    own = Framework("mine", "dense", (Move("filters", "random"),))
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(framework="basis"), framework=own).run()
    assert [step.name for step in found.state.steps[:2]] == ["dense", "random"]
    assert found.candidates[found.chosen].basis_ratio == 0


def test_the_chosen_network_is_polished():
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01)).run()
    assert found.candidates[found.chosen].accuracy == 0.96
    assert found.chosen == len(found.candidates) - 1
    assert found.state.steps[-1] == POLISHED
    assert found.candidates[found.chosen].label.endswith(", polished")
    found = Search(FakePipeline(0.5, 0.5), Budget(max_drop=0.01), SearchConfig(polish=False)).run()
    assert found.candidates[found.chosen].accuracy == 0.95


def test_where_even_the_mildest_pruning_loses_too_much_the_model_stays_unpruned():
    found = Search(FakePipeline(1.0, 1.0), Budget(max_drop=0.01)).run()
    assert found.chosen == 0
    assert found.state is found.reference


def test_a_least_accuracy_is_a_budget_too():
    found = Search(FakePipeline(0.5, 0.5), Budget(min_accuracy=0.4), SearchConfig(polish=False)).run()
    assert found.candidates[found.chosen].accuracy == 0.5  # 500 of 1000 hits are good enough


class OneSided(FakePipeline):
    """Networks that are wrong on images of the second class only."""

    def _state(self, steps: tuple[Step, ...], basis: float, filters: float) -> State:
        state = super()._state(steps, basis, filters)
        return replace(state, outcomes=self.said(state.outcomes.value))

    @staticmethod
    def said(accuracy: float) -> Predictions:
        labels = np.arange(IMAGES) % 2
        right = np.where(labels == 0, True, np.arange(IMAGES) < 1800 * accuracy - 810)
        return Predictions(np.where(right, labels, 1 - labels), np.ones(IMAGES), labels)


def test_steps_follow_the_metric_of_the_budget(monkeypatch):
    """Accuracy is 95%, but that of the worst of two classes is 90%, of which 85% must stay."""
    seen = []
    monkeypatch.setattr(search, "Stepping", lambda allowed, **rest: seen.append(allowed) or Stepping(allowed, **rest))
    budget = Budget(min_accuracy=0.85)
    Search(OneSided(0.5, 0.5), budget, SearchConfig(polish=False)).run()
    by_accuracy = seen.pop()
    pipeline = OneSided(0.5, 0.5)
    pipeline.splits = SimpleNamespace(confirm=None)
    Search(pipeline, budget, SearchConfig(polish=False), promise=Guarantee(budget, metric="worst-class")).run()
    reference = OneSided.said(0.95)
    assert seen[-1] == pytest.approx(value_of("worst-class", reference) - 0.85)
    assert by_accuracy == pytest.approx(value_of("accuracy", reference) - 0.85)


def test_the_reference_may_be_another_network():
    pipeline = FakePipeline(0.5, 0.5)
    better = replace(
        pipeline._state((Step("better"),), 1.0, 1.0), outcomes=Predictions.of_hits(np.arange(IMAGES) < 970)
    )
    found = Search(pipeline, Budget(max_drop=0.01), reference=better).run()
    assert found.chosen == 0
    assert found.reference is better


def test_a_network_that_was_given_better_than_it_is_trained_is_the_reference():
    found = Search(FakePipeline(0.5, 0.5, given_hits=965), Budget(max_drop=0.01)).run()
    assert found.reference.steps == (Step("given"),)
    assert found.chosen == 0  # the others lose 1.5 points against it
    assert (
        Search(FakePipeline(0.5, 0.5, given_hits=940), Budget(max_drop=0.01)).run().reference.steps[0].name != "given"
    )


def test_ctrl_c_ends_with_the_best_so_far():
    pipeline = FakePipeline(0.2, 0.2, interrupt_at=0)
    found = Search(pipeline, Budget(max_drop=0.01)).run()
    assert found.interrupted
    assert found.candidates[found.chosen].basis_ratio == pytest.approx(0.75)
    assert not Search(FakePipeline(0.2, 0.2), Budget(max_drop=0.01)).run().interrupted


def test_ctrl_c_before_there_is_anything_to_compare_with_is_ctrl_c(monkeypatch):
    def stop(*_given):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakePipeline, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        Search(FakePipeline(0.2, 0.2), Budget(max_drop=0.01)).run()


def test_the_folder_is_claimed_before_anything_else(monkeypatch):
    pipeline = FakePipeline(0.5, 0.5)
    monkeypatch.setattr(pipeline, "start", lambda framework: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Search(pipeline, Budget(max_drop=0.01)).run()
    assert pipeline.claimed == 1


class CandidateNotes(Notes):
    """Remembers the candidates, too."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates: list[object] = []

    def judged(self, candidate) -> None:
        self.candidates.append(candidate)


def test_each_candidate_is_told_as_it_is_judged():
    notes = CandidateNotes()
    found = Search(FakePipeline(0.5, 0.5, notify=notes), Budget(max_drop=0.01)).run()
    assert tuple(notes.candidates) == found.candidates


@pytest.mark.parametrize(
    ("framework", "ratios", "removed"),
    [
        ("basis+taylor", Ratios(0.5, 0.25), (0.5, 0.25)),
        ("basis+taylor", Ratios(filters=0.25), (0, 0.25)),
        ("l1", Ratios(filters=0.9), (0, 0.9)),
        ("basis", Ratios(), (0, 0)),
    ],
)
def test_given_ratios_are_removed_once_and_tuned_fully_however_bad_it_is(framework, ratios, removed):
    pipeline = FakePipeline(1.0, 1.0)
    found = Search(pipeline, ratios, SearchConfig(framework=framework)).run()
    assert [(c.basis_ratio, c.filter_ratio) for c in found.candidates] == [(0, 0), pytest.approx(removed)]
    assert found.chosen == 1
    assert set(pipeline.tunings) <= {FULLY}
    assert len(pipeline.tuned) == sum(ratio > 0 for ratio in removed)


@pytest.mark.parametrize("target", ["target_params", "target_macs", "target_latency"])
def test_a_size_is_reached_with_as_little_pruning_as_possible_and_few_trainings(target):
    pipeline = FakePipeline(0.0, 0.0)
    found = Search(pipeline, Budget(**{target: 400_000})).run()
    chosen = found.candidates[found.chosen]
    assert chosen.passed
    assert 0.94 * 400_000 <= chosen.parameters <= 400_000
    assert chosen.filter_ratio == 0
    assert len(pipeline.tuned) == 2  # in two steps, each of which keeps half or more
    assert set(pipeline.tunings) == {NOT_AT_ALL, Tuning()}


def test_a_model_that_is_small_enough_is_left_as_it_is():
    pipeline = FakePipeline(0.0, 0.0)
    found = Search(pipeline, Budget(target_params=1_000_000)).run()
    assert (found.chosen, found.candidates[0].passed, pipeline.tunings) == (0, True, [])


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

        def _state(self, steps: tuple[Step, ...], basis: float, filters: float) -> State:
            state = super()._state(steps, basis, filters)
            larger = round(state.stages[-1].parameters * 1.02 ** len(self.tuned))
            return replace(state, stages=(replace(state.stages[-1], parameters=larger, macs=larger),))

    found = Search(Drifting(0.0, 0.0), Budget(target_params=300_000)).run()
    assert found.candidates[found.chosen].passed


def test_the_paper_tunes_every_candidate_fully():
    pipeline = FakePipeline(0.5, 0.5)
    Search(pipeline, Budget(max_drop=0.01), SearchConfig(tune_fully=True)).run()
    assert set(pipeline.tunings) == {Tuning()}


def test_tuning_ends_when_it_is_good_enough_or_hopeless():
    pipeline = FakePipeline(0.5, 0.5)
    Search(pipeline, Budget(max_drop=0.01), SearchConfig(give_up_margin=0.1)).run()
    (tuning,) = set(pipeline.tunings)
    fifth = pipeline.settings.finetune.epochs // 5
    assert tuning.may_end(0, 0.94)
    assert tuning.may_end(fifth, 0.80)
    assert not tuning.may_end(fifth - 1, 0.80)  # tuning may bring it back
    assert not tuning.may_end(fifth, 0.86)


@pytest.mark.parametrize(("epochs", "grace"), [(1, 2), (3, 2), (5, 2), (15, 3), (50, 10)])
def test_a_candidate_has_a_fifth_of_its_epochs_and_two_before_it_is_hopeless(epochs, grace):
    quick = RECIPES["quick"]
    pipeline = FakePipeline(0.5, 0.5, settings=replace(quick, finetune=replace(quick.finetune, epochs=epochs)))
    Search(pipeline, Budget(max_drop=0.01)).run()
    assert {tuning.grace for tuning in pipeline.tunings} == {grace}


def test_candidates_that_are_to_be_certified_are_tuned_for_all_epochs_unless_hopeless():
    pipeline, budget = FakePipeline(0.5, 0.5), Budget(max_drop=0.01)
    pipeline.splits = SimpleNamespace(confirm=Confirming())
    Search(pipeline, budget, SearchConfig(give_up_margin=0.1), promise=Guarantee(budget)).run()
    (tuning,) = set(pipeline.tunings)
    assert not tuning.may_end(tuning.grace, 1.0)
    assert tuning.may_end(tuning.grace, 0.80)


class Recovering(FakePipeline):
    """Networks that lose a point for each halving after a short tuning, and after a full one only beyond the limit."""

    def look(self, state: State) -> State:
        looked = super().look(state)
        lost = round(-10 * np.log2(state.model.basis))
        return replace(looked, outcomes=Predictions.of_hits(np.arange(IMAGES) < 950 - lost))

    def tune_fully(self, state: State) -> State:
        full = self._state(state.steps, state.model.basis, state.model.filters)
        return replace(super().tune_fully(state), outcomes=full.outcomes)


def test_short_tunings_walk_down_and_only_what_promises_to_pass_is_tuned_fully():
    pipeline = Recovering(0.1, 0.1, foresees=True)
    found = Search(pipeline, Budget(max_drop=0.02), SearchConfig(framework="loss+basis", tunings=1, polish=False)).run()
    assert len(pipeline.looked) > len(pipeline.tuned)
    assert {basis for basis, _ in pipeline.tuned} <= set(pipeline.looked)
    assert [basis for basis, _ in pipeline.tuned] == sorted(basis for basis, _ in pipeline.tuned)  # larger after a fail
    assert found.candidates[found.chosen].passed
    assert found.state.steps[-1] == TUNED


def test_what_a_full_tuning_gains_corrects_what_is_expected_of_the_next():
    smallest = {}
    for tunings in (1, 3):
        pipeline = Recovering(0.002, 0.002, foresees=True, scale=1e-3)
        config = SearchConfig(framework="loss+basis", tunings=tunings, smallest=0.001)
        found = Search(pipeline, Budget(max_drop=0.01), config).run()
        assert len(pipeline.tuned) <= tunings
        smallest[tunings] = 1 - found.candidates[found.chosen].basis_ratio
    assert smallest[3] < smallest[1]


def test_the_search_ends_after_its_tunings_only_if_one_of_them_passed():
    pipeline = Recovering(0.9, 0.9, foresees=True, scale=1e-6)
    pipeline.look = lambda state: replace(state, outcomes=Predictions.of_hits(np.arange(IMAGES) < 950))
    found = Search(pipeline, Budget(max_drop=0.01), SearchConfig(framework="loss+basis", tunings=1)).run()
    assert len(pipeline.tuned) > 1
    assert found.candidates[found.chosen].passed


class SmallSteps(FakePipeline):
    """Networks that lose at most 70% at a time."""

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        if ratio > 0.7:
            raise TooMuchError(f"{ratio} is not possible")
        return super().prune(state, move, ratio, tuning)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.02, 1))
def test_what_one_step_cannot_remove_goes_in_further_ones(limit):
    pipeline = SmallSteps(limit, limit, foresees=True)
    config = SearchConfig(framework="loss+basis", tolerance=0.2, tunings=None)
    found = Search(pipeline, Budget(max_drop=0.01), config).run()
    kept = 1 - found.candidates[found.chosen].basis_ratio
    assert limit - 2e-3 <= kept <= limit / 0.89 + 2e-3
    assert kept >= SearchConfig().smallest - 2e-3


def test_pruning_that_finds_nothing_to_remove_is_no_candidate():
    class Blocks(FakePipeline):
        """Networks of which less than half cannot be removed, as blocks of channels are larger than that."""

        def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
            pruned = super().prune(state, move, ratio, tuning)
            plan = BasisPlan({"conv": LayerPlan((0,) if ratio >= 0.5 else (0, 1), 2)}, ratio)
            return replace(pruned, plans=(*state.plans, plan))

    found = Search(Blocks(0.6, 1.0), Budget(max_drop=0.01), SearchConfig(framework="basis")).run()
    assert [candidate.basis_ratio for candidate in found.candidates] == [0, 0.5]
    assert found.chosen == 0


def test_pruning_that_removes_whole_branches_alone_is_a_candidate():
    class Branches(FakePipeline):
        """Networks that lose a branch, and no basis vectors."""

        def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
            plan = BasisPlan({"conv": LayerPlan((0, 1), 2)}, ratio)
            pruned = super().prune(state, move, ratio, tuning)
            return replace(pruned, plans=(*state.plans, plan, BlockPlan((Block("layer1.1", "conv"),))))

    found = Search(Branches(0.6, 1.0), Budget(max_drop=0.01), SearchConfig(framework="basis", polish=False)).run()
    assert len(found.candidates) > 1
    assert found.candidates[1].label == "1 residual branch"


class Confirming:
    """Images to confirm with."""

    labelled = True

    labels, units, independent = np.zeros(1500, dtype=int), None, 1500

    def __len__(self) -> int:
        return len(self.labels)


class Wavering(FakePipeline):
    """Networks that keep less than 0.6 lose little, but answer differently on many images."""

    def _state(self, steps: tuple[Step, ...], basis: float, filters: float) -> State:
        state = super()._state(steps, basis, filters)
        if basis >= 0.6 or state.outcomes.value != 0.95:
            return state
        hits = state.outcomes.hits.copy()
        hits[:20], hits[-20:] = False, True
        return replace(state, outcomes=Predictions.of_hits(hits))


@pytest.mark.parametrize(("pipeline", "tried"), [(Wavering, 1), (FakePipeline, 0)])
def test_a_network_that_may_well_fail_on_the_confirming_images_is_not_the_only_one(pipeline, tried):
    made, budget = pipeline(0.3, 0.0), Budget(max_drop=0.01)
    made.splits = SimpleNamespace(confirm=Confirming())
    found = Search(made, budget, SearchConfig(framework="basis", polish=False), promise=Guarantee(budget)).run()
    smallest = found.candidates[found.chosen]
    assert smallest.chance >= LIKELY
    assert (smallest.chance < SURE) == bool(tried)
    if tried:
        assert found.to_test[0] == len(found.candidates) - 1
        assert found.candidates[found.to_test[0]].chance >= SURE
        *others, last = (1 - candidate.basis_ratio for candidate in found.candidates[1:])
        assert last > max(others)  # nothing smaller than what is known not to be sure was tried


class ByTime(Wavering):
    """Plans by time: the network that keeps a share of it keeps its square of the vectors."""

    kept: list[float]

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        self.kept.append(1 - ratio)
        return super().prune(state, move, 1 - (1 - ratio) ** 2, tuning)


def test_the_network_to_fall_back_on_is_larger_where_shares_are_of_time(monkeypatch):
    def really_kept(state, asked):
        return {"basis": state.model.basis, "filters": state.model.filters}

    monkeypatch.setattr("basisprune.search.candidates.really_kept", really_kept)
    made, budget = ByTime(0.3, 0.0), Budget(max_drop=0.01)
    made.kept, made.splits = [], SimpleNamespace(confirm=Confirming())
    config = SearchConfig(framework="basis", polish=False, warm_start=False)
    found = Search(made, budget, config, promise=Guarantee(budget)).run()
    smallest, safe = found.candidates[found.chosen], found.candidates[-1]
    best = made.kept[found.chosen - 1]
    assert smallest.chance < SURE <= safe.chance
    assert smallest.parameters < safe.parameters
    assert best < made.kept[-1]
