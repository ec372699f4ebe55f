"""Laws of exporting a result: which images may judge it, and what its summary says of a file that was replaced."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import onnx
import pytest
import torch
from onnx import helper
from summaries import summary
from tiny import NAMES, Notes, tiny_model

from basisprune.budget.certify import Certificate, Test
from basisprune.callback import NullCallback
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.latency import Latency
from basisprune.files import digest, sealed
from basisprune.results import DeliveredFile, RunSummary, RuntimeRow
from basisprune.runs.export import ExportOptions, _may_judge, _note, _Work
from basisprune.runs.finished import load_any

CERTIFIED = Certificate("certified", 0.95, "accuracy", 1000, "")
FOUND = summary(files={}, runtimes=[], headline="90% removed, certified: a loss of at most 1 point")
PYTORCH = RuntimeRow("eager", "PyTorch", "", 8, 1.0, 0.1, 1)


def test_images_that_a_run_has_yet_to_look_at_do_not_judge_an_export(tmp_path):
    path = tmp_path / "summary.json"
    assert _may_judge(tmp_path) == ("val", "train")  # it is not finished
    path.write_text("of train")
    assert _may_judge(tmp_path) == ("test", "val", "train")
    for certificate, interrupted, parts in (
        (CERTIFIED, False, ("test", "confirm", "val", "train")),
        (CERTIFIED, True, ("val", "train")),
        (None, False, ("test", "val", "train")),
        (None, True, ("val", "train")),
    ):
        replace(FOUND, certificate=certificate, interrupted=interrupted).write(path)
        assert _may_judge(tmp_path) == parts


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("name", ["model.onnx", "model.int8.onnx"])
def test_a_file_written_over_a_tested_one_is_estimated_and_keeps_its_fault(tmp_path, name, changed):
    passed = Test(3, "file", 0.95, 0.95, 0.01, 0.01, 1, 1, True)
    old = DeliveredFile(3, "a file", sha256=digest(b"old"), test=passed, promise="certified")
    found = replace(FOUND, files={name: old}, certificate=CERTIFIED, require_certified=True)
    assert found.fulfilled
    found.write(tmp_path / "summary.json")
    (tmp_path / name).write_bytes(b"new" if changed else b"old")
    _note(tmp_path, (RuntimeRow("onnx", "ONNX", name, 3, 1.0, 0.1, 1), PYTORCH), NullCallback())
    noted = RunSummary.read(tmp_path / "summary.json")
    if not changed:
        assert (noted.files, noted.verdict, noted.headline) == (found.files, found.verdict, found.headline)
        return
    about = noted.files[name]
    assert (about.promise, about.test, about.exported, noted.fulfilled) == ("estimated", None, True, False)
    assert f"{name} is estimated, not certified." in noted.verdict
    assert noted.headline.endswith(f"; {name} is not")
    assert noted.headline in (tmp_path / "report.html").read_text()
    faulty = replace(found, files={name: replace(old, promise="estimated", fault="it is bad")}, require_certified=False)
    faulty.write(tmp_path / "summary.json")
    _note(tmp_path, (RuntimeRow("onnx", "ONNX", name, 3, 1.0, 0.1, 1), PYTORCH), NullCallback())
    noted = RunSummary.read(tmp_path / "summary.json")
    assert (noted.files[name].fault, noted.fulfilled) == ("it is bad", False)


def test_files_for_other_runtimes_promise_nothing(tmp_path):
    replace(FOUND, certificate=CERTIFIED, require_certified=True).write(tmp_path / "summary.json")
    (tmp_path / "model.pt2").write_bytes(b"new")
    _note(tmp_path, (RuntimeRow("torch", "torch.export", "model.pt2", 3, 1.0, 0.1, 1), PYTORCH), NullCallback())
    noted = RunSummary.read(tmp_path / "summary.json")
    assert (noted.files["model.pt2"].promise, noted.fulfilled, noted.verdict) == (None, True, FOUND.verdict)


def test_only_files_of_data_that_run_in_bounds_are_measured_beside_the_one_just_written(forms, tmp_path, monkeypatch):
    save_pretrained(tiny_model(), tmp_path / "model", classes=NAMES)
    proto = onnx.load(forms / "pixels.onnx")
    last = next(node for node in proto.graph.node if "scores" in node.output)
    last.output[list(last.output).index("scores")] = "sound"
    shape = helper.make_node("Constant", [], ["shape"], value_ints=[1 << 33])
    large = [
        helper.make_node("ConstantOfShape", ["shape"], ["large"]),
        helper.make_node("ReduceSum", ["large"], ["zero"]),
    ]
    proto.graph.node.extend([shape, *large, helper.make_node("Add", ["sound", "zero"], ["scores"])])
    onnx.save(proto, tmp_path / "model" / "model.onnx")
    monkeypatch.setattr(torch.export, "load", lambda *args: pytest.fail("a program of somebody else was loaded"))
    (tmp_path / "model" / "model.pt2").write_bytes(b"anybody's")
    heard = Notes()
    work = _Work(load_any(tmp_path / "model"), ExportOptions(), tmp_path / "model", heard)
    rows: list[str] = []
    monkeypatch.setattr(work, "_row", lambda runtime, path, time: rows.append(path.name))
    monkeypatch.setattr(
        "basisprune.runs.export.file_latencies",
        lambda files, model: [Latency(name, "", 1, 1.0, 0.0, 1.0) for name in (*files, "PyTorch")],
    )
    work.rows(RUNTIMES["openvino"])
    assert rows == []
    assert any("not measured" in line and "model.onnx" in line for line in heard.lines)
    onnx.save(onnx.load(forms / "pixels.onnx"), tmp_path / "model" / "model.onnx")
    work.rows(RUNTIMES["openvino"])
    assert rows == ["model.onnx"]


@pytest.mark.parametrize("number", range(12))
def test_the_summary_of_a_stranger_ends_no_export(number, tmp_path):
    values = json.loads(FOUND.to_json())
    draw, keys = random.Random(number), list(values)
    for key in draw.sample(keys, 6):
        values[key] = draw.choice([None, [], {}, -1, 1e300, "", values[draw.choice(keys)]])
    (tmp_path / "summary.json").write_text(sealed(json.dumps(values)))
    (tmp_path / "model.pt2").write_bytes(b"new")
    _note(tmp_path, (RuntimeRow("torch", "torch.export", "model.pt2", 3, 1.0, 0.1, 1), PYTORCH), NullCallback())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, ValueError, TypeError, AttributeError, IndexError])
def test_a_summary_that_no_report_can_be_made_of_is_left_alone(error, tmp_path, monkeypatch):
    FOUND.write(tmp_path / "summary.json")
    before, said = (tmp_path / "summary.json").read_bytes(), []

    def failing(*_args: object) -> None:
        raise error("odd")

    monkeypatch.setattr("basisprune.runs.export.write_report", failing)
    hearer = NullCallback()
    hearer.log = said.append
    _note(tmp_path, (PYTORCH,), hearer)
    assert (tmp_path / "summary.json").read_bytes() == before
    assert "does not make sense" in said[0]
