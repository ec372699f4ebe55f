"""Laws of the command line."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil

import pytest
import torch
import yaml
from PIL import Image
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training
from typer.testing import CliRunner

import basisprune
import basisprune.demo
from basisprune.cli import app
from basisprune.data import load_data
from basisprune.errors import MissingExtraError
from basisprune.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread")
runner = CliRunner()
COMMANDS = ("compress", "train", "evaluate", "predict", "inspect", "demo")
COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    images = tiny_images(120)
    for index in range(len(images)):
        pixels, label = images[index]
        (folder / COLOURS[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / COLOURS[label] / f"{index}.png")
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_recipe():
    """The recipe "quick", for the tiny model."""
    before = RECIPES["quick"]
    RECIPES["quick"] = tiny_recipe(tiny_training(epochs=4, batch_size=8))
    yield
    RECIPES["quick"] = before


def invoke(*words: object):
    return runner.invoke(app, [str(word) for word in words])


def compress_into(folder, photos, *more: object):
    start = ("--model", "tiny:tiny_backbone", "--data", photos, "--size", 16, "--output", folder)
    return invoke("compress", *start, "--val-fraction", "25%", *more)


@pytest.fixture(scope="module")
def compressed(photos, tmp_path_factory):
    """A finished run, with ONNX files, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    done = compress_into(folder, photos, "--max-drop", "2%", "--int8", "--json")
    assert done.exit_code == 0, done.output
    return folder, done


def test_help_names_every_command_and_the_exit_codes():
    for words in (("--help",), ()):
        shown = invoke(*words).output
        assert all(command in shown for command in COMMANDS)
        assert "130" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_teaches_by_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert len(re.findall(r"^ +basisprune \w+ ?", result.output, re.MULTILINE)) >= 2


def test_the_version_is_shown():
    result = invoke("--version")
    assert (result.exit_code, result.output.strip()) == (0, basisprune.__version__)


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("comprss",), 2, "Did you mean 'compress'"),
        (("inspect", "resnet18", "--szie", 3), 2, "--size"),
        (("inspect", "rsnet18"), 1, "Did you mean 'resnet18'"),
        (("compress", "--model", "x", "--data", "torchvision:CIFAR1", "--output", "x"), 1, "Did you mean 'CIFAR10'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--recipe", "quik"), 1, "Did you mean 'quick'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--framework", "taylr"), 1, "'taylor'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--max-drop", "much"), 2, "a percentage such as"),
        (("compress", "--model", "x", "--data", "nowhere", "--output", "x"), 1, "nowhere: there is no such file"),
        (("evaluate", "nowhere"), 1, "is no result"),
        (("predict", "nowhere", "image.jpg"), 1, "is no result"),
    ],
)
def test_a_typo_is_answered_with_what_is_allowed(words, code, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert hint in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_json_is_all_that_stdout_holds(compressed):
    folder, done = compressed
    assert json.loads(done.stdout) == json.loads((folder / "summary.json").read_text())
    assert "unpruned: accuracy" in done.stderr


def test_the_configuration_beside_the_result_repeats_the_run(compressed, tmp_path):
    folder, done = compressed
    again = invoke(
        "compress", "--config", folder / "config.yaml", "--output", tmp_path / "again", "--no-onnx", "--json"
    )
    assert again.exit_code == 0, again.output
    one, other = json.loads(done.stdout), json.loads(again.stdout)
    keys = ("verdict", "reference", "candidates", "test", "classes")
    for summary in (one, other):
        for row in (summary["reference"], *summary["candidates"], *summary["test"].values()):
            row.pop("latency_ms")
    assert [one[key] for key in keys] == [other[key] for key in keys]


def test_an_output_of_other_settings_is_refused_with_the_difference(compressed, photos):
    folder, _ = compressed
    before = (folder / "config.yaml").read_text()
    refused = compress_into(folder, photos, "--max-drop", "3%", "--epochs", 5)
    assert refused.exit_code == 1
    assert "max_drop: 0.02 -> 0.03" in refused.stderr
    assert "recipe.train.epochs: 4 -> 5" in refused.stderr
    assert (folder / "config.yaml").read_text() == before


def test_options_on_the_command_line_go_before_the_file(compressed, tmp_path):
    folder, _ = compressed
    words = ("compress", "--config", folder / "config.yaml", "--output", tmp_path / "x", "--dry-run", "--json")
    plan = json.loads(invoke(*words, "--target-params", "1k", "--epochs", 7).stdout)
    assert plan["goal"] == {"target_params": 1000}
    assert (plan["recipe"]["train"]["epochs"], plan["recipe"]["finetune"]["epochs"]) == (7, 7)
    assert json.loads(invoke(*words).stdout)["goal"] == {"max_drop": 0.02}


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    bad = {"modell": "x", "max_drop": "lots", "epochs": "three", "pretrained": 7}
    bad |= {"recipe": {"train": {"epoch": 3, "lr": "fast"}}, "search": {"framewrk": "basis"}}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert result.exit_code == 1
    assert "7 faults" in result.stderr
    for hint in ("'model'", "percentage", "a whole number", "true or false", "'epochs'", "a number", "'framework'"):
        assert hint in result.stderr


@pytest.mark.parametrize("text", ["- a list", "model: [", "just text"])
def test_a_file_that_is_no_configuration_is_refused(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert (result.exit_code, "bad.yaml" in result.stderr) == (1, True)


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--dry-run")
    assert result.exit_code == 0, result.output
    for word in (
        "parameters",
        "train: 78 images",
        "max_drop 0.01",
        "basis+taylor",
        "candidates",
        "time ",
        "report.html",
    ):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_fixed_ratios_need_no_budget(photos, tmp_path):
    result = compress_into(
        tmp_path / "out", photos, "--basis-ratio", "50%", "--no-onnx", "--framework", "basis", "--json"
    )
    assert result.exit_code == 0, result.output
    assert [row["basis_ratio"] for row in json.loads(result.stdout)["candidates"]] == [0.0, 0.5]
    both = compress_into(tmp_path / "out", photos, "--basis-ratio", "50%", "--max-drop", "1%")
    assert (both.exit_code, "leave one of them out" in both.stderr) == (1, True)


def test_no_report_is_announced_where_none_was_written(photos, tmp_path, monkeypatch):
    def missing(*_given):
        raise MissingExtraError("plotly", extra="report")

    monkeypatch.setattr("basisprune.runs.deliver.write_report", missing)
    result = compress_into(tmp_path / "out", photos, "--basis-ratio", "50%", "--no-onnx", "--epochs", 1)
    assert result.exit_code == 0, result.output
    assert "report.html is not written" in result.stderr
    assert "report.html" not in result.stdout


def test_a_file_names_options_as_they_are_typed(compressed, photos, tmp_path):
    folder, _ = compressed
    image = photos / "blue" / "2.png"
    (tmp_path / "json.yaml").write_text("json: true\ntop: 2\n")
    shown = invoke("predict", folder, image, "--config", tmp_path / "json.yaml")
    assert len(json.loads(shown.stdout)[0]["classes"]) == 2
    (tmp_path / "csv.yaml").write_text("csv: true\n")
    assert invoke("predict", folder, image, "--config", tmp_path / "csv.yaml").stdout.startswith("file,class")
    (tmp_path / "bad.yaml").write_text("as_json: true\nhelp: true\n")
    assert "2 faults" in invoke("predict", folder, image, "--config", tmp_path / "bad.yaml").stderr


def test_what_cannot_be_kept_to_has_an_exit_code_of_its_own(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--target-params", 1, "--no-onnx", "--epochs", 1)
    assert result.exit_code == 3, result.output
    assert "still larger than asked for" in result.stdout
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_a_class_folder_of_photos_is_predicted_from_every_form_of_a_result(compressed, photos):
    folder, _ = compressed
    answers = []
    for form in (folder, folder / "model", folder / "model.onnx"):
        result = invoke("predict", form, photos / "red", "--json")
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    assert len(answers[0]) == 40
    assert {answer["class"] for answer in answers[0]} == {"red"}
    shares = torch.tensor([[answer["probability"] for answer in given] for given in answers])
    assert torch.allclose(shares[0], shares[1], atol=1e-6)
    assert torch.allclose(shares[0], shares[2], atol=1e-3)


def test_an_image_that_cannot_be_read_spoils_nothing_for_the_others(compressed, photos, tmp_path):
    folder, _ = compressed
    (tmp_path / "broken.png").write_text("no image")
    result = invoke("predict", folder, photos / "blue" / "2.png", tmp_path / "broken.png", "nowhere.png")
    assert result.exit_code == 1
    assert re.fullmatch(r".*2\.png: blue [0-9.]+%\n", result.stdout)
    assert "broken.png: not an image" in result.stderr
    assert "nowhere.png: there is no such file" in result.stderr


def test_csv_has_a_row_for_each_class_named(compressed, photos):
    folder, _ = compressed
    result = invoke("predict", folder, photos / "blue" / "2.png", "--top", 2, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert (len(rows), rows[0]["class"]) == (2, "blue")
    assert invoke("predict", folder, "x.png", "--csv", "--json").exit_code == 2


def test_a_folder_without_images_is_refused(compressed, tmp_path):
    result = invoke("predict", compressed[0], tmp_path)
    assert (result.exit_code, "holds no image" in result.stderr) == (1, True)


def test_evaluating_a_result_gives_the_accuracy_of_its_summary(compressed, photos):
    folder, done = compressed
    expected = json.loads(done.stdout)
    found = json.loads(invoke("evaluate", folder, "--json").stdout)
    assert (found["part"], found["images"]) == ("test", 12)
    assert found["accuracy"] == pytest.approx(expected["test"]["after"]["accuracy"])
    assert found["interval"] == pytest.approx(expected["test"]["after"]["interval"])
    assert "with 95 % confidence" in invoke("evaluate", folder).stdout


def test_every_form_of_a_result_is_judged_by_the_images_that_its_run_held_out(compressed, photos, tmp_path):
    folder, done = compressed
    known = json.loads(done.stdout)
    after, int8 = known["test"]["after"]["accuracy"], known["files"]["model.int8.onnx"]["accuracy"]
    for form, accuracy in (("model", after), ("model.onnx", after), ("model.int8.onnx", int8)):
        for more in ((), ("--data", f"{photos}/"), ("--data", photos / "red" / "..", "--part", "test")):
            found = json.loads(invoke("evaluate", folder / form, *more, "--json").stdout)
            assert (found["part"], found["images"]) == ("test", 12)
            assert found["accuracy"] == pytest.approx(accuracy)
    moved = tmp_path / "model.onnx"
    moved.write_bytes((folder / "model.onnx").read_bytes())
    assert json.loads(invoke("evaluate", moved, "--data", photos, "--json").stdout)["part"] == "all"
    for part in ("train", "val", "test"):
        refused = invoke("evaluate", moved, "--data", photos, "--part", part)
        assert (refused.exit_code, "held out is unknown" in refused.stderr) == (1, True)
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        (tmp_path / "split" / name).symlink_to(photos)
    whole = invoke("evaluate", moved, "--data", tmp_path / "split", "--part", "test", "--json")
    assert json.loads(whole.stdout)["images"] == 120  # the data says itself which are its test images


def test_evaluating_on_classes_that_the_model_does_not_know_is_refused(compressed, photos, tmp_path):
    for name in ("red", "violet"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 16)).save(tmp_path / name / "1.png")
    result = invoke("evaluate", compressed[0], "--data", tmp_path)
    assert (result.exit_code, "'violet'" in result.stderr) == (1, True)


def test_inspecting_a_result_lists_its_layers_and_ranks(compressed):
    folder, done = compressed
    report = json.loads(invoke("inspect", folder, "--json").stdout)
    after = json.loads(done.stdout)["test"]["after"]
    assert (report["parameters"], report["macs"]) == (after["parameters"], after["macs"])
    assert [layer["name"] for layer in report["layers"]] == ["backbone.0", "backbone.3", "classifier"]
    assert sum(layer["parameters"] for layer in report["layers"]) == report["parameters"]
    assert "ONNX file" in invoke("inspect", folder / "model.onnx").stderr


def test_inspecting_a_model_by_name_can_measure_its_latency(monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.runtime.has_onnx", lambda: False)
    result = invoke("inspect", "tiny:tiny_backbone", "--size", 16, "--latency")
    assert result.exit_code == 0, result.output
    assert "onnxruntime" not in result.stdout
    assert "backbone.0" in result.stdout
    assert "eager, batch 32" in result.stdout


def test_a_trained_model_can_be_used_and_compressed(photos, tmp_path):
    start = ("--data", photos, "--size", 16, "--epochs", 6)
    result = invoke("train", "--model", "tiny:tiny_backbone", *start, "--output", tmp_path / "trained", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["test"]["accuracy"] > 0.5
    assert len(summary["history"]) == 6
    assert json.loads(invoke("evaluate", tmp_path / "trained", "--json").stdout)["accuracy"] == pytest.approx(
        summary["test"]["accuracy"]
    )
    again = invoke("train", "--config", tmp_path / "trained" / "config.yaml", "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    small = tmp_path / "small"
    words = ("--model", tmp_path / "trained" / "model", *start, "--output", small, "--basis-ratio", "0.5", "--no-onnx")
    assert invoke("compress", *words).exit_code == 0
    other = ("compress", *words, "--size", 32, "--output", tmp_path / "y")
    assert "the model takes 16x16 images" in invoke(*other).stderr
    assert not (tmp_path / "y").exists()
    folded = invoke("compress", "--model", small / "model", *start, "--output", tmp_path / "x")
    assert (folded.exit_code, "folded" in folded.stderr) == (1, True)


def test_a_training_goes_on_only_with_its_own_images(photos, tmp_path):
    copied = shutil.copytree(photos, tmp_path / "photos")
    words = ("train", "--model", "tiny:tiny_backbone", "--data", copied, "--size", 16, "--epochs", 1)
    for _ in range(2):
        assert invoke(*words, "--output", tmp_path / "out").exit_code == 0
    before = (tmp_path / "out" / "summary.json").read_bytes()
    for file in copied.rglob("*.png"):
        Image.new("RGB", (16, 16)).save(file)
    refused = invoke(*words, "--output", tmp_path / "out")
    assert (refused.exit_code, "images" in refused.stderr) == (1, True)
    assert (tmp_path / "out" / "summary.json").read_bytes() == before
    without = (*words, "--val-fraction", 0, "--output", tmp_path / "other")
    assert invoke(*without).exit_code == 0


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setattr(basisprune.demo, "demo_model", lambda input_size: tiny_model())
    monkeypatch.setattr(basisprune.demo, "demo_data", lambda: load_data(tiny_images(90), val_fraction=0.2))
    monkeypatch.setattr(basisprune.demo, "demo_recipe", lambda: RECIPES["quick"])
    monkeypatch.setattr("basisprune.runs.deliver.has_onnx", lambda: False)


def test_the_demo_ends_with_a_table_and_files_that_can_be_used(tiny_demo, tmp_path):
    result = invoke("demo", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    for word in ("before", "test accuracy", "parameters", "multiply-adds", "file size", "latency", "report.html"):
        assert word in result.stdout
    assert f"next: basisprune predict {tmp_path / 'run'} {tmp_path / 'run' / 'digits'}" in result.stdout
    predicted = invoke("predict", tmp_path / "run", tmp_path / "run" / "digits", "--json")
    assert len(json.loads(predicted.stdout)) == 3
    assert (tmp_path / "run" / "config.yaml").read_text().startswith("model: ")  # no command repeats it from there
    refused = invoke("evaluate", tmp_path / "run")
    assert (refused.exit_code, "handwritten digits', the run's data" in refused.stderr) == (1, True)
    assert "pass --data" in refused.stderr
    again = invoke("demo", "--output", tmp_path / "run")
    keys = ("test accuracy", "parameters", "multiply-adds")
    rows = [[line.split() for line in run.stdout.splitlines() if line.startswith(keys)] for run in (result, again)]
    assert rows[0] == rows[1]


def test_an_error_is_told_without_a_traceback(tiny_demo, tmp_path, monkeypatch):
    def missing(**_settings):
        raise MissingExtraError("mlxtend", extra="demo")

    monkeypatch.setattr(basisprune.demo, "demo_data", missing)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "basisprune[demo]" in result.stderr


def test_ctrl_c_is_an_exit_code(tiny_demo, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(basisprune.demo, "demo_data", stop)
    result = invoke("demo", "--output", tmp_path)
    assert (result.exit_code, "again to go on" in result.stderr) == (130, True)
