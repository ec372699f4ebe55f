"""A finished search -> what of it is certified on the confirming images, as the delivered files compute it.

The images are looked at once. The order of the tests is written down first, then each outcome; a run that is started
again resumes from there. A file that is added later, such as an int8 file, comes last, and only if nothing has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import nn

from basisprune.budget.certify import (
    EQUAL,
    TYPICAL,
    AcceptanceRule,
    Certificate,
    Guarantee,
    Test,
    certifiable,
    certify,
    images_needed,
)
from basisprune.budget.metrics import in_words, metric_name, value_of
from basisprune.callback import Callback
from basisprune.data import LabelledImages, Splits
from basisprune.data.manifest import manifest_of
from basisprune.deploy.export.onnx import has_onnx
from basisprune.errors import BasisPruneError, CheckpointError
from basisprune.files import file_digest
from basisprune.runs.exporter import Exporter, Int8Export
from basisprune.runs.folder import INT8, ONNX
from basisprune.runs.load import Job
from basisprune.runs.record import (
    ANSWERS,
    Answers,
    FileTest,
    Labelling,
    Tested,
    has_been_tested,
    identity,
    in_random_order,
    promised,
    read_answers,
    read_labels,
    read_tested,
    write_answers,
    write_tested,
)
from basisprune.search.candidates import SearchResult
from basisprune.tasks import Outcomes, Predictions, Task

_LIMITS = "a task needs limits (Task(limits=...), regression(limits=...)) for that"
ONNX_RUNTIME, PYTORCH = "ONNX Runtime", "PyTorch"


@dataclass(frozen=True)
class Files:
    """The ONNX files of the network to deliver, as they were tested; None for one that was not made.

    The tests are those of files that were not run as a network; `certified` are the names of those that are certified.
    """

    onnx: bytes | None = None
    int8: bytes | None = None
    made: Int8Export | None = None
    onnx_test: Test | None = None
    int8_test: Test | None = None
    certified: frozenset[str] = frozenset()


NO_FILES = Files()


@dataclass(frozen=True)
class Certified:
    """The search with the network to deliver chosen, its certificate inside, and its files."""

    found: SearchResult
    files: Files = NO_FILES


@dataclass(frozen=True)
class Certifier:
    """Tests candidates on the confirming images; by ONNX Runtime with `onnx`, otherwise by PyTorch.

    What is tested is written down in `folder`, and what was tested by an earlier start of the run is not tested again.
    Where the images have no labels, the file `labels` has those of images on which networks differ.
    """

    promise: Guarantee
    data: Splits
    exporter: Exporter
    callback: Callback
    onnx: bool = False
    int8: bool = False
    folder: Path | None = None
    labels: Path | None = None
    seed: int = 0

    def run(self, found: SearchResult) -> Certified:
        """The search with its certificate, and with the last candidate that passed as the chosen one.

        If none is certified, what the search chose by its own images is delivered, as an estimate; unless the
        confirming images speak against it, then what they allow.
        """
        confirm = self.data.confirm
        if confirm is None or not found.to_test or found.interrupted:
            return self._estimated(found, self._why_not(found, confirm))
        names = [identity(trial) for trial in found.trials]
        promise = promised(self.promise, found.reference.outcomes, manifest_of(self.data).digest)
        places = {name: index for index, name in enumerate(names)}
        try:
            tested = read_tested(self.folder)
            if tested is None and has_been_tested(self.folder):
                return self._estimated(found, "the record of what was tested on the confirming images is missing")
            tested = tested or self._planned(found, names, promise)
        except CheckpointError as error:
            self.callback.log(f"{error}; nothing more is tested")
            return self._estimated(found, "the record of what was tested on the confirming images is damaged")
        if tested.promised != promise:
            return self._estimated(found, "an earlier start of the run tested another promise on the confirming images")
        if tested.reference != names[0] or not places.keys() >= set(tested.order):
            return self._estimated(found, "an earlier start of the run tested other networks on the confirming images")
        with TemporaryDirectory() as scratch:
            tests = _Tests(self, found, tested, Path(scratch))
            if confirm.labelled:
                certificate = certify(
                    self.promise, len(confirm), enumerate(tested.order), lambda each: tests.of(each[0], places[each[1]])
                )
            else:
                certificate = self._by_labels(found, [places[name] for name in tested.order], tests)
            certificate = replace(certificate, computed_by=tests.tested.computed_by, units=_units(confirm))
            found = _concluded(found, certificate, self.promise)
            return Certified(found, self._files(found, certificate, tests))

    def _by_labels(self, found: SearchResult, indices: list[int], tests: _Tests) -> Certificate:
        """Test the candidates by the labels given so far; write the page that asks for others."""
        images, order, names = tests.images, *in_random_order(tests.images, self.seed)
        kept = None if self.folder is None else read_answers(self.folder)
        kept = kept or Answers(names, images.classes, {})
        if missing := [index for index in (0, *indices) if identity(found.trials[index]) not in kept.answers]:
            answers = {identity(found.trials[index]): tests.answers(index)[order] for index in missing}
            kept = replace(
                kept, answers={**kept.answers, **{key: tuple(map(int, each)) for key, each in answers.items()}}
            )
        if kept.images != names or kept.classes != images.classes:
            raise CheckpointError(f"{ANSWERS}: is of other images than this run's; bring it back from a copy")
        if self.labels is not None:
            kept = kept.with_labels(read_labels(self.labels, names), str(self.labels))
        labelling = Labelling(
            self.promise,
            kept,
            identity(found.trials[0]),
            [identity(found.trials[index]) for index in indices],
            [found.trials[index].candidate.label for index in indices],
            value_of("accuracy", found.reference.outcomes),
        )
        if self.folder is not None:
            write_answers(self.folder, kept)
        decided = labelling.tests(indices)
        tests.keep(decided)
        certificate = labelling.certificate(decided, self.folder)
        if self.folder is not None and labelling.is_open:
            labelling.write_page(self.folder, images, order)
        return certificate

    def _planned(self, found: SearchResult, names: list[str], promise: str) -> Tested:
        """What is to be tested, in order, written down before anything is.

        An int8 file is made of what the search chose, so that with one nothing comes behind that.
        """
        order = found.to_test
        if self.int8 and found.chosen in order:
            order = order[: order.index(found.chosen) + 1]
        program = ONNX_RUNTIME if self.onnx else PYTORCH
        tested = Tested(promise, names[0], tuple(names[index] for index in order), program)
        write_tested(self.folder, tested)
        return tested

    def _files(self, found: SearchResult, certificate: Certificate, tests: _Tests) -> Files:
        """The files of the chosen network; each that was not tested as a network is next, if no test has failed."""
        source = tests.exported(found.trials[found.chosen].deployed, str(found.chosen)) if self.onnx else None
        if source is None:
            return NO_FILES
        source = tests.as_tested(source, found.chosen)
        kept = certificate.certified and (
            tests.has_run(source, found.chosen) or tests.passes(ONNX, source, found.chosen)
        )
        files = Files(source.read_bytes(), onnx_test=tests.of_file(ONNX), certified=frozenset([ONNX] if kept else []))
        if not self.int8:
            return files
        target, standard = source.with_name(INT8), AcceptanceRule(self.promise, tests.images.independent)
        try:
            made = self.exporter.quantise(source, target, found.trials[0].deployed, standard)
        except BasisPruneError as error:
            self.callback.log(f"the int8 file is not made: {error}")
            return files
        if certificate.certified and tests.images.labelled and tests.passes(INT8, target, found.chosen):
            files = replace(files, certified=files.certified | {INT8})
        return replace(files, int8=target.read_bytes(), made=made, int8_test=tests.of_file(INT8))

    def _estimated(self, found: SearchResult, reason: str) -> Certified:
        confirm = self.data.confirm
        images, name = 0 if confirm is None else len(confirm), metric_name(self.promise.metric)
        certificate = Certificate("estimated", self.promise.confidence, name, images, reason, units=_units(confirm))
        return Certified(replace(found, certificate=certificate))

    def _why_not(self, found: SearchResult, confirm: LabelledImages | None) -> str:
        """Why nothing is tested, in a clause."""
        if confirm is None:
            return "no images were set aside to confirm it"
        if found.interrupted:
            return "the search was stopped early, and the tests are made once, at its end"
        if len(found.trials) == 1:
            return "no candidate was found"
        if not _is_bounded(self.promise):
            return f"it is not known how much {in_words(self.promise.metric)} can lose by one example; {_LIMITS}"
        if not self.promise.reachable(confirm.labels, confirm.units):
            return f"{_independent(confirm)} are too few for this budget"
        return f"no candidate is likely to pass the test on {_independent(confirm)}"


def _is_bounded(promise: Guarantee) -> bool:
    return not isinstance(promise.metric, Task) or promise.metric.is_bounded


def _units(confirm: LabelledImages | None) -> int | None:
    return None if confirm is None or confirm.units is None else confirm.independent


def _independent(confirm: LabelledImages) -> str:
    """The images that confirm, counted."""
    if confirm.units is None:
        return f"{len(confirm):,} confirming images"
    return f"{confirm.independent:,} independent units of {len(confirm):,} confirming images"


class _Tests:
    """Tests networks and files on the confirming images, unless they were tested before.

    Networks run in PyTorch from the first on that cannot be exported.
    """

    def __init__(self, certifier: Certifier, found: SearchResult, tested: Tested, scratch: Path) -> None:
        self.certifier, self.found, self.tested, self.scratch = certifier, found, tested, scratch
        self.images = cast("LabelledImages", certifier.data.confirm)
        self._known: tuple[str, Outcomes] | None = None
        self._ran: dict[int, str] = {}  # by candidate, the checksum of the file that was tested

    def answers(self, index: int) -> npt.NDArray[np.int64]:
        """Return the class that a candidate names for each image."""
        outcomes = self._outcomes(self.found.trials[index].deployed, str(index))
        return cast("Predictions", outcomes).classes

    def keep(self, decided: tuple[Test, ...]) -> None:
        """Note the tests of the first candidates, which were decided by labels."""
        for place, test in enumerate(decided):
            file = self.scratch / f"{test.index}.onnx"
            sha256 = file_digest(file) if self.tested.computed_by == ONNX_RUNTIME and file.exists() else ""
            if place >= len(self.tested.tests):
                self._note(self.tested.with_test(test, sha256))
            self._ran[test.index] = self.tested.sums[place]

    @property
    def _reference(self) -> Outcomes:
        """What the unpruned network says, as the same program computes it."""
        if self._known is None or self._known[0] != self.tested.computed_by:
            said = self._outcomes(self.found.trials[0].deployed, "reference")
            self._known = self.tested.computed_by, said
        return self._known[1]

    def of(self, place: int, index: int) -> Test:
        """The test at this place in the order, of that candidate."""
        if place >= len(self.tested.tests):
            trial = self.found.trials[index]
            test = self._test(index, trial.candidate.label, lambda: self._outcomes(trial.deployed, str(index)))
            by_onnx = self.tested.computed_by == ONNX_RUNTIME
            self._note(self.tested.with_test(test, file_digest(self.scratch / f"{index}.onnx") if by_onnx else ""))
        self._ran[index] = self.tested.sums[place]
        return replace(self.tested.tests[place], index=index)

    def has_run(self, file: Path, index: int) -> bool:
        """Whether this very file was run when that candidate was tested."""
        return self._ran.get(index) == file_digest(file)

    def as_tested(self, file: Path, index: int) -> Path:
        """The file, or in its place the delivered one, if only that was tested: an exporter may have changed since."""
        folder = self.certifier.folder
        delivered = None if folder is None else folder / ONNX
        if delivered is not None and delivered.is_file() and self.has_run(delivered, index):
            file.write_bytes(delivered.read_bytes())
        return file

    def passes(self, name: str, path: Path, index: int) -> bool:
        """Whether the file, made of that candidate, passes; one that was tested before must be the same."""
        known, content = self.tested.files.get(name), file_digest(path)
        if known is None and self.tested.has_failed:
            return False
        if known is None:
            network = self.found.trials[index].deployed
            said = partial(self.certifier.exporter.file_outcomes, path, network, self.images)
            known = FileTest(content, self._test(index, name, said))
            self._note(self.tested.with_file(name, known))
        return known.test.passed and known.sha256 == content

    def of_file(self, name: str) -> Test | None:
        """The test of that file; None if it had none of its own."""
        known = self.tested.files.get(name)
        return None if known is None else known.test

    def exported(self, model: nn.Module, name: str) -> Path | None:
        """The ONNX file of the network, made once; None for one that cannot be exported."""
        path = self.scratch / f"{name}.onnx"
        try:
            return path if path.exists() else self.certifier.exporter.export(model, path).path
        except BasisPruneError as error:
            self.certifier.callback.log(f"the network cannot be exported, and is tested in PyTorch: {error}")
            return None

    def _test(self, index: int, name: str, outcomes: Callable[[], Outcomes]) -> Test:
        if self._known is None:
            count, is_first = f"{len(self.images):,}", not self.tested.tests
            where = f"on {count} images that nothing has seen" if is_first else f"what is new on {count} images"
            self.certifier.callback.log(f"testing {where}")
        _ = self._reference  # first, because all run in PyTorch if it cannot be exported
        said = outcomes()
        return self.certifier.promise.test(index, name, self._reference, said)

    def _outcomes(self, model: nn.Module, name: str) -> Outcomes:
        if self.tested.computed_by == ONNX_RUNTIME:
            path = self.exported(model, name)
            if path is not None:
                return self.certifier.exporter.file_outcomes(path, model, self.images)
            self.tested = replace(self.tested, computed_by=PYTORCH)
        return self.certifier.exporter.outcomes(model, self.images)

    def _note(self, tested: Tested) -> None:
        write_tested(self.certifier.folder, tested)
        self.tested = tested


def _concluded(found: SearchResult, certificate: Certificate, promise: Guarantee) -> SearchResult:
    """The search with the outcome of the tests: its choice, and which of the tested candidates passed."""
    chosen = _chosen(found, certificate, promise)
    passed = {test.index: test.passed or test.index == chosen for test in certificate.tests}
    trials = tuple(
        replace(trial, candidate=replace(trial.candidate, passed=passed.get(index, trial.candidate.passed)))
        for index, trial in enumerate(found.trials)
    )
    return replace(found, trials=trials, chosen=chosen, certificate=certificate)


def _chosen(found: SearchResult, certificate: Certificate, promise: Guarantee) -> int:
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


def certify_found(job: Job, found: SearchResult, callback: Callback, folder: Path | None) -> Certified:
    """Certify the search of a job, by ONNX Runtime if the run writes an ONNX file."""
    config = job.config
    onnx = folder is not None and (has_onnx() if config.onnx is None else config.onnx)
    exporter, guarantee = Exporter(job.splits, config.task), cast("Guarantee", config.guarantee)
    return Certifier(
        guarantee, job.splits, exporter, callback, onnx, onnx and config.int8, folder, job.labels, config.seed
    ).run(found)


def certifiable_here(promise: Guarantee, data: Splits) -> str:
    """What can be certified with these images, and what to do if that is not enough, in a few sentences."""
    confirm, sure = data.confirm, f"{100 * promise.confidence:.3g}%"
    if confirm is None:
        return (
            "Nothing will be certified, because no images are set aside to confirm the budget: the result will be an "
            f"estimate. To have it certified: {_confirming_images(promise)}, in the training of the model too."
        )
    images, budget = confirm.independent, promise.budget
    if not confirm.labelled:
        can, asked = certifiable(images, TYPICAL, promise.confidence), round(TYPICAL * images)
        return (
            f"With {images:,} images without labels, a loss of {100 * can:.1f} points can be certified with {sure} "
            f"confidence if answers differ on {TYPICAL:.0%} of them, by labels for at most these {asked:,}."
        )
    if not _is_bounded(promise):
        return f"Nothing will be certified, because it is unknown how much an example can lose: {_LIMITS}."
    if promise.metric != "accuracy" or budget.max_drop is None:
        if not promise.reachable(confirm.labels, confirm.units):
            return f"{_independent(confirm)} are too few to certify this budget. What helps: {_remedies(promise)}."
        where = f"{images:,} images" if confirm.units is None else _independent(confirm)
        if isinstance(promise.metric, Task):
            where = f"{images:,} independent examples, by {promise.metric.test_name}"
        return f"The budget ({in_words(promise.metric)}) will be tested with {sure} confidence on {where}."
    can = certifiable(images, TYPICAL, promise.confidence)
    said = (
        f"With {_independent(confirm)} and {TYPICAL:.0%} differing answers, a loss of {100 * can:.1f} points can "
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


def _confirming_images(promise: Guarantee) -> str:
    """Say where confirming images come from, and how many it takes."""
    drop = promise.budget.max_drop
    if promise.metric != "accuracy" or not drop:
        return "set some aside (--confirm-fraction)"
    needed = images_needed(drop, TYPICAL, promise.confidence)
    return f"about {needed:,} images that are set aside (--confirm-fraction) or have no labels (--unlabelled)"


def _remedies(promise: Guarantee) -> str:
    """What helps where images are too few."""
    looser = "" if promise.confidence <= 0.8 else ", --confidence 80%"
    return f"more images, a larger share for validation (--val-fraction), a looser budget{looser}"
