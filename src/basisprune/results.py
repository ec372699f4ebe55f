"""The results of a run as one frozen value, written to JSON and read back only here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import JsonValue, TypeAdapter

from basisprune.budget import Budget, Goal
from basisprune.budget.certify import Certificate, Test
from basisprune.costs import LayerReport
from basisprune.deploy.latency import LatencyReport
from basisprune.errors import CheckpointError
from basisprune.files import Json, read_bytes, sealed, unsealed, write_text
from basisprune.search.candidates import Candidate
from basisprune.types import JsonValue as JsonObject
from basisprune.types import read_json

Interval: TypeAlias = tuple[float, float]
Settings: TypeAlias = Mapping[str, JsonValue]
Matrix: TypeAlias = tuple[tuple[int, ...], ...]
_MOST_BYTES = 64 << 20
_QUANTITIES = {
    "max_drop": "accuracy",
    "min_accuracy": "accuracy",
    "target_params": "parameters",
    "target_macs": "macs",
    "target_latency": "latency_ms",
}


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a network on this many images, with its 95% interval."""

    accuracy: float
    interval: Interval
    images: int


@dataclass(frozen=True)
class Side:
    """A network before or after pruning, in deployed form: how good it is, and what it costs."""

    accuracy: float
    interval: Interval
    parameters: int
    macs: int
    latency_ms: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class BeforeAndAfter:
    """The unpruned network and the chosen one, on the same images."""

    before: Side
    after: Side


@dataclass(frozen=True)
class Confusion:
    """How often each class (row) was predicted as each (column), by the unpruned and by the chosen network."""

    before: Matrix
    after: Matrix


@dataclass(frozen=True)
class ChangedImage:
    """An image, as a data URL, that the two networks classify differently."""

    image: str
    label: str
    before: str
    after: str


@dataclass(frozen=True)
class ShownMask:
    """An image as a data URL, and its true mask, the one before and the one after pruning, likewise."""

    image: str
    truth: str
    before: str
    after: str


@dataclass(frozen=True)
class Errors:
    """The error of each of some examples, of the unpruned and of the chosen network, on a part of the data."""

    part: str
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class ClassLoss:
    """What a class lost, with the paired 95% interval; `beyond` the budget, and beyond chance among so many classes."""

    name: str
    images: int
    before: float
    after: float
    loss_interval: Interval
    beyond: bool = False


@dataclass(frozen=True)
class ClassLosses:
    """What each class lost on a part of the images; `rival` is the share of the largest class."""

    part: str
    rival: float
    classes: tuple[ClassLoss, ...]

    @property
    def beyond(self) -> tuple[ClassLoss, ...]:
        return tuple(each for each in self.classes if each.beyond)


@dataclass(frozen=True)
class LayerImportance:
    """The trained scale and the Taylor score of each basis vector of a layer, in basis order."""

    scales: tuple[float | None, ...]
    taylor: tuple[float | None, ...]


@dataclass(frozen=True)
class DeliveredFile:
    """A file that was written, with its checksum; `accuracy` only if it differs from that of the network.

    `promise` says of an ONNX file whether it is certified, `test` is that of a file that was tested on its own, and
    `fault` says how it breaks the budget. `exported` means that `basisprune export` wrote it.
    """

    bytes: int
    what: str
    accuracy: float | None = None
    interval: Interval | None = None
    sha256: str = ""
    test: Test | None = None
    promise: Literal["certified", "estimated"] | None = None
    fault: str = ""
    exported: bool = False


@dataclass(frozen=True)
class RuntimeRow:
    """The delivered network in one runtime, or in PyTorch, which has no file.

    `difference` is the largest from PyTorch's output, relative to the largest, `same` the share of equal answers, on
    `compared` images, 0 for random ones. `latency_ms` is that of one image, measured alternately with the other rows.
    """

    name: str
    title: str
    file: str
    bytes: int
    latency_ms: float
    spread_ms: float
    threads: int
    difference: float = 0.0
    same: float = 1.0
    compared: int = 0
    accuracy: float | None = None
    interval: Interval | None = None
    images: int = 0


@dataclass(frozen=True)
class CandidateRow(Candidate):
    """A candidate with its name, and whether it was chosen."""

    name: str = ""
    chosen: bool = False

    @property
    def status(self) -> Literal["chosen", "undecided", "passed", "failed"]:
        if self.chosen:
            return "chosen"
        return "undecided" if self.undecided else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class FrontPoint:
    """A network among others, with its accuracy in validation; no other beats one on the `front` in all that counts."""

    group: str
    name: str
    accuracy: float
    interval: Interval
    parameters: int
    macs: int
    latency_ms: float | None = None
    front: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class BackboneRow:
    """A backbone of a portfolio, and how far it came; `accuracy` is the last one, on the validation images."""

    name: str
    status: Literal["compressed", "dropped", "missing", "failed"]
    said: str = ""
    epochs: int = 0
    accuracy: float | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Portfolio(JsonObject):
    """What a choice among backbones came to: the one that accuracies are compared with, and the recommended one."""

    reference: str
    recommended: str
    backbones: tuple[BackboneRow, ...]
    points: tuple[FrontPoint, ...]
    latency_by: str = ""


@dataclass(frozen=True)
class Limit:
    """The limit of the run; `kind` is "fixed" if the ratios were given."""

    kind: str
    value: float | None = None

    @classmethod
    def of(cls, goal: Goal) -> Limit:
        return cls(goal.kind, goal.value) if isinstance(goal, Budget) else cls("fixed")

    @property
    def quantity(self) -> str | None:
        """The limited quantity, None for fixed ratios.

        >>> Limit("target_params", 1_000_000).quantity
        'parameters'
        """
        return _QUANTITIES.get(self.kind)

    def bound(self, reference: float) -> float | None:
        """The maximum or minimum allowed, given the accuracy of the unpruned network.

        >>> Limit("max_drop", 0.25).bound(0.75)
        0.5
        """
        return reference - (self.value or 0.0) if self.kind == "max_drop" else self.value


@dataclass(frozen=True)
class Finding:
    """The verdict and the headline without the files."""

    verdict: str
    headline: str


@dataclass(frozen=True)
class RunSummary:
    """All results of a run. The test images were used once, for `test`, `confusion` and `changed`.

    Where the `task` is not classification, every accuracy is its `metric`. `not_written` says why the folder lacks a
    form of the network.
    """

    title: str
    command: str
    config: Settings
    seed: int
    versions: Mapping[str, str]
    device: str
    created: str
    verdict: str
    budget: Limit
    classes: tuple[str, ...]
    reference: Side
    candidates: tuple[CandidateRow, ...]
    layers: tuple[LayerReport, ...]
    headline: str = ""
    interrupted: bool = False
    kept_to_budget: bool = True
    latency_by: str = ""
    importance: Mapping[str, LayerImportance] = field(default_factory=dict)
    test: BeforeAndAfter | None = None
    confusion: Confusion | None = None
    changed: tuple[ChangedImage, ...] = ()
    latency: LatencyReport | None = None
    files: Mapping[str, DeliveredFile] = field(default_factory=dict)
    certificate: Certificate | None = None
    class_losses: ClassLosses | None = None
    require_certified: bool = False
    runtimes: tuple[RuntimeRow, ...] = ()
    portfolio: Portfolio | None = None
    task: str = "classification"
    metric: str = "accuracy"
    metric_is_share: bool = True
    masks: tuple[ShownMask, ...] = ()
    errors: Errors | None = None
    not_written: Mapping[str, str] = field(default_factory=dict)
    finding: Finding | None = None

    @property
    def is_undelivered(self) -> bool:
        """Whether the network was to be written to a folder, and no form of it could be."""
        return bool(self.not_written) and not self.files

    @property
    def fulfilled(self) -> bool:
        """Whether network and files keep the budget, certified if that is required, and a file can be used."""
        passed = all(file.promise != "estimated" for file in self.files.values())
        certified = self.certificate is not None and self.certificate.certified and passed
        kept = self.kept_to_budget and not any(file.fault for file in self.files.values())
        return kept and (certified or not self.require_certified) and not self.is_undelivered

    @property
    def chosen(self) -> CandidateRow | None:
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    def to_json(self) -> str:
        return _adapter().dump_json(self).decode()

    def as_dict(self) -> dict[str, JsonValue]:
        """The summary as JSON values; numbers that are not finite are None."""
        values: dict[str, JsonValue] = json.loads(self.to_json())
        return values

    @classmethod
    def from_json(cls, text: str | bytes) -> RunSummary:
        """The summary written by `to_json`; raises CheckpointError that lists all faults if it is invalid."""
        return read_json(cls, text, CheckpointError, "summary", strict=False)

    def write(self, path: Path) -> None:
        write_text(path, sealed(self.to_json()))

    @classmethod
    def read(cls, path: Path) -> RunSummary:
        """The summary in a file; raises CheckpointError if it is damaged or cannot be read."""
        try:
            return cls.from_json(json.dumps(read_sealed(path)))
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"{path}: cannot be read: {said}; repeat the run's command to write it again"
            ) from error


def read_sealed(path: Path) -> dict[str, Json]:
    """The entries of the summary of a run in a file; raises OSError or ValueError if it is damaged."""
    return unsealed(read_bytes(path, most=_MOST_BYTES))


@cache
def _adapter() -> TypeAdapter[RunSummary]:
    return TypeAdapter(RunSummary)
