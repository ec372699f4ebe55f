"""One call from images to the smallest model."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import nn

from basisprune.basis.layers import BasisPair
from basisprune.budget import Budget
from basisprune.callback import NullCallback
from basisprune.costs import measure
from basisprune.data import Splits, load_data
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.export import evaluate_onnx
from basisprune.deploy.fold import fold
from basisprune.deploy.graphs import FoldedModel
from basisprune.errors import CheckpointError, ConfigError
from basisprune.recipes import Recipe
from basisprune.results import Limit, RunSummary
from basisprune.runs.compress import compress
from basisprune.search import SearchConfig
from basisprune.training.evaluation import predict

pytestmark = pytest.mark.usefixtures("one_thread")
TESTS = Path(__file__).parent.parent


def recipe() -> Recipe:
    return tiny_recipe(tiny_training(epochs=2))


def data() -> Splits:
    return load_data(tiny_images(120), val_fraction=0.25, test_fraction=0.25)


def run(output: Path | None = None, **settings):
    options = {"max_drop": 0.02, "recipe": recipe(), "search": SearchConfig(framework="basis+taylor"), "onnx": False}
    return compress(tiny_model(), data(), output=output, **{**options, **settings})


@pytest.fixture(scope="module")
def result():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run()
    torch.set_num_threads(before)


def test_the_result_is_within_the_budget_and_its_numbers_are_those_of_the_model(result):
    assert result.chosen.passed
    assert result.chosen in result.history
    assert result.history[0].accuracy - result.chosen.accuracy <= 0.02 + 1e-9
    report = measure(result.model)
    assert (result.chosen.parameters, result.chosen.macs) == (report.parameters, report.macs)
    assert result.chosen.parameters < result.history[0].parameters


def test_sizes_are_those_of_the_form_that_is_deployed(result):
    folded = measure(fold(tiny_model(), torch.zeros(2, 3, 16, 16)), 16)
    assert (result.history[0].parameters, result.history[0].macs) == (folded.parameters, folded.macs)
    rows = result.summary.candidates
    assert [(row.parameters, row.macs) for row in rows] == [(c.parameters, c.macs) for c in result.history]
    assert measure(result.original).parameters == folded.parameters
    inside = sum(layer.parameters for layer in result.summary.layers)
    assert inside == result.chosen.parameters  # no norm is left


def test_the_model_is_of_plain_layers_and_says_what_the_trained_one_says(result):
    assert isinstance(result.model, FoldedModel)
    parts = [type(module) for module in result.model.modules() if module is not result.model]
    assert {kind.__module__.partition(".")[0] for kind in parts} == {"torch"}
    assert not any(issubclass(kind, nn.BatchNorm2d) for kind in parts)
    assert any(isinstance(module, BasisPair) for module in result.trained.modules())  # it was not plain before
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(result.model(images), result.trained.eval()(images), atol=1e-4)
    assert tuple(result.model.classes) == ("0", "1", "2")


def test_the_summary_survives_json_and_tells_what_happened(result):
    summary = RunSummary.from_json(result.summary.to_json())
    assert summary == result.summary
    assert summary.candidates[0].name == "unpruned"
    assert [row.chosen for row in summary.candidates].count(True) == 1
    assert summary.chosen.steps == result.state.steps
    after = predict(result.model, data().test)
    assert summary.test.after.accuracy == pytest.approx(float(after.hits.mean()))
    assert [list(row) for row in summary.confusion.after] == after.confusion(3)
    assert "removed" in summary.verdict
    assert all(row.latency_ms > 0 for row in summary.candidates)
    assert (summary.interrupted, summary.kept_to_budget, summary.budget) == (False, True, Limit("max_drop", 0.02))


def test_the_folder_holds_everything_and_a_second_start_changes_nothing(tmp_path):
    first = run(tmp_path / "out", onnx=True, int8=True)
    names = {"config.yaml", "images.json", "summary.json", "report.html", "model", "candidates"}
    exported = {"model.onnx", "model.int8.onnx"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | exported
    summary = RunSummary.read(tmp_path / "out" / "summary.json")
    assert summary == first.summary
    assert {(row.backend, row.batch_size) for row in summary.latency.rows} == {
        (backend, batch) for backend in ("eager", "onnxruntime") for batch in (1, 32)
    }
    measured = evaluate_onnx(tmp_path / "out" / "model.int8.onnx", data().test)
    assert summary.files["model.int8.onnx"].accuracy == pytest.approx(measured.accuracy)
    bundle = load_bundle(tmp_path / "out" / "model")
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(bundle.model(images), first.model(images))
    assert (bundle.classes, bundle.metrics["verdict"]) == (("0", "1", "2"), summary.verdict)
    again = run(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert again.history == first.history
    assert not differing(again.model, first.model)


def test_a_folder_of_other_settings_is_refused_with_the_difference(tmp_path):
    run(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"other settings(?s:.*)max_drop: 0\.02 -> 0\.05"):
        run(tmp_path / "out", max_drop=0.05)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("chapter one")
    with pytest.raises(CheckpointError, match=r"contains thesis\.txt but no config\.yaml"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_old_name_of_the_callback_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="use callback="), pytest.raises(ConfigError, match="tune_first"):
        compress(tiny_model(), data(), listener=Notes(), tune_first=True)


def test_a_result_can_be_saved_and_reported_later(result, tmp_path):
    assert result.save(tmp_path / "saved", onnx=False) == tmp_path / "saved"
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "config.yaml",
        "images.json",
        "summary.json",
        "report.html",
        "model",
    }
    assert result.report(tmp_path / "page.html").stat().st_size > 1000


def test_a_form_that_cannot_be_written_leaves_no_old_file_and_files_of_others_stay(result, tmp_path, monkeypatch):
    result.save(tmp_path / "out", onnx=True, int8=True)
    (tmp_path / "out" / "model" / "notes.txt").write_text("mine")
    monkeypatch.setattr("onnxruntime.quantization.quantize_static", lambda *_given, **_options: 1 / 0)
    notes = Notes()
    result.save(tmp_path / "out", onnx=True, int8=True, callback=notes)
    left = {"config.yaml", "images.json", "summary.json", "report.html", "model", "model.onnx"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left
    assert (tmp_path / "out" / "model" / "notes.txt").read_text() == "mine"
    assert load_bundle(tmp_path / "out" / "model").classes == ("0", "1", "2")
    assert list(RunSummary.read(tmp_path / "out" / "summary.json").files) == ["model", "model.onnx"]
    refused = [line for line in notes.lines if "is not written" in line]
    assert [line.split()[0] for line in refused] == ["model.int8.onnx"]
    assert "onnxruntime cannot quantise it (ZeroDivisionError" in refused[0]


def test_a_size_that_the_model_does_not_take_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match="32 given, but the model takes 16x16"):
        run(tmp_path / "out", size=32)
    assert not (tmp_path / "out").exists()


def test_sizes_are_budgets_too():
    result = run(budget=Budget(target_params=700), max_drop=None)
    assert measure(result.model).parameters <= 700


def test_fixed_ratios_need_no_search():
    result = run(basis_ratio=0.5, filter_ratio=0.25, max_drop=None)
    assert [(c.basis_ratio, c.filter_ratio) for c in result.history] == [(0.0, 0.0), (0.5, 0.25)]
    assert result.summary.budget == Limit("fixed")
    assert result.summary.kept_to_budget
    assert result.chosen.parameters == measure(result.model).parameters < result.history[0].parameters


@pytest.mark.parametrize("framework", ["taylor", "basis"])
def test_every_kind_of_framework_makes_a_summary(framework):
    result = run(search={"framework": framework})
    assert bool(result.summary.importance) == (framework == "basis")
    assert all(c.filter_ratio == 0 for c in result.history) == (framework == "basis")


def test_where_nothing_keeps_to_the_budget_the_model_is_unpruned_and_says_so():
    still = tiny_training(epochs=1, lr=1e-6, min_lr=0.0)
    result = run(
        budget=Budget(min_accuracy=0.999),
        max_drop=None,
        recipe=replace(recipe(), train=still, finetune=still),
    )
    assert result.chosen is result.history[0]
    assert not result.summary.kept_to_budget
    assert result.summary.verdict.startswith("No candidate is smaller")


def test_ctrl_c_ends_with_the_best_so_far(result, tmp_path):
    whole = result

    class Impatient(NullCallback):
        def judged(self, candidate):
            if candidate.basis_ratio > 0:
                raise KeyboardInterrupt

    result = run(tmp_path / "out", callback=Impatient())
    assert result.summary.interrupted
    assert result.summary.verdict.startswith("Stopped early")
    assert load_bundle(tmp_path / "out" / "model").metrics["verdict"] == result.summary.verdict
    assert run(tmp_path / "out").history == whole.history


def test_ratios_that_were_stopped_before_their_end_are_not_kept_to(monkeypatch, tmp_path):
    def stop(*_given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("basisprune.method.pipeline.Pipeline.prune_filters", stop)
        result = run(tmp_path / "out", basis_ratio=0.5, filter_ratio=0.25, max_drop=None)
    assert (result.summary.interrupted, result.summary.kept_to_budget) == (True, False)
    assert result.summary.verdict == "Stopped early; this is the best result so far. The model is unpruned."
    again = run(tmp_path / "out", basis_ratio=0.5, filter_ratio=0.25, max_drop=None)
    assert (again.summary.interrupted, again.summary.kept_to_budget) == (False, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": Budget(max_drop=0.1)}, "budget and max_drop given; pass one of them"),
        ({"budget": Budget(target_params=9)}, "max_drop, target_params given; pass one budget"),
        ({"basis_ratio": 0.5}, "max_drop, basis_ratio given; pass one budget, or the ratios to remove"),
        ({"basis_ratio": 1.0, "max_drop": None}, "basis_ratio: 1.0 given"),
        ({"basis_ratio": 0.5, "max_drop": None, "search": {"framework": "l1"}}, "l1 does not prune that"),
        ({"input_size": 16}, "input_size: no such setting"),
        ({"recipe": {"trian": {}}}, "trian: no such setting. Did you mean 'train'"),
        ({"search": {"framework": "tailor"}}, r"search: framework: .*Did you mean 'taylor'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run(**settings)


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from pipeline.test_compress import run
    from pathlib import Path
    result = run(Path(sys.argv[1]))
    torch.save(result.model.state_dict(), sys.argv[1] + ".pt")
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    script = textwrap.dedent(SCRIPT.format(tests=str(TESTS)))
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.PIPE)


def test_a_search_that_is_killed_again_and_again_ends_with_the_same_answer(tmp_path):
    expected = run(tmp_path / "whole")
    chance, ends = random.Random(0), []
    for _ in range(3):
        process = start(tmp_path / "killed")
        wanted = len(list((tmp_path / "killed").rglob("*.pt"))) + 1
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((tmp_path / "killed").rglob("*.pt"))) >= wanted:
                time.sleep(chance.uniform(0, 0.05))
                break
            time.sleep(0.005)
        process.kill()
        process.communicate()
        ends.append(process.returncode)
    assert ends.count(-signal.SIGKILL) >= 2  # another had come to its end before
    final = start(tmp_path / "killed")
    _, errors = final.communicate(timeout=300)
    assert final.returncode == 0, errors.decode()
    state = torch.load(tmp_path / "killed.pt", weights_only=True)
    assert state.keys() == expected.model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in expected.model.state_dict().items())
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")]
    for summary in summaries:
        for candidate in summary["candidates"]:
            candidate.pop("latency_ms")  # measured anew
    assert summaries[0]["candidates"] == summaries[1]["candidates"]
