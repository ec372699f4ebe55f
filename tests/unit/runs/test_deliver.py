"""Laws of delivery: the folder holds what the summary says, and nothing of what was there before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from summaries import summary
from tiny import NAMES, Notes, tiny_images, tiny_model
from torch import Tensor, nn

import basisprune.runs.deliver
from basisprune.budget import Budget
from basisprune.budget.certify import Certificate, Guarantee, Test
from basisprune.callback import NullCallback
from basisprune.data import Splits, load_data
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.comparing import difference
from basisprune.deploy.export.onnx import Quantised
from basisprune.deploy.fold import deploy
from basisprune.errors import MissingExtraError, ModelError
from basisprune.files import digest
from basisprune.method.states import State
from basisprune.results import DeliveredFile, RunSummary, RuntimeRow
from basisprune.runs.certify import Files
from basisprune.runs.deliver import Compressed, promise_of, with_files
from basisprune.runs.deliver import deliver as deliver_result
from basisprune.runs.exporter import Exporter, Int8Export
from basisprune.runs.finished import load_any
from basisprune.search.candidates import Evaluated, SearchResult

FOUND = summary(classes=list(NAMES), latency=None, files={}, runtimes=[])


class RefusalNotes(Notes):
    """Finds what was refused."""

    def refused(self) -> list[str]:
        return [line for line in self.lines if "is not written" in line]


@dataclass(frozen=True)
class Delivery:
    """A result with the options of its delivery."""

    result: Compressed
    onnx: bool | None = None
    int8: bool = False

    @property
    def model(self) -> nn.Module:
        return self.result.model

    @property
    def exporter(self) -> Exporter:
        return Exporter(self.result.data)


def delivery(model: nn.Module | None = None, *, onnx: bool | None = None, int8: bool = False, **given) -> Delivery:
    network = tiny_model()
    small = deploy(network, network.input_spec, NAMES) if model is None else model
    images = load_data(tiny_images(60))
    parts = Splits(images.train, images.val, images.test, NAMES)
    found = SearchResult((Evaluated(None, State((), network), small),), 0)
    return Delivery(Compressed(FOUND, found, parts, **given), onnx, int8)


def deliver(summary: RunSummary, given: Delivery, folder, callback) -> RunSummary:
    result = replace(given.result, summary=summary)
    return deliver_result(result, folder, callback, onnx=given.onnx, int8=given.int8)


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def without_onnx(monkeypatch):
    monkeypatch.setattr(basisprune.runs.deliver, "has_onnx", lambda: False)


def test_the_folder_holds_the_files_of_the_summary_and_the_summary_itself(tmp_path):
    found = deliver(FOUND, delivery(onnx=True, int8=True), tmp_path / "deep" / "out", NullCallback())
    folder = tmp_path / "deep" / "out"
    assert names(folder) == {*found.files, "report.html", "summary.json"}
    assert list(found.files) == ["model", "model.onnx", "model.int8.onnx"]
    assert RunSummary.read(folder / "summary.json") == found
    for name in ("model.onnx", "model.int8.onnx"):
        assert found.files[name].bytes == (folder / name).stat().st_size
    assert [file.accuracy is None for file in found.files.values()] == [True, True, False]
    assert {row.model for row in found.latency.rows} == {"before", "after"}
    bundle = load_bundle(folder / "model")
    assert (bundle.classes, bundle.metrics["verdict"]) == (NAMES, FOUND.verdict)
    assert bundle.metrics["validation"]["accuracy"] == FOUND.chosen.accuracy
    assert torch.equal(bundle.model(torch.ones(1, 3, 16, 16)), delivery().model(torch.ones(1, 3, 16, 16)))


@pytest.mark.usefixtures("without_onnx")
def test_what_an_earlier_start_delivered_is_gone_and_what_is_missing_is_told(tmp_path):
    for name in ("model.onnx", "model.int8.onnx", "summary.json", "mine.txt"):
        (tmp_path / name).write_text("old")
    notes = RefusalNotes()
    found = deliver(FOUND, delivery(int8=True), tmp_path, notes)
    assert names(tmp_path) == {"model", "report.html", "summary.json", "mine.txt"}
    assert list(found.files) == ["model"]
    assert [line.split()[0] for line in notes.refused()] == ["model.onnx", "model.int8.onnx"]
    assert "basisprune[onnx]" in notes.refused()[0]


@pytest.mark.usefixtures("without_onnx")
def test_a_report_that_needs_an_extra_is_left_out_and_the_summary_is_written(tmp_path, monkeypatch):
    def missing(*_given):
        raise MissingExtraError("plotly", extra="report")

    monkeypatch.setattr(basisprune.runs.deliver, "write_report", missing)
    notes = RefusalNotes()
    deliver(FOUND, delivery(onnx=False), tmp_path, notes)
    assert names(tmp_path) == {"model", "summary.json"}
    assert "basisprune[report]" in notes.refused()[0]


@pytest.mark.usefixtures("without_onnx")
def test_the_summary_vouches_for_the_rest_and_is_written_last(tmp_path, monkeypatch):
    deliver(FOUND, delivery(onnx=False), tmp_path, NullCallback())
    monkeypatch.setattr(basisprune.runs.deliver, "write_report", lambda *_given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        deliver(FOUND, delivery(onnx=False), tmp_path, NullCallback())
    assert names(tmp_path) == {"model", "report.html"}  # the old page stays until there is a new one


@pytest.mark.usefixtures("without_onnx")
def test_a_form_that_the_model_cannot_take_is_left_out(tmp_path, monkeypatch):
    def refuse(*_given, **_options):
        raise ModelError("no")

    monkeypatch.setattr(basisprune.runs.deliver, "save_pretrained", refuse)
    notes = RefusalNotes()
    assert deliver(FOUND, delivery(onnx=False), tmp_path, notes).files == {}
    assert notes.refused() == ["model is not written: no"]


def test_a_damaged_onnx_file_is_noticed_by_the_summary_and_by_the_bundle(tmp_path):
    found = deliver(FOUND, delivery(onnx=True), tmp_path, NullCallback())
    path = tmp_path / "model.onnx"
    whole, sums = path.read_bytes(), load_bundle(tmp_path / "model").metrics["sha256"]
    assert found.files["model.onnx"].sha256 == sums["model.onnx"] == digest(whole)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1  # in a weight, which ONNX Runtime would take as it is
    for beside in ("summary.json", "model"):
        path.write_bytes(whole)
        assert load_any(path).classes == NAMES
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.onnx: is damaged or was changed: its checksum"):
            load_any(path)
        if beside == "summary.json":
            (tmp_path / beside).unlink()  # the bundle is still there


def test_exports_stay_when_the_same_network_is_delivered_again_and_go_with_another(tmp_path):
    deliver(FOUND, delivery(onnx=False), tmp_path, NullCallback())
    (tmp_path / "model.pt2").write_text("exported")
    known = RunSummary.read(tmp_path / "summary.json")
    rows = [RuntimeRow("torch", "torch.export", "model.pt2", 8, 1.0, 0.1, 1), RuntimeRow("eager", "", "", 8, 1, 0.1, 1)]
    files = {**known.files, "model.pt2": DeliveredFile(8, "for torch")}
    replace(known, runtimes=tuple(rows), files=files).write(tmp_path / "summary.json")
    again = deliver(FOUND, delivery(onnx=False), tmp_path, NullCallback())
    assert (list(again.files), again.runtimes) == (["model", "model.pt2"], tuple(rows))
    assert (tmp_path / "model.pt2").read_text() == "exported"
    other = delivery(onnx=False)
    next(other.model.parameters()).data += 1
    notes = RefusalNotes()
    found = deliver(FOUND, other, tmp_path, notes)
    assert (list(found.files), found.runtimes) == (["model"], ())
    assert names(tmp_path) == {"model", "report.html", "summary.json"}
    assert [line.split(":")[0] for line in notes.lines if "removed" in line] == ["removed model.pt2"]


@pytest.mark.parametrize(("same", "fails"), [(True, "rounds"), (False, "save_pretrained"), (False, "rounds")])
def test_exports_outlive_a_start_that_is_killed_while_it_delivers(tmp_path, monkeypatch, same, fails):
    deliver(FOUND, delivery(onnx=False), tmp_path, NullCallback())
    for name in ("model.pt2", "model.int8.onnx"):
        (tmp_path / name).write_text("exported")
    known = RunSummary.read(tmp_path / "summary.json")
    files = {name: DeliveredFile(8, "", exported=True) for name in ("model.pt2", "model.int8.onnx")}
    replace(known, files={**known.files, **files}).write(tmp_path / "summary.json")
    given = delivery(onnx=False)
    if not same:
        next(given.model.parameters()).data += 1
    with monkeypatch.context() as patched:
        patched.setattr(basisprune.runs.deliver, fails, lambda *_given, **_options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            deliver(FOUND, given, tmp_path, NullCallback())
    assert not (tmp_path / "summary.json").exists()
    found = deliver(FOUND, given, tmp_path, NullCallback())
    assert sorted(found.files) == (["model", "model.int8.onnx", "model.pt2"] if same else ["model"])
    assert names(tmp_path) == {*found.files, "report.html", "summary.json"}
    if same:
        assert found.files["model.pt2"].sha256 == digest(b"exported")


def test_an_int8_file_that_was_exported_stays_and_one_of_the_run_goes_if_it_is_not_asked_for(tmp_path):
    found = replace(FOUND, certificate=certificate())
    certified = delivery(onnx=False, files=Files(certified=frozenset(["model.onnx"])))
    for exported in (True, False):
        known = deliver(found, certified, tmp_path, NullCallback())
        (tmp_path / "model.int8.onnx").write_text("small")
        small = DeliveredFile(5, "small", sha256=digest(b"small"), promise="estimated", exported=exported)
        replace(known, files={**known.files, "model.int8.onnx": small}).write(tmp_path / "summary.json")
        notes = RefusalNotes()
        again = deliver(found, certified, tmp_path, notes)
        assert ("model.int8.onnx" in again.files) == (tmp_path / "model.int8.onnx").exists() == exported
        assert any("removed model.int8.onnx" in line for line in notes.lines) != exported
        metrics = load_bundle(tmp_path / "model").metrics
        assert metrics["verdict"] == again.verdict
        assert ("model.int8.onnx is estimated" in again.verdict) == exported
        assert metrics.get("sha256", {}) == ({"model.int8.onnx": small.sha256} if exported else {})


def test_latency_is_that_of_the_delivered_file_first(tmp_path, monkeypatch):
    timed = []
    real = basisprune.runs.deliver.file_latencies

    def recorded(files, *given, **options):
        timed.append((tmp_path / "model.onnx").samefile(files["after"][1]))
        return real(files, *given, **options)

    monkeypatch.setattr(basisprune.runs.deliver, "file_latencies", recorded)
    found = deliver(FOUND, delivery(onnx=True), tmp_path, NullCallback())
    assert timed == [True]
    assert [row.backend for row in found.latency.rows] == ["onnxruntime"] * 4 + ["eager"] * 4
    assert {row.batch_size for row in found.latency.rows} == {1, 32}


def certificate(status: str = "certified") -> Certificate:
    return Certificate(status, 0.95, "accuracy", 1000, "" if status == "certified" else "so it is")


def broken() -> Int8Export:
    """An int8 file that loses ten points on the validation images."""
    return Int8Export(Quantised(12, 24, accepted=False), "accuracy on the validation images is 85.0%, and 95.0% before")


@pytest.mark.parametrize("tested", [True, False])
def test_an_int8_file_that_breaks_the_budget_is_told_everywhere(tmp_path, tested, monkeypatch):
    """Whether it was made for the tests or, where nothing confirms, only now."""
    given = delivery(onnx=True, int8=True, guarantee=Guarantee(Budget(max_drop=0.01)))
    quantise = Exporter.quantise

    def spoilt(self: Exporter, source, target, reference, _standard) -> Int8Export:
        quantise(self, source, target, reference, None)
        return broken()

    monkeypatch.setattr(Exporter, "quantise", spoilt)
    if tested:
        source, small = tmp_path / "a.onnx", tmp_path / "b.onnx"
        given.exporter.export(given.model, source)
        made = given.exporter.quantise(source, small, given.model, None)
        files = Files(source.read_bytes(), small.read_bytes(), made, certified=frozenset(["model.onnx"]))
        given = replace(given, result=replace(given.result, files=files))
    notes, found = RefusalNotes(), replace(FOUND, certificate=certificate("certified" if tested else "estimated"))
    result = deliver(found, given, tmp_path / "out", notes)
    small = result.files["model.int8.onnx"]
    assert (small.promise, result.files["model.onnx"].promise) == ("estimated", result.certificate.status)
    assert "breaks the budget even with 12 of 24 layers in float: accuracy on the validation images is" in small.fault
    assert not result.fulfilled
    assert "Warning: model.int8.onnx is not within the budget" in result.verdict
    assert any("model.int8.onnx: it breaks the budget" in line for line in notes.lines)
    assert "model.int8.onnx is not within the budget" in (tmp_path / "out" / "report.html").read_text()
    assert RunSummary.read(tmp_path / "out" / "summary.json") == result
    bundle = tmp_path / "out" / "model"
    assert load_bundle(bundle).metrics["verdict"] == result.verdict
    assert "Warning: model.int8.onnx is not within the budget" in (bundle / "README.md").read_text().replace("\\", "")


class Asking(nn.Module):
    """Adds its input again if that is a tensor, as far as `asks` can tell."""

    def __init__(self, asks) -> None:
        super().__init__()
        self.conv, self.head, self.asks = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, len(NAMES)), asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.head(torch.relu(y + x if self.asks(x) else y).mean((2, 3)))


def asking(asks, **options) -> Delivery:
    model = Asking(asks)
    model.input_spec = tiny_model().input_spec
    model = deploy(model, model.input_spec, NAMES)
    return delivery(model, onnx=False, **options)


def test_the_bundle_is_the_network_that_was_delivered_whatever_its_code_asks(tmp_path):
    given = asking(lambda x: isinstance(x, Tensor))
    assert deliver(FOUND, given, tmp_path, NullCallback()).files.keys() == {"model"}
    assert difference(given.model, load_bundle(tmp_path / "model").model, (3, 16, 16)) is None


def test_a_network_that_could_be_written_in_no_form_is_told_of_first_and_everywhere(tmp_path):
    for factory in (None, "tiny:tiny_backbone"):
        notes = RefusalNotes()
        found = deliver(FOUND, asking(lambda x: type(x) is Tensor, factory=factory), tmp_path, notes)
        assert (found.files, found.is_undelivered, found.fulfilled) == ({}, True, False)
        assert found.not_written.keys() == {"model", "model.onnx"}
        assert any(line.startswith("model is not written") for line in notes.refused())
        assert found.verdict.startswith("No deployable file could be written: ")
        assert found.headline.startswith("No deployable file")
        assert found.not_written["model"].rstrip(".") in found.verdict
        assert FOUND.verdict in found.verdict
        assert "--onnx" in found.verdict.partition("What would help: ")[2]
        assert ("package.module:function" in found.verdict.partition("What would help: ")[2]) == (factory is None)
        assert RunSummary.read(tmp_path / "summary.json") == found
        assert "No deployable file could be written" in (tmp_path / "report.html").read_text()


def test_a_bundle_alone_that_is_missing_is_told_of_and_the_run_gave_what_was_asked_for(tmp_path):
    found = deliver(FOUND, replace(asking(lambda x: x.stride(0) > 0), onnx=True), tmp_path, NullCallback())
    assert (found.files.keys(), found.is_undelivered, found.fulfilled) == ({"model.onnx"}, False, True)
    assert found.verdict.startswith(FOUND.verdict)
    assert "There is no bundle (model/) of this network: " in found.verdict


@pytest.mark.parametrize("onnx", [True, False])
def test_nothing_is_said_of_what_is_missing_where_there_is_a_bundle(tmp_path, onnx):
    found = deliver(FOUND, delivery(onnx=onnx), tmp_path, NullCallback())
    assert (found.verdict, found.is_undelivered, found.fulfilled) == (FOUND.verdict, False, True)


# ------------------------------------------------------------------------------------------- what is said

PRUNED = summary(files={}, runtimes=[], headline="90% removed, certified: a loss of at most 1 point")
CERTIFIED = Certificate("certified", 0.95, "accuracy", 1000, "")
FILES = ("model.onnx", "model.int8.onnx")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("passed", [True, False, None])
def test_the_verdict_tells_what_is_promised_of_an_onnx_file(passed, name):
    test = None if passed is None else Test(3, "file", 0.95, 0.9, 0.01, 0.01, 1, 1, passed)
    files = {name: DeliveredFile(1, "a file", test=test, promise="certified" if passed else "estimated")}
    found = replace(PRUNED, files=files, certificate=CERTIFIED, require_certified=True)
    said = {True: "", False: f" {name} is estimated, not certified: its test failed."}
    told = with_files(found, found.files)
    assert told.verdict == PRUNED.verdict + said.get(passed, f" {name} is estimated, not certified.")
    assert told.headline == PRUNED.headline + ("" if passed else f"; {name} is not")
    assert told.fulfilled == bool(passed)
    assert with_files(told, told.files) == told


def test_both_files_are_told_of_and_a_fault_even_where_all_is_estimated():
    files = {name: DeliveredFile(1, "a file", promise="estimated", fault="it is bad") for name in FILES}
    for certificate in (CERTIFIED, replace(CERTIFIED, status="estimated", reason="so it is")):
        told = with_files(replace(PRUNED, certificate=certificate), files)
        assert all(f"Warning: {name} is not within the budget: it is bad." in told.verdict for name in FILES)
        assert (told.headline == PRUNED.headline) == (not certificate.certified)
        assert with_files(told, told.files) == told


def test_a_verdict_that_is_the_headline_stays_so():
    files = {"model.int8.onnx": DeliveredFile(1, "a file", promise="estimated")}
    told = with_files(replace(PRUNED, headline=PRUNED.verdict, certificate=CERTIFIED), files)
    assert told.headline == told.verdict != PRUNED.verdict


def test_nothing_is_promised_without_a_certificate_of_the_unpruned_network_or_of_other_runtimes():
    assert promise_of("model.onnx", replace(PRUNED, certificate=None)) is None
    found = replace(PRUNED, certificate=CERTIFIED)
    assert promise_of("model.pt2", found) is None
    assert [promise_of("model.onnx", found, certified=each) for each in (True, False)] == ["certified", "estimated"]
    rows = tuple(replace(row, chosen=index == 0) for index, row in enumerate(found.candidates))
    unpruned = replace(found, candidates=rows)
    assert [promise_of(name, unpruned) for name in FILES] == [None, "estimated"]
