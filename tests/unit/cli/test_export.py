"""Laws of `basisprune export`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from bundles import content
from commands import invoke

from basisprune.data.manifest import read_manifest
from basisprune.results import RunSummary


@pytest.fixture
def result(compressed, tmp_path):
    """A finished run of one's own."""
    return shutil.copytree(compressed[0], tmp_path / "out")


def test_an_export_is_checked_judged_timed_and_noted_beside_the_others(result, compressed):
    known = json.loads(compressed[1].stdout)
    before = set(content(result))
    done = invoke("export", result, "--to", "openvino", "--int8", "--json")
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["onnx", "onnx int8", "openvino", "openvino int8", "eager"]
    assert set(content(result)) - before == {f"model{kind}.{end}" for kind in ("", ".int8") for end in ("xml", "bin")}
    for name in ("onnx", "openvino", "eager"):
        assert rows[name]["accuracy"] == pytest.approx(known["test"]["after"]["accuracy"])
        assert (rows[name]["images"], rows[name]["compared"]) == (12, 64)
        assert rows[name]["difference"] <= 1e-4
    assert rows["onnx int8"]["accuracy"] == pytest.approx(known["files"]["model.int8.onnx"]["accuracy"])
    assert all(row["latency_ms"] > 0 and row["threads"] == 1 for row in rows.values())
    summary = RunSummary.read(result / "summary.json")
    assert [row.name for row in summary.runtimes] == list(rows)
    assert summary.files["model.xml"].sha256
    assert summary.files["model.onnx"] == RunSummary.read(compressed[0] / "summary.json").files["model.onnx"]
    assert 'id="runtime-table"' in (result / "report.html").read_text()
    judged = json.loads(invoke("evaluate", result / "model.xml", "--json").stdout)
    assert (judged["part"], judged["accuracy"]) == ("test", pytest.approx(rows["openvino"]["accuracy"]))
    again = invoke("export", result, "--to", "openvino")
    assert (again.exit_code, "exists already" in again.stderr, "--overwrite" in again.stderr) == (1, True, True)
    (result / "model.bin").write_bytes(b"\0" * 10)
    damaged = invoke("evaluate", result / "model.xml")
    assert (damaged.exit_code, "model.bin: is damaged" in damaged.stderr) == (1, True)


def test_a_bundle_without_its_images_is_compared_on_random_ones(result, photos, tmp_path):
    bundle = shutil.copytree(result / "model", tmp_path / "bundle")
    done = invoke("export", bundle, "--to", "torch", "--output", tmp_path / "new")
    assert (done.exit_code, "random ones" in done.stderr) == (0, True), done.output
    assert set(content(tmp_path / "new")) == {"model.pt2"}
    head, _, first, second = done.stdout.splitlines()
    assert head.split() == ["runtime", "file", "size", "difference", "accuracy", "one", "image"]
    assert [line.split()[0] for line in (first, second)] == ["torch.export", "PyTorch"]
    done = invoke("export", bundle, "--to", "torch", "--data", photos, "--json")
    assert [row["images"] for row in json.loads(done.stdout)] == [120, 120]
    assert (bundle / "model.pt2").is_file()


def test_the_test_images_of_a_run_that_was_stopped_are_not_looked_at(result):
    known = RunSummary.read(result / "summary.json")
    replace(known, interrupted=True).write(result / "summary.json")
    parts = read_manifest(result / "images.json").parts
    done = invoke("export", result, "--to", "torch", "--json")
    assert done.exit_code == 0, done.output
    assert {row["images"] for row in json.loads(done.stdout)} == {len(parts["val"])} != {len(parts["test"])}


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(result, photos, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    for words, said in (
        ((result, "--to", "opnvino"), "Did you mean 'openvino'?"),
        ((result, "--to", "torch", "--int8"), "the runtimes that have it are onnx, openvino"),
        ((tmp_path / "empty", "--to", "torch"), "is not a result"),
        ((tmp_path / "nothing", "--to", "torch"), "does not exist"),
        ((result / "model.onnx", "--to", "torch"), "is an exported file already"),
        ((result, "--to", "onnx"), "model.onnx: exists already"),
        ((result, "--to", "torch", "--data", tmp_path / "nowhere"), "nowhere"),
        ((result, "--to", "torch", "--output", result / "summary.json"), "is a file; name a folder"),
    ):
        done = invoke("export", *words)
        assert (done.exit_code, said in done.stderr) == (1, True), (words, done.stderr)
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda package: None)
    done = invoke("export", result, "--to", "executorch")
    assert (done.exit_code, "pip install 'basisprune[executorch]'" in done.stderr) == (1, True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("setting", ["overwrite: true", "output: elsewhere", "result: other"])
def test_a_file_says_neither_where_an_export_goes_nor_what_it_replaces(result, setting, tmp_path):
    (tmp_path / "c.yaml").write_text(f"{setting}\n")
    before = content(tmp_path)
    words = () if "result" in setting else (result,)
    done = invoke("export", *words, "--to", "onnx", "--config", tmp_path / "c.yaml")
    assert (done.exit_code, "only the command line may" in done.stderr) == (1, True), done.stderr
    assert content(tmp_path) == before
