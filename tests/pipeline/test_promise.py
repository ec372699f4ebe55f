"""A budget from the search to its certificate: nothing leaks, each way it ends, what is delivered was tested."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.data import ArrayImages, LabelledImages, Splits, load_data, take
from basisprune.deploy.export import evaluate_onnx
from basisprune.results import RunSummary
from basisprune.runs import deliver
from basisprune.runs.compress import Compressed, compress
from basisprune.search import SearchConfig

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"max_drop": 0.02, "search": SearchConfig(framework="basis", polish=False), "onnx": False}


class Untouchable(LabelledImages):
    """Images that nothing may look at once training has begun; before that they are opened, to be written down."""

    def __init__(self, images: LabelledImages, notes: Notes) -> None:
        self.images, self.notes, self.labels, self.classes = images, notes, images.labels, images.classes

    def __getitem__(self, index: int):
        if any(": training, " in line for line in self.notes.lines):
            raise AssertionError("a confirming image was looked at")
        return self.images[index]


def data(confirm: LabelledImages | None) -> Splits:
    splits = load_data(tiny_images(300), val_fraction=0.5, test_fraction=0.1)
    return replace(splits, confirm=confirm)


def images(count: int = 240) -> ArrayImages:
    return tiny_images(count, seed=1)


def shuffled(count: int = 240) -> ArrayImages:
    """Images with the labels of others."""
    given = images(count)
    return ArrayImages(given.images.permute(0, 2, 3, 1).numpy(), np.random.default_rng(0).permutation(given.labels))


def run(confirm: LabelledImages | None, output=None, callback=None, **settings) -> Compressed:
    recipe = tiny_recipe(tiny_training(epochs=2))
    options = {**OPTIONS, "recipe": recipe, **settings}
    return compress(tiny_model(), data(confirm), output=output, callback=callback, **options)


@pytest.fixture(scope="module")
def certified() -> Compressed:
    return run(images())


def test_a_budget_is_certified_and_the_summary_says_so(certified):
    certificate = certified.summary.certificate
    assert (certificate.status, certificate.images, certificate.computed_by) == ("certified", 240, "PyTorch")
    assert certificate.delivered == certificate.tests[-1] or not certificate.tests[-1].passed
    assert certificate.delivered.index == certified.found.chosen > 0
    sizes = [certified.history[test.index].parameters for test in certificate.tests]
    assert sizes == sorted(sizes, reverse=True)
    assert "Certified with 95% confidence, on 240 images that nothing had seen" in certified.summary.verdict
    assert RunSummary.from_json(certified.summary.to_json()) == certified.summary
    assert certified.summary.fulfilled
    assert {row.name for row in certified.summary.class_losses.classes} == {"0", "1", "2"}


def test_nothing_before_certification_depends_on_the_confirming_images(certified):
    poisoned = run(shuffled())
    assert len(poisoned.history) == len(certified.history)
    for one, other in zip(certified.found.trials, poisoned.found.trials, strict=True):
        assert one.candidate == replace(other.candidate, passed=one.candidate.passed)
        assert not differing(one.state.model, other.state.model)
    assert poisoned.found.to_test == certified.found.to_test
    certificate = poisoned.summary.certificate  # nobody keeps to a budget on labels that are wrong
    assert [test.before < 0.6 for test in certificate.tests] == [True] * len(certificate.tests)


def test_they_are_not_even_looked_at():
    notes = Notes()
    with pytest.raises(AssertionError, match="a confirming image was looked at"):
        run(Untouchable(images(), notes), callback=notes)
    assert any(line.startswith("testing on 240 images") for line in notes.lines)


@pytest.mark.parametrize(
    ("confirm", "reason", "outlook"),
    [
        (None, "no images were set aside", "Nothing will be certified"),
        (take(images(), range(30)), "30 confirming images are too few", "With 30 confirming images and 5% differing"),
    ],
)
def test_without_enough_images_the_best_estimate_is_delivered_and_called_that(confirm, reason, outlook):
    notes = Notes()
    result = run(confirm, callback=notes, require_certified=True, confirm_fraction=0.0)
    summary = result.summary
    assert (summary.certificate.status, summary.certificate.tests) == ("estimated", ())
    assert reason in summary.certificate.reason
    assert "estimated, not certified" in summary.verdict
    assert result.found.chosen > 0
    assert (summary.kept_to_budget, summary.fulfilled) == (True, False)
    assert any(line.startswith(outlook) for line in notes.lines)


def test_the_delivered_files_are_those_that_were_tested_and_each_was_tested_once(tmp_path, monkeypatch):
    """A run, the same again with an int8 file, and once more: the certificate stays, what is new comes last."""
    monkeypatch.setattr(deliver, "_SECONDS", 0.5)
    out, notes = tmp_path / "out", [Notes(), Notes(), Notes()]
    options = {"onnx": True, "search": SearchConfig(framework="basis", step=0.7)}
    first = run(images(), out, notes[0], **options).summary
    assert first.certificate.computed_by == "ONNX Runtime"
    assert evaluate_onnx(out / "model.onnx", images()).accuracy == pytest.approx(first.certificate.delivered.after)
    assert first.files["model.onnx"].promise == "certified"
    added = run(images(), out, notes[1], int8=True, **options).summary
    assert added.certificate == first.certificate
    small, failed = added.files["model.int8.onnx"], not first.certificate.tests[-1].passed
    assert (small.test is None) == failed
    if small.test is not None:
        found = evaluate_onnx(out / "model.int8.onnx", images())
        assert small.test.after == pytest.approx(found.accuracy)
    assert small.promise == ("certified" if small.test is not None and small.test.passed else "estimated")
    again = run(images(), out, notes[2], int8=True, **options).summary
    assert (again.certificate, again.files["model.int8.onnx"]) == (first.certificate, small)
    looks = [any(line.startswith("testing ") for line in each.lines) for each in notes]
    assert looks == [True, not failed, False]


def test_the_budget_is_counted_in_the_metric():
    result = run(images(), metric="worst-class", max_drop=0.15)
    certificate = result.summary.certificate
    assert certificate.metric == "worst-class"
    for candidate, trial in zip(result.history[1:], result.found.trials[1:], strict=True):
        answers = trial.state.outcomes
        worst = min((answers.hits[answers.labels == label]).mean() for label in range(3))
        assert candidate.score == pytest.approx(worst)


def test_copies_of_a_few_images_certify_nothing_whatever_their_number():
    few = tiny_images(36)
    pixels = few.images.permute(0, 2, 3, 1).numpy().repeat(20, axis=0)
    pixels[::2, 0, 0, 0] ^= 1  # half of them are near copies
    copied = ArrayImages(pixels, few.labels.repeat(20))
    options = {**OPTIONS, "max_drop": 0.05, "recipe": tiny_recipe(tiny_training(epochs=1))}
    found = compress(tiny_model(), copied, val_fraction=0.5, test_fraction=0.1, **options).summary
    certificate = found.certificate
    assert (certificate.status, certificate.units * 20) == ("estimated", certificate.images)
    assert "too few" in certificate.reason


def test_the_metric_may_be_a_function():
    def rarest(labels, answers) -> float:
        return float(np.mean(answers[labels == 2] == 2))

    summary = run(images(), metric=rarest, max_drop=0.2).summary
    assert (summary.certificate.metric, summary.config["metric"]) == ("rarest", "rarest given in Python")
    assert summary.certificate.tests
    assert "of rarest" in summary.verdict or "rarest on the" in summary.verdict


def test_the_loss_is_counted_from_the_plainly_trained_network():
    """A recipe that decomposes before it trains compares with the network that was not decomposed."""
    recipe = tiny_recipe(tiny_training(epochs=1), "paper")
    result = compress(tiny_model(), data(None), recipe=recipe, **OPTIONS)
    assert result.history[0].steps[0].name == "dense"
    assert result.history[1].steps[0].name == "decomposed"
    assert result.summary.importance
