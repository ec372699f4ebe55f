"""Laws of candidates: what they know of a network, and the budget's verdict on them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import Notes
from torch import nn

from basisprune.budget import Budget
from basisprune.budget.certify import AcceptanceRule, Guarantee
from basisprune.method.states import Stage, StageStore, State
from basisprune.recipes import DECOMPOSED, DENSE, POLISHED, Step
from basisprune.search.candidates import ALL, Candidate, Evaluated, Scale, SearchResult, Size, really_kept, share_of
from basisprune.tasks import Predictions
from basisprune.training.checkpoint import EpochRecord
from basisprune.types import BasisPlan, Block, BlockPlan, Coupling, FilterPlan, Group, GroupPlan, LayerPlan

IMAGES = 1000
HISTORY = (EpochRecord(0, 0.1, 0.5, 0.9, 0.6, 0.8),)


def state(right: int = 900, images: int = IMAGES, steps=(DECOMPOSED,), plans=()) -> State:
    hits = np.arange(images) < right
    return State(
        steps, nn.Identity(), (Stage("stage", right / images, 1, 1, 1, HISTORY),), plans, Predictions.of_hits(hits)
    )


def basis_plan(kept: int, rank: int) -> BasisPlan:
    return BasisPlan({"conv": LayerPlan(tuple(range(kept)), rank)}, 0.9)


def filter_plan(kept: int, size: int) -> FilterPlan:
    group = Group("conv", size, {"conv": size}, (), (tuple(range(size)),), ())
    return FilterPlan({"conv": GroupPlan(tuple(range(kept)), size)}, Coupling((group,), {}, ()), {}, size, 0.9)


def candidate(right: int, reference: int = 900, **given) -> Candidate:
    return Candidate.of(state(right, **given), state(reference, **given), Size(10, 20, 3.0))


def test_a_candidate_knows_its_network():
    found = Candidate.of(state(850, steps=(DECOMPOSED, POLISHED)), state(900), Size(10, 20, 3.0))
    assert (found.accuracy, found.drop) == (0.85, pytest.approx(0.05))
    assert found.interval[0] < 0.85 < found.interval[1]
    assert found.drop_interval[0] < 0.05 < found.drop_interval[1]
    assert (found.parameters, found.macs, found.latency_ms) == (10, 20, 3.0)
    assert (found.steps, found.history) == ((DECOMPOSED, POLISHED), HISTORY)
    assert (found.passed, found.undecided) == (True, False)


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1, exclude_max=True))
def test_an_accuracy_budget_passes_what_has_the_least_accuracy(right, reference, limit):
    found, network = candidate(right, reference), state(right)
    for budget in (Budget(max_drop=limit), Budget(min_accuracy=limit)):
        least = budget.least_accuracy(reference / IMAGES)
        judged = found.judged_by(AcceptanceRule(Guarantee(budget)), network, state(reference))
        assert judged.passed == (right / IMAGES >= least - 1e-6)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_candidate_is_undecided_where_the_limit_is_within_the_interval_of_its_drop(right, reference):
    found, budget, before = candidate(right, reference), Budget(max_drop=0.0205), reference / IMAGES
    low, high = found.drop_interval
    within = low <= before - budget.least_accuracy(before) <= high
    judged = found.judged_by(AcceptanceRule(Guarantee(budget)), state(right), state(reference))
    assert judged.undecided == within


def test_few_images_leave_it_undecided_and_many_do_not():
    few, many = (
        candidate(int(0.88 * images), int(0.9 * images), images=images).judged_by(
            AcceptanceRule(Guarantee(Budget(max_drop=0.01))),
            state(int(0.88 * images), images),
            state(int(0.9 * images), images),
        )
        for images in (50, 50_000)
    )
    assert (few.undecided, many.undecided, many.passed) == (True, False, False)
    assert "too few images to be sure" in few.summary
    assert "too few images to be sure" not in many.summary


@pytest.mark.parametrize(
    ("budget", "passed"),
    [
        (Budget(target_params=10), True),
        (Budget(target_params=9), False),
        (Budget(target_macs=20), True),
        (Budget(target_macs=19), False),
        (Budget(target_latency=3.0), True),
        (Budget(target_latency=2.9), False),
    ],
)
def test_a_size_is_judged_whatever_the_accuracy(budget, passed):
    judged = candidate(0).judged(budget)
    assert (judged.passed, judged.undecided) == (passed, False)


def test_what_was_removed_is_what_the_plans_left_of_what_each_found():
    twice = state(plans=(basis_plan(6, 8), filter_plan(9, 10), basis_plan(3, 6)))
    assert really_kept(twice, ALL) == {"basis": pytest.approx(3 / 8), "filters": pytest.approx(0.9)}
    assert really_kept(state(), {"basis": 0.3, "filters": 0.2}) == {"basis": 0.3, "filters": 0.2}
    found = Candidate.of(twice, state(), Size(1, 1))
    assert (found.basis_ratio, found.filter_ratio) == (pytest.approx(5 / 8), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("plans", "steps", "label"),
    [
        ((), (DECOMPOSED,), "unpruned"),
        ((basis_plan(4, 4),), (DECOMPOSED, Step("basis", 0.1)), "unpruned"),
        ((basis_plan(1, 4),), (DECOMPOSED, Step("basis", 0.75)), "75% of the basis"),
        ((basis_plan(1, 200),), (DECOMPOSED, Step("basis", 0.995)), "99.5% of the basis"),
        ((filter_plan(1, 2),), (DECOMPOSED, Step("l1", 0.5)), "50% of the filters"),
        (
            (basis_plan(1, 4), filter_plan(1, 2)),
            (DECOMPOSED, Step("basis", 0.75), Step("l1", 0.5), POLISHED),
            "75% of the basis, 50% of the filters, polished",
        ),
    ],
)
def test_a_candidate_says_what_was_removed(plans, steps, label):
    found = Candidate.of(state(plans=plans, steps=steps), state(), Size(12_345, 1))
    assert found.label == label
    assert found.summary == ("" if label == "unpruned" else "without ") + (
        f"{label}: accuracy 90.0%, 12,345 parameters, passed"
    )


@pytest.mark.parametrize(
    ("plan", "blocks", "label"),
    [
        (basis_plan(4, 4), ("layer1.1",), "1 residual branch"),
        (basis_plan(1, 4), ("layer1.1", "layer2.1"), "75% of the basis, 2 residual branches"),
    ],
)
def test_whole_branches_that_went_are_said(plan, blocks, label):
    gone = BlockPlan(tuple(Block(name, f"{name}.conv") for name in blocks))
    found = Candidate.of(state(plans=(plan, gone)), state(), Size(1, 1))
    assert (found.branches, found.label) == (len(blocks), label)


def test_a_failure_is_said():
    standard = AcceptanceRule(Guarantee(Budget(max_drop=0.01)))
    assert candidate(500).judged_by(standard, state(500), state(900)).summary.endswith(", failed")


def test_what_is_to_be_certified_is_judged_by_the_chance_of_that_and_says_so():
    judged = replace(candidate(899), passed=False, undecided=True, chance=0.49)
    assert judged.summary.endswith(", failed with a chance of 49% to be certified")


def test_what_was_found_is_by_its_trials():
    trials = tuple(
        Evaluated(candidate(right, steps=(step,)), state(right, steps=(step,)), nn.Identity())
        for right, step in ((900, DECOMPOSED), (890, POLISHED))
    )
    found = SearchResult(trials, chosen=1)
    assert found.candidates == (trials[0].candidate, trials[1].candidate)
    assert (found.reference, found.state) == (trials[0].state, trials[1].state)


@given(st.floats(0, 1))
def test_a_share_is_never_said_to_be_all_unless_it_nearly_is(value):
    assert share_of(value) != "100%"
    assert abs(float(share_of(value).rstrip("%")) / 100 - value) <= 0.005 + 1e-9


def test_a_network_that_cannot_be_exported_is_timed_in_pytorch(monkeypatch):
    def onnx_session(model, shape, threads):
        raise RuntimeError("no such operator")

    def measure_latency(models, shape, *, batch_sizes, backends):
        assert backends == ("eager",)
        return SimpleNamespace(rows=[SimpleNamespace(seconds=0.25)])

    monkeypatch.setattr("basisprune.search.candidates.measure_latency", measure_latency)
    monkeypatch.setattr("basisprune.search.candidates.onnx_session", onnx_session)
    monkeypatch.setattr("basisprune.search.candidates.has_onnx", lambda: True)
    notes = Notes()
    spec = SimpleNamespace(shape=(3, 8, 8))
    pipeline = SimpleNamespace(spec=spec, notify=notes, planner=None, store=StageStore(None))
    scale = Scale(pipeline, timed=True)
    for steps in ((DENSE,), (DECOMPOSED,)):
        assert scale.milliseconds(State(steps, nn.Identity()), nn.Identity()) == 250
    assert scale.timed_in == "eager"
    assert len(notes.lines) == 1
    assert "no such operator" in notes.lines[0]
