"""A finished search -> what of it is certified on the confirming images, as the delivered files compute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from basisprune.budget.certify import (
    EQUAL,
    TYPICAL,
    Certificate,
    Promise,
    Standard,
    Test,
    certifiable,
    certify,
    images_needed,
)
from basisprune.candidates import Found
from basisprune.data import LabelledImages, Splits
from basisprune.deploy.export.evaluating import predict_onnx
from basisprune.errors import BasisPruneError
from basisprune.listener import Listener
from basisprune.runs.exporting import Exporter
from basisprune.training.metrics import in_words, metric_name
from basisprune.training.predict import Predictions, predict

ONNX_RUNTIME, PYTORCH = "ONNX Runtime", "PyTorch"


@dataclass(frozen=True)
class Files:
    """The ONNX files of the network to deliver, as they were tested; None for one that was not made."""

    onnx: bytes | None = None
    int8: bytes | None = None
    in_float: int = 0
    int8_test: Test | None = None


NO_FILES = Files()


@dataclass(frozen=True)
class Certified:
    """The search with the network to deliver chosen, its certificate inside, and its files."""

    found: Found
    files: Files = NO_FILES


@dataclass(frozen=True)
class Certifier:
    """Tests candidates on the confirming images; by ONNX Runtime with `onnx`, otherwise by PyTorch."""

    promise: Promise
    data: Splits
    exporter: Exporter
    listener: Listener
    onnx: bool = False
    int8: bool = False

    def run(self, found: Found) -> Certified:
        """The search with its certificate, and with the last candidate that passed as the chosen one.

        If none is certified, what the search chose by its own images is delivered, as an estimate; unless the
        confirming images speak against it, then what they allow.
        """
        confirm = self.data.confirm
        if confirm is None or not found.to_test or found.interrupted:
            return Certified(replace(found, certificate=self._estimated(self._why_not(found, confirm), confirm)))
        self.listener.say(f"testing on {len(confirm):,} images that nothing has seen")
        order = [index for index in found.to_test if not self.int8 or self._comes_first(found, index)]
        with self._folder() as folder:
            runs = _Runs(self, folder, confirm)
            reference = runs.answers(found.trials[0].deployed, "reference")
            certificate = certify(
                self.promise,
                reference,
                order,
                lambda index: runs.answers(found.trials[index].deployed, str(index)),
                lambda index: (index, found.trials[index].candidate.label),
            )
            certificate = replace(certificate, computed_by=ONNX_RUNTIME if runs.by_onnx else PYTORCH)
            found = _concluded(found, certificate, self.promise)
            return Certified(found, self._files(found, runs, reference, folder))

    def _comes_first(self, found: Found, index: int) -> bool:
        """Whether the candidate is tested before the int8 file, which is made of the one that the search chose."""
        sizes = found.candidates
        return sizes[index].parameters >= sizes[found.chosen].parameters

    def _files(self, found: Found, runs: _Runs, reference: Predictions, folder: Path) -> Files:
        """The files of the chosen network; its int8 file is tested if no test before has failed."""
        source = folder / f"{found.chosen}.onnx"
        if not runs.by_onnx or not source.exists():
            return NO_FILES
        files, target = Files(source.read_bytes()), folder / "int8.onnx"
        if not self.int8:
            return files
        standard = Standard(self.promise, len(reference.labels))
        try:
            made = self.exporter.quantise(source, target, found.trials[0].deployed, standard)
        except BasisPruneError as error:
            self.listener.say(f"the int8 file is not made: {error}")
            return files
        if not made.accepted:
            self.listener.say(
                "the int8 file is not likely to keep to the budget, even with half of its layers in float"
            )
        test = None
        if found.certificate is not None and found.certificate.tests and found.certificate.tests[-1].passed:
            said = predict_onnx(target, runs.images, prepared=self.exporter.prepared)
            test = self.promise.test(found.chosen, "int8", reference, said)
        return replace(files, int8=target.read_bytes(), in_float=made.in_float, int8_test=test)

    def _estimated(self, reason: str, confirm: LabelledImages | None) -> Certificate:
        images = 0 if confirm is None else len(confirm)
        name = metric_name(self.promise.metric)
        return Certificate("estimated", self.promise.confidence, name, images, reason)

    def _why_not(self, found: Found, confirm: LabelledImages | None) -> str:
        """Why nothing is tested, in a clause."""
        if confirm is None:
            return "no images were set aside to confirm it"
        if found.interrupted:
            return "the search was stopped early, and the tests are made once, at its end"
        if len(found.trials) == 1:
            return "no candidate was found"
        if not self.promise.reachable(confirm.labels):
            return f"{len(confirm):,} confirming images are too few for this budget"
        return f"no candidate is likely to pass the test on {len(confirm):,} confirming images"

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with TemporaryDirectory() as folder:
            yield Path(folder)


class _Runs:
    """Runs networks on the confirming images; by PyTorch from the first on that cannot be exported."""

    def __init__(self, certifier: Certifier, folder: Path, images: LabelledImages) -> None:
        self.certifier, self.folder, self.images = certifier, folder, images
        self.by_onnx = certifier.onnx

    def answers(self, model: nn.Module, name: str) -> Predictions:
        """What the network says of the images."""
        prepared = self.certifier.exporter.prepared
        if self.by_onnx:
            try:
                path = self.certifier.exporter.export(model, self.folder / f"{name}.onnx").path
                return predict_onnx(path, self.images, prepared=prepared)
            except BasisPruneError as error:
                self.certifier.listener.say(f"testing in PyTorch, because the network cannot be exported: {error}")
                self.by_onnx = False
        return predict(model, self.images, prepared=prepared)


def _concluded(found: Found, certificate: Certificate, promise: Promise) -> Found:
    """The search with what came of the tests: its choice, and which of the tested candidates passed."""
    chosen = _chosen(found, certificate, promise)
    passed = {test.index: test.passed or test.index == chosen for test in certificate.tests}
    trials = tuple(
        replace(trial, candidate=replace(trial.candidate, passed=passed.get(index, trial.candidate.passed)))
        for index, trial in enumerate(found.trials)
    )
    return replace(found, trials=trials, chosen=chosen, certificate=certificate)


def _chosen(found: Found, certificate: Certificate, promise: Promise) -> int:
    """The place of the network to deliver.

    Where the first test failed, that is the candidate that was tested if it keeps to the budget by the estimate of the
    confirming images, and otherwise the unpruned network.
    """
    if certificate.delivered is not None:
        return certificate.delivered.index
    if not certificate.tests:
        return found.chosen
    tested = certificate.tests[0]
    return tested.index if tested.after >= promise.budget.least_accuracy(tested.before) - EQUAL else 0


def certifiable_here(promise: Promise, data: Splits) -> str:
    """What can be certified with these images, and what to do if that is not enough, in a few sentences."""
    confirm, sure = data.confirm, f"{100 * promise.confidence:.3g} %"
    if confirm is None:
        return (
            "Nothing will be certified, because no images are set aside to confirm the budget: the result will be an "
            "estimate."
        )
    images, budget = len(confirm), promise.budget
    if promise.metric != "accuracy" or budget.max_drop is None:
        if promise.reachable(confirm.labels):
            return (
                f"The budget ({in_words(promise.metric)}) will be tested with {sure} confidence on {images:,} images."
            )
        return f"{images:,} confirming images are too few to certify this budget; {_remedies(promise)}."
    can = certifiable(images, TYPICAL, promise.confidence)
    said = (
        f"With {images:,} confirming images and {TYPICAL:.0%} differing answers, a loss of {100 * can:.1f} points can "
        f"be certified with {sure} confidence"
    )
    if can <= budget.max_drop:
        return f"{said}."
    needed = images_needed(budget.max_drop, TYPICAL, promise.confidence) if budget.max_drop > 0 else None
    points = f"{100 * budget.max_drop:.3g} point{'' if budget.max_drop == 0.01 else 's'}"
    enough = (
        f"needs about {needed:,}, to pass in four of five cases" if needed else "cannot be certified with any number"
    )
    return f"{said}; {points} {enough}. To have more certified: {_remedies(promise)}."


def _remedies(promise: Promise) -> str:
    """What helps where images are too few."""
    looser = "" if promise.confidence <= 0.8 else ", --confidence 80%"
    return f"more images, a larger share for validation (--val-fraction), a looser budget{looser}"
