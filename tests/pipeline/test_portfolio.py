"""Laws of a portfolio from start to end: one front over all backbones, and one certificate."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import invoke
from tiny import CLASSES, Notes, poor_backbone, smaller_backbone, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.callback import NullCallback
from basisprune.data import load_data
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import ConfigError, TrainingError
from basisprune.method.pipeline import Pipeline
from basisprune.results import Portfolio, RunSummary
from basisprune.runs.certify import certify_found
from basisprune.runs.load import prepare_job
from basisprune.runs.record import read_tested
from basisprune.runs.settings import configure
from basisprune.search.candidates import Scale
from basisprune.sweeps import stages
from basisprune.sweeps.portfolio import PortfolioConfig, compress_portfolio
from basisprune.sweeps.running import Run, Running, open_pool, slug
from basisprune.sweeps.worker import perform
from basisprune.transfer.model import transfer_model

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = ("tiny:tiny_backbone", "tiny:smaller_backbone", "tiny:poor_backbone")
SETTINGS = """
data: {data}
size: 16
max_drop: 5%
val_fraction: 55%
onnx: false
recipe:
  base: quick
  train: {{epochs: 3, batch_size: 16, lr: 0.05, optimizer: sgd, min_lr: 1.0e-3, norm_statistics: batch, train: method}}
  finetune: {{epochs: 1, batch_size: 16}}
  plan: {{round_to: null}}
  filter_plan: {{round_to: null}}
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portfolio")
    images = tiny_images(240)
    pixels = np.stack([images[index][0].permute(1, 2, 0).numpy() for index in range(240)])
    labels = np.array([images[index][1] for index in range(240)])
    np.savez(
        folder / "colours.npz", x_train=pixels[:216], y_train=labels[:216], x_test=pixels[216:], y_test=labels[216:]
    )
    path = folder / "settings.yaml"
    path.write_text(SETTINGS.format(data=folder / "colours.npz"))
    return path


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """A finished run on the command line, with its folder; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    done = invoke("compress", "--config", settings, "--models", ",".join(MODELS), "--output", folder)
    assert done.exit_code == 0, done.output
    return folder, done


def test_there_is_one_front_over_all_backbones_and_one_certified_model(finished):
    folder, done = finished
    summary = RunSummary.read(folder / "summary.json")
    portfolio = summary.portfolio
    assert [row.name for row in portfolio.backbones] == list(MODELS)
    assert {point.group for point in portfolio.points} == set(MODELS)
    (chosen,) = [point for point in portfolio.points if point.chosen]
    assert chosen.group == portfolio.recommended
    assert (chosen.parameters, chosen.accuracy) == (summary.chosen.parameters, summary.chosen.accuracy)
    assert all(point.latency_ms > 0 for point in portfolio.points)
    assert summary.certificate.certified
    assert (portfolio.reference, portfolio.recommended) == MODELS[:2]
    said = f"Started from {MODELS[1]}, out of 3 backbones, and compared with {MODELS[0]}, unpruned."
    assert said in summary.verdict
    assert summary.candidates[0].name == f"{MODELS[0]}, unpruned"
    assert "Certified with 95% confidence" in done.stdout
    assert all(f"{point.parameters:,}" in done.stdout for point in portfolio.points if point.front)
    page = (folder / "report.html").read_text()
    assert 'id="front-parameters"' in page
    assert 'id="front-latency_ms"' in page


def test_the_loss_is_counted_from_the_most_accurate_backbone(finished):
    summary = RunSummary.read(finished[0] / "summary.json")
    portfolio = summary.portfolio
    accuracies = {row.name: row.accuracy for row in portfolio.backbones}
    assert accuracies[portfolio.reference] == max(accuracies.values()) == summary.reference.accuracy
    sizes = {row.name: row.parameters for row in portfolio.backbones}
    assert summary.reference.parameters == sizes[portfolio.reference]
    assert summary.certificate.tests[-1].before - summary.certificate.tests[-1].after <= 0.05
    small_enough = [point for point in portfolio.points if point.accuracy >= summary.reference.accuracy - 0.05]
    assert summary.chosen.parameters == min(point.parameters for point in small_enough)


def test_a_backbone_that_is_too_poor_is_on_the_front_at_most_and_never_recommended(finished):
    folder, _ = finished
    summary = RunSummary.read(folder / "summary.json")
    poor = MODELS[2]
    (row,) = [row for row in summary.portfolio.backbones if row.name == poor]
    assert row.accuracy < summary.reference.accuracy - 0.05
    assert summary.portfolio.recommended != poor
    smallest = min(summary.portfolio.points, key=lambda point: point.parameters)
    assert smallest.group == poor  # small as it is, it is not within the budget


def test_the_networks_of_one_backbone_were_tested_and_no_others(finished):
    folder, _ = finished
    tested = read_tested(folder)
    assert tested.tests
    summary = RunSummary.read(folder / "summary.json")
    assert len(tested.order) < len(summary.candidates)
    assert not list((folder / "backbones").rglob("tests.json"))


def test_the_folder_is_that_of_any_run(finished, settings, tmp_path):
    folder, _ = finished
    found = json.loads(invoke("evaluate", folder, "--json").stdout)
    summary = RunSummary.read(folder / "summary.json")
    assert found["accuracy"] == pytest.approx(summary.test.after.accuracy)
    assert load_bundle(folder / "model").classes is not None
    words = ("compress", "--config", folder / "config.yaml", "--output", tmp_path / "again", "--dry-run", "--json")
    plan = invoke(*words, "--trust-code")
    assert list(json.loads(plan.stdout)["backbones"]) == list(MODELS)


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.json") if path.name != "config.yaml"}


def test_a_choice_that_names_no_model_of_the_run_is_refused(finished, settings, tmp_path):
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (file,) = folder.rglob("portfolio.json")
    replace(Portfolio.read(file), recommended="nobody").write(file)
    words = ("compress", "--config", settings, "--models", ",".join(MODELS), "--output", folder)
    again = invoke(*words)
    assert (again.exit_code, "portfolio.json: names 'nobody'" in again.stderr) == (1, True), again.stderr


def test_a_second_start_repeats_nothing_and_a_lost_result_is_made_again(finished, settings):
    folder, _ = finished
    words = ("compress", "--config", settings, "--models", ",".join(MODELS), "--output", folder, "--json")
    first, before = RunSummary.read(folder / "summary.json"), times(folder / "backbones")
    again = invoke(*words)
    assert again.exit_code == 0, again.output
    assert "3 of 3" not in again.stderr  # nothing was run
    assert times(folder / "backbones") == before
    (folder / "summary.json").unlink()
    (lost,) = (folder / "backbones").glob("*poor*.search-*.json")
    lost.unlink()
    resumed = invoke(*words)
    assert resumed.exit_code == 0, resumed.output
    second = RunSummary.read(folder / "summary.json")
    assert (second.chosen.parameters, second.certificate) == (first.chosen.parameters, first.certificate)
    changed = {path for path, when in times(folder / "backbones").items() if before.get(path) != when}
    assert {path.name.partition(".")[0] for path in changed if path.parent.name == "backbones"} == {
        lost.name.partition(".")[0]
    }


def test_backbones_go_through_the_runner_of_sweeps_as_runs_that_are_json(finished, settings, tmp_path, monkeypatch):
    """In processes of their own, or on Ray, runs arrive as text; here they do so without a process."""

    def elsewhere(run):
        kinds.append(run.kind)
        perform(Run.from_json(run.to_json()), NullCallback())

    kinds: list[str] = []
    pool = lambda running, callback, _: open_pool(Running(), callback, elsewhere)  # noqa: E731
    monkeypatch.setattr("basisprune.sweeps.portfolio.open_pool", pool)
    words = ("--models", ",".join(MODELS[:2]), "--framework", "basis", "--jobs", 2, "--json")
    done = invoke("compress", "--config", settings, *words, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert kinds == ["start", "start", "search", "search", "deliver"]
    assert json.loads(done.stdout)["certificate"]["status"] == "certified"


def test_other_settings_are_refused(finished, settings):
    folder, _ = finished
    words = ("compress", "--config", settings, "--models", ",".join(MODELS[:2]), "--output", folder)
    refused = invoke(*words)
    assert refused.exit_code == 1
    assert "belongs to a run with other settings" in refused.stderr


def python_run(output: Path, callback: Notes | None = None, **more):
    models = [tiny_model(), transfer_model(poor_backbone(), CLASSES, input_size=16)]
    data = load_data(tiny_images(120), val_fraction=0.5, test_fraction=0.1, confirm_fraction=0.5)
    options = {"max_drop": 0.05, "recipe": tiny_recipe(tiny_training(epochs=2)), "onnx": False, "framework": "basis"}
    plan = PortfolioConfig(keep=1)
    return compress_portfolio(models, data, output=output, plan=plan, callback=callback, **{**options, **more})


def test_the_unpromising_is_dropped_and_the_confirming_images_are_looked_at_last(tmp_path, monkeypatch):
    order: list[str] = []
    certify = certify_found
    monkeypatch.setattr(
        "basisprune.runs.compress.certify_found",
        lambda *args, **more: order.append("certified") or certify(*args, **more),
    )
    for name in ("probe", "start", "search"):
        stage = getattr(stages, name)
        told = lambda run, *rest, stage=stage, name=name: order.append(name) or stage(run, *rest)  # noqa: E731
        monkeypatch.setattr(stages, name, told)
    notes = Notes()
    result = python_run(tmp_path / "out", notes)
    assert order == ["probe", "probe", "start", "search", "certified"]
    good, poor = result.portfolio.backbones
    assert (good.status, poor.status, poor.epochs) == ("compressed", "dropped", 1)
    assert "accurate" in poor.said
    assert {point.group for point in result.portfolio.points} == {good.name}
    assert not list((tmp_path / "out" / "probes").iterdir())
    assert result.model(next(iter(tiny_batch()))).shape == (1, CLASSES)
    assert any("dropped" in line for line in notes.lines)


def tiny_batch():
    yield tiny_images(1)[0][0].float()[None]


def test_a_backbone_that_fails_is_left_out_and_if_all_do_that_is_an_error(tmp_path, monkeypatch):
    start = stages.start

    def failing(run, *rest):
        if "1" in run.backbone.name:
            raise RuntimeError("no memory")
        start(run, *rest)

    monkeypatch.setattr(stages, "start", failing)
    models = [tiny_model(), transfer_model(smaller_backbone(), CLASSES, input_size=16)]
    data = load_data(tiny_images(60), val_fraction=0.5)
    options = {"target_params": 150, "recipe": tiny_recipe(tiny_training(epochs=1)), "onnx": False}
    running = Running(retries=0)
    result = compress_portfolio(models, data, output=tmp_path / "out", running=running, framework="basis", **options)
    first, _ = result.portfolio.backbones
    assert (first.status, first.said) == ("failed", "RuntimeError: no memory")
    assert result.portfolio.recommended == result.portfolio.reference == "TransferModel 2"
    with pytest.raises(TrainingError, match=r"no backbone is left.*no memory"):
        compress_portfolio(models[:1], data, output=tmp_path / "other", running=running, **options)


def test_what_cannot_be_done_is_refused_before_anything_is(tmp_path):
    with pytest.raises(ConfigError, match="pass a budget, by which backbones can be compared"):
        python_run(tmp_path / "a", max_drop=None, basis_ratio=0.5)
    with pytest.raises(ConfigError, match="which another process cannot have"):
        python_run(tmp_path / "b", running=Running(jobs=2))
    for option, said in [
        ({"task": "segmentation"}, "task: segmentation given"),
        ({"weights": "a.safetensors"}, "weights: given"),
        ({"keep_head": True}, "keep_head: given"),
    ]:
        with pytest.raises(ConfigError, match=said):
            compress_portfolio(["resnet18"], tiny_images(60), output=tmp_path / "b", **option)
    with pytest.raises(ConfigError, match="'resnet18' is given twice"):
        compress_portfolio(["resnet18", "resnet18"], tiny_images(60), output=tmp_path / "c")
    with pytest.raises(ConfigError, match="timm has no model 'resnet5000'"):
        compress_portfolio(["resnet5000"], tiny_images(60), output=tmp_path / "c")
    assert not list(tmp_path.iterdir())


def let_fail(monkeypatch, name: str, error: BaseException, *, only: str = "") -> None:
    """Lets a stage fail, of backbones with that in their names."""
    stage = getattr(stages, name)

    def fails(run, *rest):
        if only in run.backbone.name:
            raise error
        stage(run, *rest)

    monkeypatch.setattr(stages, name, fails)


def two_run(output: Path, callback: Notes | None = None):
    models = [tiny_model(), transfer_model(smaller_backbone(), CLASSES, input_size=16)]
    data = load_data(tiny_images(200), val_fraction=0.5, test_fraction=0.1, confirm_fraction=0.5)
    options = {"max_drop": 0.1, "recipe": tiny_recipe(tiny_training(epochs=2)), "onnx": False, "framework": "basis"}
    return compress_portfolio(models, data, output=output, running=Running(retries=0), callback=callback, **options)


def test_a_backbone_whose_training_failed_may_be_the_best_of_a_run_that_resumes(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        let_fail(patch, "start", RuntimeError("no memory"), only="1")
        let_fail(patch, "search", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            two_run(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "reference").iterdir()] == [slug("TransferModel 2")]
    result = two_run(tmp_path / "out")
    assert [row.status for row in result.portfolio.backbones] == ["compressed"] * 2


def test_what_the_confirming_images_were_looked_at_for_stays_recommended_wherever_its_folder_is(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        let_fail(patch, "start", RuntimeError("no memory"), only="2")
        first = two_run(tmp_path / "out")
    assert first.summary.certificate.tests
    notes = Notes()
    second = two_run(tmp_path / "out", notes)
    assert any("TransferModel 2 would be recommended now" in line for line in notes.lines)
    assert second.summary == first.summary
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "moved" / "summary.json").unlink()
    third = two_run(tmp_path / "moved")
    assert third.summary.certificate == first.summary.certificate
    assert not (tmp_path / "out").exists()


def test_the_times_of_the_best_backbone_are_not_those_of_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Scale, "program", lambda *_: "eager")
    monkeypatch.setattr(Scale, "measured", lambda _, model, backend: sum(p.numel() for p in model.parameters()))
    data = load_data(tiny_images(60), val_fraction=0.5)
    recipe = tiny_recipe(tiny_training(epochs=1))
    config = configure({"target_latency": 1e6, "recipe": recipe, "optimize": "params", "framework": "basis"})

    def among(model, folder, best=None):
        job = prepare_job(model, data, config)
        return stages.BackboneSearch(Pipeline(job.network, data, recipe, checkpoints=tmp_path / folder), job, best)

    best = among(tiny_model(), "best").unpruned()
    found = among(transfer_model(smaller_backbone(), CLASSES, input_size=16), "own", best).run()
    large, small = found.candidates
    assert large.latency_ms > small.latency_ms
    assert found.timed_in == "eager"
