"""Planning by time from end to end, on an invented device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tables import invented
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.budget import Optimize
from basisprune.budget.planning import CostPlanner, Scored
from basisprune.data import load_data
from basisprune.deploy.timing import table_milliseconds, wanted_shapes
from basisprune.errors import PlanError
from basisprune.joint_plan import PlanFrontier
from basisprune.layer_times import TimeTable
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL
from basisprune.recipes import find_framework
from basisprune.runs.compress import compress
from basisprune.types import BasisPlan, Block, BlockPlan, FilterPlan

pytestmark = pytest.mark.usefixtures("one_thread")


def device_table() -> TimeTable:
    return invented(wanted_shapes(tiny_model(), (3, 16, 16)), block=2)


@pytest.fixture
def device(tmp_path) -> Path:
    path = tmp_path / "device.json"
    path.write_text(device_table().to_json())
    return path


def run(**options):
    data = load_data(tiny_images(120), val_fraction=0.25, test_fraction=0.25)
    recipe = tiny_recipe(tiny_training(epochs=2))
    return compress(tiny_model(), data, recipe=recipe, onnx=False, **options)


def test_a_budget_of_time_on_a_device_is_kept_there(device, tmp_path):
    whole = table_milliseconds(tiny_model(), (3, 16, 16), device_table())
    result = run(target_latency=0.6 * whole, device=str(device), output=tmp_path / "out")
    assert result.chosen.passed
    assert result.chosen.latency_ms == pytest.approx(table_milliseconds(result.model, (3, 16, 16), device_table()))
    assert result.chosen.latency_ms <= 0.6 * whole
    assert result.chosen.steps[-1].name == "latency"
    assert {type(plan) for plan in result.state.plans} == {BasisPlan, FilterPlan}
    again = run(target_latency=0.6 * whole, device=str(device), output=tmp_path / "out")
    assert again.chosen == result.chosen


@pytest.mark.parametrize("optimize", ["macs", "latency"])
def test_by_accuracy_the_result_is_the_candidate_with_least_of_what_is_asked_for(device, optimize):
    options = {"device": str(device)} if optimize == "latency" else {}
    result = run(max_drop=0.3, optimize=optimize, **options)
    passed = [candidate for candidate in result.history if candidate.passed]
    assert len(passed) > 1
    amounts = [candidate.latency_ms if optimize == "latency" else candidate.macs for candidate in passed]
    assert result.chosen.order(optimize)[0] == min(amounts)


@pytest.mark.parametrize("framework", ["basis", "loss", "loss+basis"])
@pytest.mark.parametrize("optimize", ["macs", "latency"])
def test_a_framework_prunes_by_cost_what_it_prunes_anyway(framework, optimize: Optimize):
    planner = CostPlanner(optimize, device_table() if optimize == "latency" else None)
    data = load_data(tiny_images(60), val_fraction=0.25)
    recipe = tiny_recipe(tiny_training(epochs=1))
    pipeline = Pipeline(tiny_model(), data, recipe, progress=False, planner=planner)
    way = find_framework(framework)
    state = pipeline.start(way)
    filters, basis = pipeline.prune(state, way.moves[0], 0.3, NOT_AT_ALL).plans
    assert basis.removed + filters.removed > 0
    assert not basis.removed or "basis" in way.moves[0].axes
    assert not filters.removed or "filters" in way.moves[0].axes
    outlook = pipeline.outlook(state, way.moves[0], 0.3)
    assert outlook is not None
    assert list(outlook.losses) == sorted(outlook.losses)


def test_a_device_that_was_profiled_for_another_size_is_refused(tmp_path):
    path = tmp_path / "device.json"
    path.write_text(invented(wanted_shapes(tiny_model(), (3, 24, 24)), block=2).to_json())
    with pytest.raises(PlanError, match="profile it again"):
        run(max_drop=0.3, device=str(path))


def test_a_run_resumes_with_the_times_in_its_folder(monkeypatch, tmp_path):
    tables = iter((device_table(), invented(wanted_shapes(tiny_model(), (3, 16, 16)), block=4, pair_penalty=1.0)))
    monkeypatch.setattr("basisprune.budget.planning.measured_table", lambda _shapes, say: next(tables))
    first, again = (run(max_drop=0.3, optimize="latency", output=tmp_path / "out") for _ in range(2))
    assert again.history == first.history
    assert (tmp_path / "out" / "candidates" / "times.json").exists()


def test_without_a_device_this_machine_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    monkeypatch.setattr(
        "basisprune.budget.planning.measured_table",
        lambda shapes, say: asked.append(len(shapes)) or replace(invented(shapes, block=2), device="here"),
    )
    planner = CostPlanner.of("latency", None, tiny_model(), print)
    assert planner is not None
    assert planner.table is not None
    assert (planner.table.device, planner.elsewhere, len(asked)) == ("here", False, 1)
    assert CostPlanner.of("params", None, tiny_model(), print) is None


def test_the_two_moves_of_a_framework_are_told_apart(tmp_path):
    data, recipe = load_data(tiny_images(60), val_fraction=0.25), tiny_recipe(tiny_training(epochs=1))
    pipeline = Pipeline(tiny_model(), data, recipe, tmp_path, progress=False, planner=CostPlanner("macs"))
    way = find_framework("basis+loss")
    start = pipeline.start(way)
    one, other = (pipeline.prune(start, move, 0.2, NOT_AT_ALL) for move in way.moves)
    assert [state.steps[-1].name for state in (one, other)] == ["macs basis", "macs filters"]
    for state, removes in ((one, (False, True)), (other, (True, False))):
        assert tuple(plan.removed > 0 for plan in state.plans) == removes


def test_a_network_remembers_which_whole_branches_went(monkeypatch):
    block, planned = Block("layer1.1", "conv"), PlanFrontier.plan
    monkeypatch.setattr(PlanFrontier, "plan", lambda self, ratio: replace(planned(self, ratio), blocks=(block,)))
    monkeypatch.setattr(Scored, "pruned", lambda self, _plan, _compensate: self.model)
    data, recipe = load_data(tiny_images(60), val_fraction=0.25), tiny_recipe(tiny_training(epochs=1))
    pipeline = Pipeline(tiny_model(), data, recipe, progress=False, planner=CostPlanner("macs"))
    way = find_framework("loss")
    assert pipeline.start(way).branches == 0
    pruned = pipeline.prune(pipeline.start(way), way.moves[0], 0.2)
    assert pruned.stages[-1].history
    assert pruned.plans[-1] == pipeline.polish(pruned).plans[-1] == BlockPlan((block,))
