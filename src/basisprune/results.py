"""What a run found, as one frozen value that is written to JSON and read back here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import JsonValue, TypeAdapter, ValidationError

from basisprune.budget import Budget, Goal
from basisprune.candidates import Candidate
from basisprune.costs import LayerReport
from basisprune.deploy.latency import LatencyReport
from basisprune.errors import CheckpointError
from basisprune.files import write_text

Interval: TypeAlias = tuple[float, float]
Settings: TypeAlias = Mapping[str, JsonValue]
Matrix: TypeAlias = tuple[tuple[int, ...], ...]
Status: TypeAlias = Literal["chosen", "undecided", "passed", "failed"]
_QUANTITIES = {
    "max_drop": "accuracy",
    "min_accuracy": "accuracy",
    "target_params": "parameters",
    "target_macs": "macs",
    "target_latency": "latency_ms",
}


@dataclass(frozen=True)
class Accuracy:
    """How often a network is right on this many images, with its 95 % interval."""

    accuracy: float
    interval: Interval
    images: int


@dataclass(frozen=True)
class Side:
    """A network before or after pruning, in the form that is deployed: how good it is, and what it costs."""

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
    """How often each class (row) was taken for each (column), by the unpruned network and by the chosen one."""

    before: Matrix
    after: Matrix


@dataclass(frozen=True)
class ChangedImage:
    """An image, as a data address, of which the two networks say different things."""

    image: str
    label: str
    before: str
    after: str


@dataclass(frozen=True)
class LayerImportance:
    """The trained scale and the Taylor score of each basis vector of a layer, in the order of the basis."""

    scales: tuple[float | None, ...]
    taylor: tuple[float | None, ...]


@dataclass(frozen=True)
class DeliveredFile:
    """A file that was written; `accuracy` where it differs from that of the network."""

    bytes: int
    what: str
    accuracy: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class CandidateRow(Candidate):
    """A candidate by its name, and whether it was chosen."""

    name: str = ""
    chosen: bool = False

    @property
    def status(self) -> Status:
        """What became of it, in one word."""
        if self.chosen:
            return "chosen"
        return "undecided" if self.undecided else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class Limit:
    """What the run had to keep to; `kind` is "fixed" where the ratios were given."""

    kind: str
    value: float | None = None

    @classmethod
    def of(cls, goal: Goal) -> Limit:
        """The limit that a goal sets."""
        return cls(goal.kind, goal.value) if isinstance(goal, Budget) else cls("fixed")

    @property
    def quantity(self) -> str | None:
        """The quantity that is limited, None for fixed ratios.

        >>> Limit("target_params", 1_000_000).quantity
        'parameters'
        """
        return _QUANTITIES.get(self.kind)

    def bound(self, reference: float) -> float | None:
        """The most or the least that is allowed, given the accuracy of the unpruned network.

        >>> Limit("max_drop", 0.25).bound(0.75)
        0.5
        """
        return reference - (self.value or 0.0) if self.kind == "max_drop" else self.value


@dataclass(frozen=True)
class RunSummary:
    """All that is known of a run. The test images were looked at once, for `test`, `confusion` and `changed`."""

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

    @property
    def chosen(self) -> CandidateRow | None:
        """The candidate that was chosen."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    def to_json(self) -> str:
        """The summary as one JSON object; numbers that are not finite become null."""
        return _adapter().dump_json(self).decode()

    def as_dict(self) -> dict[str, JsonValue]:
        """The summary as JSON values; numbers that are not finite are None."""
        values: dict[str, JsonValue] = json.loads(self.to_json())
        return values

    @classmethod
    def from_json(cls, text: str | bytes) -> RunSummary:
        """The summary that `to_json` wrote; raises CheckpointError, with all faults, where it is not one."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            raise CheckpointError.of("summary", faults) from error

    def write(self, path: Path) -> None:
        """Writes the summary to a file."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def read(cls, path: Path) -> RunSummary:
        """The summary in a file."""
        return cls.from_json(path.read_bytes())


@cache
def _adapter() -> TypeAdapter[RunSummary]:
    return TypeAdapter(RunSummary)
