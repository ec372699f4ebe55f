"""Laws of certification in a run: what is expected of it, and what is delivered in each case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from summaries import summary as tiny_summary
from tiny import NAMES, tiny_images, tiny_model
from torch import nn

from basisprune.budget import Budget
from basisprune.budget.certify import Guarantee, Test
from basisprune.callback import NullCallback
from basisprune.data import ArrayImages, Splits
from basisprune.data.datasets import in_units
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.export.onnx import Quantised
from basisprune.errors import CheckpointError, ModelError, PlanError
from basisprune.method.states import Stage, State
from basisprune.recipes import DENSE, Step
from basisprune.runs import exporter
from basisprune.runs.certify import Certified, Certifier, certifiable_here
from basisprune.runs.exporter import Exporter, Int8Export
from basisprune.runs.record import TESTS, TESTS_MADE, FileTest, Tested, identity, read_tested, write_tested
from basisprune.search.candidates import Candidate, Evaluated, SearchResult, Size
from basisprune.tasks import Predictions

PROMISE = Guarantee(Budget(max_drop=0.01))


def splits(confirming: int | None) -> Splits:
    confirm = None
    if confirming is not None:
        confirm = ArrayImages(np.zeros((confirming, 1, 1), np.uint8), np.arange(confirming) % 2)
    return Splits(tiny_images(), tiny_images(), None, NAMES, confirm)


@pytest.mark.parametrize(
    ("promise", "confirming", "said"),
    [
        (PROMISE, None, ["no images are set aside", "an estimate"]),
        (
            PROMISE,
            400,
            ["400 confirming images and 5% differing answers, a loss of 1.9 points", "point needs about 3,199"],
        ),
        (PROMISE, 400, ["--val-fraction", "a looser budget, --confidence 80%"]),
        (PROMISE, 4000, ["a loss of 0.6 points can be certified with 95% confidence."]),
        (Guarantee(Budget(max_drop=0.0)), 400, ["0 points cannot be certified with any number"]),
        (Guarantee(Budget(max_drop=0.01), 0.8), 100, ["with 80% confidence", "a looser budget."]),
        (Guarantee(Budget(min_accuracy=0.9)), 400, ["tested with 95% confidence on 400 images"]),
        (Guarantee(Budget(min_accuracy=0.9)), 20, ["20 confirming images are too few"]),
        (Guarantee(Budget(max_drop=0.01), metric="worst-class"), 100, ["100 confirming images are too few"]),
    ],
)
def test_the_outlook_says_what_can_be_certified_and_what_to_do(promise, confirming, said):
    told = certifiable_here(promise, splits(confirming))
    for words in said:
        assert words in told


def found(*sizes: int, to_test: tuple[int, ...], chosen: int) -> SearchResult:
    """A search that tried networks of these sizes, the first being unpruned."""
    trials = []
    for index, size in enumerate(sizes):
        said = Predictions.of_hits(np.ones(10, dtype=bool))
        state = State((DENSE, Step(str(index))), nn.Identity(), (Stage("s", 1, 1, 1, 1),), outcomes=said)
        network = nn.Identity()
        network.index = index
        trials.append(
            Evaluated(replace(Candidate.of(state, state, Size(size, size)), passed=index == chosen), state, network)
        )
    return SearchResult(tuple(trials), chosen, to_test=to_test)


def certified(
    monkeypatch, search: SearchResult, lost: dict[int, int], confirming: int | None = 1000, **options
) -> SearchResult:
    """What is delivered if the networks lose so many of the confirming images."""

    def predict(network, images, _task, **_settings) -> Predictions:
        answers = images.labels.copy()
        answers[: lost.get(network.index, 0)] += 1
        return Predictions(answers, np.ones(len(answers)), images.labels)

    monkeypatch.setattr(exporter, "judge", predict)
    data = splits(confirming)
    return Certifier(PROMISE, data, Exporter(data), NullCallback(), **options).run(search).found


def test_the_last_that_passed_is_delivered_and_counts_as_passed(monkeypatch):
    search = found(1000, 500, 250, 125, to_test=(1, 2, 3), chosen=2)
    result = certified(monkeypatch, search, {1: 0, 2: 1, 3: 2})
    assert (result.chosen, result.certificate.status) == (3, "certified")
    assert [candidate.passed for candidate in result.candidates[1:]] == [True, True, True]
    result = certified(monkeypatch, search, {2: 30})
    assert (result.chosen, result.certificate.certified) == (1, True)
    assert [candidate.passed for candidate in result.candidates[1:]] == [True, False, False]


@pytest.mark.parametrize(("lost", "chosen"), [(8, 1), (30, 0)])
def test_where_the_first_test_fails_the_confirming_images_decide_by_the_estimate(monkeypatch, lost, chosen):
    search = found(1000, 500, 250, to_test=(1, 2), chosen=2)
    result = certified(monkeypatch, search, {1: lost})
    assert (result.chosen, result.certificate.status) == (chosen, "estimated")
    assert f"loses {lost / 10:.1f} points" in result.certificate.reason
    assert result.candidates[result.chosen].passed == (chosen > 0)


@pytest.mark.parametrize(
    ("confirming", "reason"),
    [
        (None, "no images were set aside to confirm it"),
        (100, "100 confirming images are too few for this budget"),
        (1000, "no candidate is likely to pass the test on 1,000 confirming images"),
    ],
)
def test_without_a_test_the_choice_of_the_search_is_an_estimate(monkeypatch, confirming, reason):
    result = certified(monkeypatch, found(1000, 500, to_test=(), chosen=1), {}, confirming)
    assert (result.chosen, result.certificate.status, result.certificate.reason) == (1, "estimated", reason)


def test_an_int8_file_takes_its_turn_after_the_network_that_it_is_made_of(monkeypatch):
    search = found(1000, 500, 250, 125, to_test=(1, 2, 3), chosen=2)
    result = certified(monkeypatch, search, {}, int8=True)
    assert [test.index for test in result.certificate.tests] == [1, 2]
    assert result.chosen == 2
    by_time = found(1000, 250, 500, 125, to_test=(1, 2, 3), chosen=2)  # the slower has fewer parameters
    result = certified(monkeypatch, by_time, {2: 30}, int8=True)
    assert ([test.index for test in result.certificate.tests], result.chosen) == ([1, 2], 1)


class Onnx:
    """ONNX files that hold the index of their network, or that an eighth of the images more is lost."""

    def __init__(self, fault: bool = False) -> None:
        self.fault = fault

    def export(self, model: nn.Module, path: Path) -> SimpleNamespace:
        path.write_text(str(model.index))
        return SimpleNamespace(path=path)

    def quantise(self, source: Path, target: Path, _reference: nn.Module, _standard: object) -> Int8Export:
        target.write_text(f"{source.read_text()} int8")
        return Int8Export(Quantised(3, 8, accepted=not self.fault), "accuracy is 90.0%" if self.fault else "")


class Run:
    """Starts of a run, each of which counts the looks at the confirming images."""

    def __init__(self, monkeypatch, folder: Path, lost: dict[str, int]) -> None:
        self.folder, self.lost, self.looks = folder, lost, []
        said = {
            "outcomes": lambda _, network, data: self.said(str(network.index), data),
            "file_outcomes": lambda _, path, _network, data: self.said(path.read_text(), data),
        }
        for name, answer in said.items():
            monkeypatch.setattr(Onnx, name, answer, raising=False)

    def said(self, name: str, images: ArrayImages) -> Predictions:
        self.looks.append(name)
        answers = images.labels.copy()
        answers[: self.lost.get(name, 0)] += 1
        return Predictions(answers, np.ones(len(answers)), images.labels)

    def start(
        self, search: SearchResult, *, onnx: bool = True, int8: bool = False, promise: Guarantee = PROMISE
    ) -> Certified:
        self.looks.clear()
        return Certifier(promise, splits(1000), Onnx(), NullCallback(), onnx, int8, self.folder).run(search)


SEARCH = {"to_test": (1, 2, 3), "chosen": 2}


def test_a_run_that_is_repeated_reuses_its_tests(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {"3": 30}), found(1000, 500, 250, 125, **SEARCH)
    first = run.start(search)
    assert run.looks == ["0", "1", "2", "3"]
    run.lost.clear()  # were they looked at again, all would pass
    again = run.start(search)
    assert run.looks == []
    assert again.found.certificate == first.found.certificate
    assert (again.found.chosen, again.files.onnx, again.files.certified) == (2, b"2", {"model.onnx"})


def test_a_run_that_was_stopped_goes_on_in_the_order_that_was_written_down(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    said = run.said

    def stopped(name: str, images: ArrayImages) -> Predictions:
        if name == "2":
            raise KeyboardInterrupt
        return said(name, images)

    run.said = stopped
    with pytest.raises(KeyboardInterrupt):
        run.start(search)
    assert len(read_tested(tmp_path).tests) == 1
    run.said = said
    result = run.start(replace(search, to_test=(3,)))  # whatever a second search might prefer
    assert run.looks == ["0", "2", "3"]
    assert [test.index for test in result.found.certificate.tests] == [1, 2, 3]


@pytest.mark.parametrize(("lost", "looks", "certified"), [({}, ["0", "3 int8"], True), ({"3": 30}, [], False)])
def test_an_int8_file_that_is_added_later_is_tested_only_if_nothing_has_failed(
    monkeypatch, tmp_path, lost, looks, certified
):
    run, search = Run(monkeypatch, tmp_path, lost), found(1000, 500, 250, 125, **SEARCH)
    before = run.start(search).found
    run.lost.clear()
    result = run.start(search, int8=True)
    assert run.looks == looks
    assert result.found.certificate == before.certificate
    assert ("model.int8.onnx" in result.files.certified) == certified == (result.files.int8_test is not None)
    assert run.start(search, int8=True).files == result.files
    assert run.looks == []
    assert run.start(search).found.certificate == before.certificate  # and left out again


def test_an_int8_file_that_failed_ends_the_tests(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {"2 int8": 30}), found(1000, 500, 250, 125, **SEARCH)
    result = run.start(search, int8=True)
    assert (result.found.certificate.certified, result.files.int8_test.passed) == (True, False)
    assert result.files.certified == {"model.onnx"}
    run.lost.clear()
    assert not run.start(search, int8=True).files.int8_test.passed
    assert run.looks == []


@pytest.mark.parametrize(("lost", "certified"), [({}, True), ({"3": 30}, False)])
def test_a_network_that_pytorch_computed_is_no_onnx_file(monkeypatch, tmp_path, lost, certified):
    run, search = Run(monkeypatch, tmp_path, lost), found(1000, 500, 250, 125, **SEARCH)
    assert run.start(search, onnx=False).found.certificate.computed_by == "PyTorch"
    result = run.start(search)
    assert result.found.certificate.computed_by == "PyTorch"
    assert ("model.onnx" in result.files.certified) == certified == (result.files.onnx_test is not None)


def test_a_file_that_is_not_the_one_that_was_tested_is_not_certified(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, **(SEARCH | {"to_test": (1, 2)}))
    assert "model.int8.onnx" in run.start(search, int8=True).files.certified
    monkeypatch.setattr(Onnx, "export", lambda _self, _model, path: path.write_text("9") and SimpleNamespace(path=path))
    assert run.start(search, int8=True).files.certified == {"model.onnx"}  # tested anew
    assert run.looks == ["9", "9"]


@pytest.mark.parametrize(("lost", "certified"), [({}, True), ({"3": 30}, False)])
def test_an_exporter_that_has_changed_delivers_no_untested_file_as_certified(monkeypatch, tmp_path, lost, certified):
    run, search = Run(monkeypatch, tmp_path, lost), found(1000, 500, 250, 125, **SEARCH)
    before = run.start(search)
    monkeypatch.setattr(Onnx, "export", lambda _self, _model, path: path.write_text("9") and SimpleNamespace(path=path))
    assert ("model.onnx" in run.start(search).files.certified) == certified
    (tmp_path / "model.onnx").write_bytes(before.files.onnx)
    again = run.start(search)
    assert (again.files.onnx, again.files.certified, run.looks) == (before.files.onnx, {"model.onnx"}, [])


def test_another_promise_is_not_kept_by_the_tests_of_this_one(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    assert run.start(search).found.certificate.certified
    for other in (
        replace(PROMISE, confidence=0.999),
        replace(PROMISE, budget=Budget(max_drop=0.001)),
        replace(PROMISE, metric=lambda _truth, _said: 0.5),
    ):
        result = run.start(search, promise=other).found
        assert (result.certificate.status, run.looks) == ("estimated", [])
        assert "tested another promise" in result.certificate.reason


def test_where_only_the_reference_cannot_be_exported_all_run_in_pytorch(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    export = Onnx.export

    def fails(self: Onnx, model: nn.Module, path: Path) -> SimpleNamespace:
        if model.index == 0:
            raise ModelError("it cannot be exported")
        return export(self, model, path)

    monkeypatch.setattr(Onnx, "export", fails)
    assert run.start(search).found.certificate.computed_by == "PyTorch"
    assert run.looks[:4] == ["0", "1", "2", "3"]
    assert read_tested(tmp_path).sums == ("", "", "")


def test_where_the_record_is_damaged_or_of_other_networks_nothing_is_tested_again(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    run.start(search)
    other = replace(search, trials=search.trials[:-1], to_test=(1, 2))
    result = run.start(other).found
    assert (result.certificate.status, run.looks, result.chosen) == ("estimated", [], 2)
    assert "tested other networks" in result.certificate.reason
    (tmp_path / "tests.json").write_bytes(b"")
    result = run.start(search).found
    assert (result.certificate.status, run.looks) == ("estimated", [])
    assert "is damaged" in result.certificate.reason


def test_a_search_that_was_stopped_looks_at_nothing(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    result = run.start(replace(search, interrupted=True)).found
    assert (result.certificate.status, run.looks, read_tested(tmp_path)) == ("estimated", [], None)


def test_where_the_record_is_missing_but_the_summary_or_the_bundle_tells_of_tests_nothing_is_tested_again(
    monkeypatch, tmp_path
):
    run, search = Run(monkeypatch, tmp_path, {"1": 30}), found(1000, 500, 250, 125, **SEARCH)
    failed = run.start(search).found
    run.lost.clear()
    (tmp_path / "tests.json").unlink()
    replace(tiny_summary(), certificate=failed.certificate).write(tmp_path / "summary.json")
    result = run.start(search).found
    assert (result.certificate.status, run.looks) == ("estimated", [])
    assert "is missing" in result.certificate.reason
    (tmp_path / "summary.json").write_bytes(b"{")
    assert not run.start(search).found.certificate.certified
    (tmp_path / "summary.json").unlink()
    save_pretrained(tiny_model(), tmp_path / "model", metrics={TESTS_MADE: 1})
    assert not run.start(search).found.certificate.certified
    assert run.looks == []


def test_a_summary_of_a_run_that_tested_nothing_does_not_end_it(monkeypatch, tmp_path):
    run, search = Run(monkeypatch, tmp_path, {}), found(1000, 500, 250, 125, **SEARCH)
    stopped = run.start(replace(search, interrupted=True)).found
    replace(tiny_summary(), certificate=stopped.certificate).write(tmp_path / "summary.json")
    assert run.start(search).found.certificate.certified


def test_a_certificate_says_how_many_images_are_independent(monkeypatch):
    search = found(1000, 500, to_test=(1,), chosen=1)
    monkeypatch.setattr(
        exporter,
        "judge",
        lambda _network, images, *_, **__: Predictions(
            images.labels, np.ones(len(images)), images.labels, images.units
        ),
    )
    data = splits(1000)
    for together, certified in ((2, True), (20, False)):
        given = replace(data, confirm=in_units(data.confirm, np.arange(1000) // together))
        result = Certifier(PROMISE, given, Exporter(given), NullCallback()).run(search).found.certificate
        assert (result.images, result.units, result.certified) == (1000, 1000 // together, certified)
    assert "50 independent units of 1,000 confirming images" in certifiable_here(PROMISE, given)


PASSED = Test(1, "half", 0.95, 0.94, 0.009, 0.02, 9, 7, passed=True)
FAILED = replace(PASSED, passed=False, bound=0.02)


def trial(weight: float, ratio: float = 0.5) -> Evaluated:
    said = Predictions.of_hits(np.ones(3, dtype=bool))
    state = State((DENSE, Step("basis", ratio)), nn.Identity(), (Stage("s", 1, 1, 1, 1),), outcomes=said)
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, weight)
    return Evaluated(Candidate.of(state, state, Size(1, 1)), state, network)


def test_what_was_written_is_read_and_nothing_is_written_without_a_folder(tmp_path):
    tested = (
        Tested("1%", "a", ("b", "c"), "PyTorch").with_test(PASSED).with_file("model.int8.onnx", FileTest("0", FAILED))
    )
    assert read_tested(tmp_path) is None
    write_tested(tmp_path, tested)
    assert read_tested(tmp_path) == tested
    write_tested(None, tested)
    assert read_tested(None) is None


def test_a_failure_of_a_network_or_of_a_file_is_known():
    tested = Tested("1%", "a", ("b", "c"), "PyTorch")
    assert not tested.has_failed
    assert not tested.with_test(PASSED).has_failed
    assert tested.with_test(FAILED).has_failed
    assert tested.with_file("model.onnx", FileTest("0", FAILED)).has_failed


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_record_that_is_damaged_is_not_taken_for_none(tmp_path, content):
    write_tested(tmp_path, Tested("1%", "a", ("b",), "PyTorch"))
    path = tmp_path / TESTS
    path.write_bytes(path.read_bytes().replace(b"PyTorch", b"pytorch") if content is None else content)
    with pytest.raises(CheckpointError, match=r"tests\.json"):
        read_tested(tmp_path)


def test_networks_are_told_apart_by_their_weights_and_by_how_they_came_about():
    names = {identity(each) for each in (trial(1.0), trial(2.0), trial(1.0, 0.25))}
    assert len(names) == 3
    assert identity(trial(1.0)) in names
    assert identity(trial(1.0)).startswith("dense, basis 0.5, sha256 ")


def test_every_test_has_the_checksum_of_what_was_run():
    with pytest.raises(PlanError, match="1 tests have 0 checksums"):
        Tested("1%", "a", ("b",), "PyTorch", (PASSED,))
