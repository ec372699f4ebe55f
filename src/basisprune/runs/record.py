"""What was tested on the confirming images, and what their labels say, as a run keeps it in its folder."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from basisprune.budget.certify import Certificate, Guarantee, Test, failure
from basisprune.budget.looks import LOST, UNLABELLED, Decision, Differences, SequentialTest
from basisprune.budget.metrics import metric_name, value_of
from basisprune.data import LabelledImages
from basisprune.data.datasets import base_of
from basisprune.data.decode import readable
from basisprune.data.folders import FolderImages
from basisprune.deploy.bundle.loading import holds_bundle, read_folder
from basisprune.errors import MOST_FAULTS, BasisPruneError, CheckpointError, DataError, PlanError
from basisprune.files import csv_rows
from basisprune.recipes import named
from basisprune.report.label_page import LabelPage, Question, write_label_page
from basisprune.results import RunSummary
from basisprune.runs.folder import BUNDLE, SUMMARY
from basisprune.runs.pictures import as_picture, picture_of
from basisprune.search.candidates import Evaluated
from basisprune.tasks import Outcomes
from basisprune.torchkit.processes import Processes
from basisprune.types import JsonValue

TESTS = "tests.json"
TESTS_MADE = "tests made"
"""The entry of a bundle's metrics for how many tests were made."""


@dataclass(frozen=True)
class FileTest:
    """The test of a file that came after the networks, which its checksum identifies."""

    sha256: str
    test: Test


@dataclass(frozen=True)
class Tested(JsonValue):
    """The networks to test, by `identity`, and the tests that were made of the first of them.

    `promised` names what they are tested for, `computed_by` the program that ran them; `sums` are the checksums of its
    ONNX files, empty for PyTorch. `files` are the tests of files made of the last network, in order.
    """

    promised: str
    reference: str
    order: tuple[str, ...]
    computed_by: str
    tests: tuple[Test, ...] = ()
    sums: tuple[str, ...] = ()
    files: dict[str, FileTest] = field(default_factory=dict)

    __test__ = False  # not for pytest

    def __post_init__(self) -> None:
        if len(self.tests) != len(self.sums):
            raise PlanError(f"{len(self.tests)} tests have {len(self.sums)} checksums")

    @property
    def has_failed(self) -> bool:
        return any(not test.passed for test in (*self.tests, *(each.test for each in self.files.values())))

    def with_test(self, test: Test, sha256: str = "") -> Tested:
        return replace(self, tests=(*self.tests, test), sums=(*self.sums, sha256))

    def with_file(self, name: str, made: FileTest) -> Tested:
        return replace(self, files={**self.files, name: made})


def identity(trial: Evaluated) -> str:
    """A name for a network that no other has: how it came about, and the checksum of its weights as deployed."""
    found = hashlib.sha256()
    for name, tensor in sorted(trial.deployed.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{named(trial.state.steps)}, sha256 {found.hexdigest()}"


def promised(promise: Guarantee, reference: Outcomes, images: str) -> str:
    """Name a promise on confirming images with this digest.

    A metric that is a function is also known by its value for the unpruned network, on the validation images.
    """
    (budget,) = [f"{name} {value!r}" for name, value in vars(promise.budget).items() if value is not None]
    value = value_of(promise.metric, reference)
    return f"{budget}, {promise.confidence!r}, {metric_name(promise.metric)} of {value!r}, images {images}"


def read_tested(folder: Path | None) -> Tested | None:
    """Return what the run in the folder has tested; None before the first test."""
    return None if folder is None or not (folder / TESTS).exists() else Tested.read(folder / TESTS)


def has_been_tested(folder: Path | None) -> bool:
    """Whether the summary or the bundle of the run tell of tests, or are damaged and may have told of some."""
    if folder is None:
        return False
    if (folder / SUMMARY).exists():
        try:
            summary = RunSummary.read(folder / SUMMARY)
        except CheckpointError:
            return True
        tested = summary.certificate is not None and bool(summary.certificate.tests)
        if tested or any(file.test is not None for file in summary.files.values()):
            return True
    if not holds_bundle(folder / BUNDLE):
        return False
    try:
        return bool(read_folder(folder / BUNDLE).config.metrics.get(TESTS_MADE))
    except BasisPruneError:
        return True


def write_tested(folder: Path | None, tested: Tested) -> None:
    """Writes it down before anybody callback of it; whole or not at all."""
    if folder is not None and Processes.here().is_main:
        tested.write(folder / TESTS)


ANSWERS, PAGE, CANNOT_TELL = "answers.json", "label.html", "?"
_FILE, _LABEL = ("file", "image", "filename", "path"), ("label", "choice", "class")
_UPLOADED = re.compile(r"[0-9a-f]{8}-")  # what Label Studio puts before the name of a file
_FORMULA = re.compile(r"'(?=[=+\-@\t\r])")
_SECONDS = 4.5  # to label an image
_MOST_BYTES = 128 << 20


@dataclass(frozen=True)
class Answers(JsonValue):
    """What networks answer for images without labels, in the random order in which these are labelled.

    `answers` are indices of `classes`, by the identity of the network; `labels` are names of classes, or "?", by image.
    """

    images: tuple[str, ...]
    classes: tuple[str, ...]
    answers: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, str] = field(default_factory=dict)

    def differences(self, before: str, after: str) -> Differences:
        """Return what became of each image, as far as it is labelled."""
        one, other = (np.array(self.answers[each]) for each in (before, after))
        numbers = {name: number for number, name in enumerate(self.classes)}
        found = np.where(one == other, 0, UNLABELLED).astype(np.int8)
        for place in np.flatnonzero(one != other).tolist():
            label = self.labels.get(self.images[place])
            if label is not None:
                right = numbers.get(label, -1)
                lost = int(one[place] == right) - int(other[place] == right)
                found[place] = LOST if label == CANNOT_TELL else lost
        return found

    def with_labels(self, labels: Mapping[str, str], where: str) -> Answers:
        """Return them with more labels; raise DataError for unknown images and classes, and for changed labels."""
        faults = []
        found, known = dict(self.labels), set(self.images)
        for name, label in labels.items():
            if name not in known:
                faults.append(f"{name}: no image of this run")
            elif label not in (*self.classes, CANNOT_TELL):
                faults.append(f"{name}: {label!r} is no class of this run")
            elif found.setdefault(name, label) != label:
                faults.append(f"{name}: was labelled {found[name]!r} before, and is {label!r} now; labels stay")
        if faults:
            raise DataError.of(where, faults)
        return replace(self, labels=found)


def read_answers(folder: Path) -> Answers | None:
    """Return what the run in the folder has kept; raise CheckpointError if that is damaged."""
    return Answers.read(folder / ANSWERS) if (folder / ANSWERS).exists() else None


def in_random_order(images: LabelledImages, seed: int) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the order in which images are labelled, and their names in it; of images of one unit, only the first."""
    first = np.arange(len(images)) if images.units is None else np.unique(images.units, return_index=True)[1]
    order = np.random.default_rng(seed).permutation(first)
    base, indices = base_of(images)
    return order, tuple(base.manifest_name(index, "unlabelled") for index in indices[order].tolist())


def read_labels(path: Path, images: Sequence[str]) -> dict[str, str]:
    """Read labels by image from a CSV file: ours, or an export of Label Studio, whose names of images may be longer."""
    found: dict[str, str] = {}
    faults: list[str] = []
    with readable(path, OSError, UnicodeDecodeError, csv.Error, advice="; write it as file,label in UTF-8"):
        rows = csv_rows(path, most=_MOST_BYTES)
        header = [cell.strip().casefold() for cell in next(rows, (0, []))[1]]
        places = [next((header.index(name) for name in names if name in header), None) for names in (_FILE, _LABEL)]
        if None in places:
            raise DataError(f"{path}: the first line is {','.join(header)[:80]!r}; columns file and label are needed")
        file, label = (int(place) for place in places if place is not None)
        resolve = _resolver(images)
        for number, row in rows:
            if len(row) <= max(file, label) or not row[label].strip():
                faults.append(f"line {number}: {','.join(row)[:80]!r} found; file,label is needed")
            else:
                name, said = resolve(_plain(row[file])), _plain(row[label])
                if found.setdefault(name, said) != said:
                    faults.append(f"line {number}: {name} is {said!r}, and was {found[name]!r} before")
            if len(faults) == MOST_FAULTS:
                break
    if faults:
        raise DataError.of(str(path), faults)
    return found


def _plain(cell: str) -> str:
    """Return a cell without the apostrophe that keeps a spreadsheet from computing it."""
    return _FORMULA.sub("", cell.strip(), count=1)


def _resolver(images: Sequence[str]) -> Callable[[str], str]:
    """Return a function that finds the image that a name in another tool means; a name that fits none stays."""
    exact, by_last = set(images), dict[str, str | None]()
    for name in images:
        last = PurePosixPath(name).name
        by_last[last] = None if last in by_last else name

    def resolve(text: str) -> str:
        path = PurePosixPath(unquote(text.replace("\\", "/")).rpartition("?d=")[2])
        parts = path.parts
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        whole = next((end for end in (text, *ends) if end in exact), None)
        return whole or by_last.get(path.name) or by_last.get(_UPLOADED.sub("", path.name, count=1)) or text

    return resolve


@dataclass(frozen=True)
class Labelling:
    """The tests of candidates, largest first, by labels; `value` is the unpruned validation accuracy."""

    guarantee: Guarantee
    kept: Answers
    reference: str
    order: Sequence[str]
    names: Sequence[str]
    value: float

    @property
    def test(self) -> SequentialTest:
        return SequentialTest(len(self.kept.images), self.guarantee.margin, self.guarantee.confidence)

    @property
    def is_open(self) -> bool:
        return any(decision.passed is None for _, decision in self.decided())

    def decided(self) -> Iterator[tuple[Differences, Decision]]:
        """Yield what became of the candidates, until one is undecided or fails."""
        for each in self.order:
            differences = self.kept.differences(self.reference, each)
            decision = self.test.decide(differences)
            yield differences, decision
            if not decision.passed:
                return

    def tests(self, indices: Sequence[int]) -> tuple[Test, ...]:
        """Return the tests that are decided, of the candidates with these places in the search."""
        found = []
        for place, (differences, decision) in enumerate(self.decided()):
            if decision.passed is None:
                break
            bound, margin = self.test.upper(differences), self.guarantee.margin
            drop = (decision.lost - decision.won) / decision.seen
            found.append(
                Test(
                    indices[place],
                    self.names[place],
                    self.value,
                    self.value - drop,
                    min(bound, margin) if decision.passed else max(bound, margin),
                    decision.p_value,
                    decision.lost,
                    decision.won,
                    decision.passed,
                )
            )
        return tuple(found)

    @property
    def differing(self) -> int:
        """The number of images on which the first candidate's answer differs."""
        one, other = (np.array(self.kept.answers[each]) for each in (self.reference, self.order[0]))
        return int((one != other).sum())

    def certificate(self, tests: tuple[Test, ...], folder: Path | None, command: str = "") -> Certificate:
        """Return what the labels certify so far, and what to do where they leave it open."""
        found = Certificate(
            "certified", self.guarantee.confidence, "accuracy", len(self.kept.images), tests=tests,
            labelled=len(self.kept.labels),
        )  # fmt: skip
        if found.delivered is not None:
            return found
        if tests:
            return replace(found, status="estimated", reason=failure(self.guarantee, tests[0], found.images))
        differing = int((self.kept.differences(self.reference, self.order[0]) == UNLABELLED).sum())
        minutes = max(round(differing * _SECONDS / 60), 1)
        where = "pass output=FOLDER to be asked for them" if folder is None else (
            f"label these in {folder / PAGE} (about {minutes} minute{'s' if minutes > 1 else ''}), then run: "
            f"{command or f'basisprune certify {folder} --labels labels.csv'}"
        )  # fmt: skip
        reason = f"on {differing:,} of {found.images:,} images without labels, the answers of the networks differ"
        return replace(found, status="estimated", reason=f"{reason}; {where}")

    def write_page(self, folder: Path, images: LabelledImages, order: npt.NDArray[np.int64], command: str = "") -> None:
        """Write the page that asks for the labels which still decide something; `command` then reads them."""
        answers = np.array([self.kept.answers[each] for each in (self.reference, *self.order)])
        base, indices = base_of(images)

        def question(place: int) -> Question:
            index = int(indices[order[place]])
            path = base.paths[index] if isinstance(base, FolderImages) else None
            said = tuple(answers[:, place].tolist())
            show = as_picture if base.prepared else picture_of
            return Question(self.kept.images[place], place, said, lambda: show(base[index][0]), path)

        page = LabelPage(
            f"labels for {folder.name}",
            f"{folder.resolve()} {self.reference[-16:]}",
            command or f"basisprune certify {folder} --labels labels.csv",
            self.kept.classes,
            self.names,
            self.test,
            [question(place) for place in np.flatnonzero((answers != answers[0]).any(0)).tolist()],
            self.kept.labels,
        )
        write_label_page(page, folder / PAGE)


def write_answers(folder: Path, answers: Answers) -> None:
    """Write down what networks answer and which labels were given, whole or not at all."""
    answers.write(folder / ANSWERS)
