"""Laws of `basisprune compress`."""

from __future__ import annotations

import json

import pytest
import typer
from commands import compress_into, invoke
from summaries import summary as result_of

from basisprune.cli.compress import finish
from basisprune.errors import MissingExtraError
from basisprune.files import unsealed


def test_json_is_all_that_stdout_holds(compressed):
    folder, done = compressed
    assert json.loads(done.stdout) == unsealed((folder / "summary.json").read_bytes())
    assert "unpruned: accuracy" in done.stderr


def test_the_configuration_beside_the_result_repeats_the_run(compressed, tmp_path):
    folder, done = compressed
    again = invoke(
        *("compress", "--config", folder / "config.yaml", "--trust-code"),
        *("--output", tmp_path / "again", "--no-onnx", "--json"),
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
    words += ("--model", "tiny:tiny_backbone")  # code that a file names is imported if somebody types its name
    plan = json.loads(invoke(*words, "--target-params", "1k", "--epochs", 7).stdout)
    assert plan["goal"] == {"target_params": 1000}
    assert (plan["recipe"]["train"]["epochs"], plan["recipe"]["finetune"]["epochs"]) == (7, 7)
    assert json.loads(invoke(*words).stdout)["goal"] == {"max_drop": 0.02}


@pytest.mark.parametrize("more", [(), ("--no-keep-head",)])
def test_a_flag_of_a_file_is_overridden_by_its_other_form(more, tmp_path):
    (tmp_path / "mine.yaml").write_text("keep_head: true\ntune_first: true\ndata: nowhere\nmodel: resnet18\n")
    done = invoke("compress", "--config", tmp_path / "mine.yaml", "--output", tmp_path / "out", *more)
    assert (done.exit_code, "--tune-first: given without --keep-head" in done.stderr) == (1, bool(more))


def test_a_budget_that_is_only_estimated_to_be_kept_fails_where_a_certificate_is_required(photos, tmp_path):
    words = ("--max-drop", "2%", "--no-onnx", "--framework", "basis", "--confidence", "90%", "--require-certified")
    result = compress_into(tmp_path / "out", photos, *words, "--json")
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["kept_to_budget"]) == (3, True)
    assert (summary["certificate"]["status"], summary["certificate"]["confidence"]) == ("estimated", 0.9)
    assert "estimated, not certified" in summary["verdict"]


def test_an_unknown_metric_and_a_strange_confidence_are_told_at_once(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--metric", "f1", "--confidence", "20%")
    assert result.exit_code == 1
    assert "allowed are accuracy, balanced, macro-f1, worst-class" in result.stderr
    assert "0.5 <= confidence < 1" in result.stderr


def test_fixed_ratios_need_no_budget(photos, tmp_path):
    result = compress_into(
        tmp_path / "out", photos, "--basis-ratio", "50%", "--no-onnx", "--framework", "basis", "--json"
    )
    assert result.exit_code == 0, result.output
    assert [row["basis_ratio"] for row in json.loads(result.stdout)["candidates"]] == [0.0, 0.5]
    both = compress_into(tmp_path / "out", photos, "--basis-ratio", "50%", "--max-drop", "1%")
    assert (both.exit_code, "pass one budget" in both.stderr) == (1, True)


def test_no_report_is_announced_where_none_was_written(photos, tmp_path, monkeypatch):
    def missing(*_given):
        raise MissingExtraError("plotly", extra="report")

    monkeypatch.setattr("basisprune.runs.deliver.write_report", missing)
    result = compress_into(tmp_path / "out", photos, "--basis-ratio", "50%", "--no-onnx", "--epochs", 1)
    assert result.exit_code == 0, result.output
    assert "report.html is not written" in result.stderr
    assert "report.html" not in result.stdout


def test_what_cannot_be_kept_to_has_an_exit_code_of_its_own(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--target-params", 1, "--no-onnx", "--epochs", 1)
    assert result.exit_code == 3, result.output
    assert "still larger than requested" in result.stdout
    assert (tmp_path / "out" / "model" / "config.json").exists()


@pytest.mark.parametrize("files", [{}, {"model.onnx": {"bytes": 1, "what": "for ONNX Runtime"}}])
def test_a_run_without_a_file_to_use_has_the_exit_code_of_a_result_that_is_missing(tmp_path, capsys, files):
    found = result_of(files=files, not_written={"model": "it cannot be traced"}, verdict="No file. The rest.")
    if files:
        finish(found, tmp_path, as_json=False)
    else:
        with pytest.raises(typer.Exit) as error:
            finish(found, tmp_path, as_json=False)
        assert error.value.exit_code == 3
    assert ("predict" in capsys.readouterr().out) == bool(files)
