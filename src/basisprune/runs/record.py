"""The record of the tests on the confirming images, in the folder of a run: the order first, then each outcome."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from basisprune.budget.certify import Guarantee, Test
from basisprune.budget.metrics import metric_name, value_of
from basisprune.deploy.bundle.loading import holds_bundle, read_folder
from basisprune.errors import BasisPruneError, CheckpointError, PlanError
from basisprune.files import read_checked, write_checked
from basisprune.recipes import named
from basisprune.results import RunSummary
from basisprune.runs.folder import BUNDLE, SUMMARY
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
    """The networks to test, as `identity` names them, and the tests that were made of the first of them.

    `promised` is what they are tested for, as `promised` names it. `reference` is the unpruned network, and
    `computed_by` the program that ran the networks; `sums` are the checksums of the ONNX files that it ran, empty
    where it was PyTorch. `files` are the tests of files made of the last network, in order.
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
        """Whether a test has failed, which ends them."""
        return any(not test.passed for test in (*self.tests, *(each.test for each in self.files.values())))

    def with_test(self, test: Test, sha256: str = "") -> Tested:
        """With the next network's, and the checksum of the file that was run."""
        return replace(self, tests=(*self.tests, test), sums=(*self.sums, sha256))

    def with_file(self, name: str, made: FileTest) -> Tested:
        """With that of one more file."""
        return replace(self, files={**self.files, name: made})


def identity(trial: Evaluated) -> str:
    """A name for a network that no other has: how it came about, and the checksum of its weights as deployed."""
    found = hashlib.sha256()
    for name, tensor in sorted(trial.deployed.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{named(trial.state.steps)}, sha256 {found.hexdigest()}"


def promised(promise: Guarantee, reference: Outcomes, images: str) -> str:
    """A name for a promise on these confirming images, which `images` is the digest of.

    Functions have no content to compare, so that a metric is also known by its value for the unpruned network, whose
    answers on the validation images are given.
    """
    (budget,) = [f"{name} {value!r}" for name, value in vars(promise.budget).items() if value is not None]
    value = value_of(promise.metric, reference)
    return f"{budget}, {promise.confidence!r}, {metric_name(promise.metric)} of {value!r}, images {images}"


def read_tested(folder: Path | None) -> Tested | None:
    """What the run in the folder has tested; None before the first test.

    Raises CheckpointError for a file that is damaged: what it said is not known, so that nothing more may be tested.
    """
    if folder is None or not (folder / TESTS).exists():
        return None
    try:
        return Tested.from_json(read_checked(folder / TESTS))
    except (OSError, PlanError) as error:
        raise CheckpointError(f"{folder / TESTS}: cannot be read ({error})") from error


def has_been_tested(folder: Path | None) -> bool:
    """Whether other files of the run than the record tell of tests: the summary, or the bundle.

    What is damaged may have told of some.
    """
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
        write_checked(folder / TESTS, tested.to_json().encode())
