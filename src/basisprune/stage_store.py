"""Intermediate results of a pipeline, so that a run that was killed resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from basisprune.data import LoaderPart, Splits
from basisprune.data.manifest import manifest_of
from basisprune.errors import CheckpointError, ConfigError, PlanError
from basisprune.files import Json, clear_leftovers, parse_json, read_checked, sound_or_aside, write_checked
from basisprune.frameworks import Steps
from basisprune.joint_plan.times import TimeTable
from basisprune.torchkit.processes import Processes
from basisprune.transfer.model import TransferModel, spec_of
from basisprune.types import BasisPlan, FilterPlan, JointPlan, dotted

logger = logging.getLogger(__name__)

CLAIM, TIMES = "run.json", "times.json"
Plan = TypeVar("Plan", BasisPlan, FilterPlan, JointPlan)
_LONGEST_NAME = 160


@dataclass(frozen=True)
class StageStore:
    """Networks, plans and numbers of a run, stored by the steps that led to them; without a `root`, nothing is stored.

    Each file ends in its checksum. One that is damaged is set aside under another name, which `log` is told, and made
    again.

    >>> from basisprune.frameworks import DECOMPOSED, Step
    >>> StageStore(Path("run")).path((DECOMPOSED, Step("basis", 0.5)), ".pt").name
    'decomposed-basis0.5.pt'
    """

    root: Path | None
    log: Callable[[str], None] = logger.warning

    def path(self, steps: Steps, suffix: str) -> Path | None:
        """The file for the result of these steps; None if nothing is stored."""
        if self.root is None:
            return None
        name = "-".join(str(step).replace(" ", "") for step in steps)
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.root / (name + suffix)

    def claim(self, common: Mapping[str, object]) -> None:
        """Records what all starts of the run have in common; raises CheckpointError that lists what differs."""
        if self.root is None:
            return
        root = self.root
        Processes.here().on_main(lambda: clear_leftovers(root))
        path, new = self.root / CLAIM, json.loads(json.dumps(common))
        _compare(path, self._written_once(path, lambda: json.dumps(new, indent=1)), new)

    def check(self, common: Mapping[str, object]) -> None:
        """Raise the error that `claim` would raise for an earlier start with other settings; writes nothing."""
        if self.root is None or not (self.root / CLAIM).is_file():
            return
        try:
            old = parse_json(read_checked(self.root / CLAIM))
        except (CheckpointError, ValueError):
            return  # it will be made again
        _compare(self.root / CLAIM, old, json.loads(json.dumps(common)))

    def number(self, steps: Steps, what: str, work: Callable[[], float]) -> float:
        """A number that is measured only once, because it would differ the next time."""
        path = self.path(steps, f".{what}.json")
        found = self._written_once(path, lambda: json.dumps(work()))
        if isinstance(found, int | float):
            return float(found)
        raise CheckpointError(f"{path}: does not hold a number; delete it to measure again")

    def plan(self, steps: Steps, plan: Plan) -> Plan:
        """The plan that an earlier start of this run stored, or else this one, stored now.

        Scores can differ in the last digit on devices that do not sum in a fixed order, but the network whose
        training resumes must be the same.
        """
        path = self.path(steps, ".plan.json")
        if path is None and Processes.here().count == 1:
            return plan
        found = self._written_once(path, plan.to_json)
        try:
            old = type(plan).from_json(json.dumps(found))
        except PlanError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to plan again") from error
        if (old.pruning_ratio, old.options) == (plan.pruning_ratio, plan.options):
            return old
        raise CheckpointError(
            f"{path}: was created for ratio {old.pruning_ratio} with {dict(old.options)}, but {plan.pruning_ratio} "
            f"with {dict(plan.options)} was requested; use another folder"
        )

    def times(self, work: Callable[[], TimeTable]) -> TimeTable:
        """The times that this run plans by, which are measured only once: others would give other plans."""
        path = None if self.root is None else self.root / TIMES
        found = self._written_once(path, lambda: work().to_json())
        try:
            return TimeTable.from_json(json.dumps(found))
        except (PlanError, ConfigError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to measure again") from error

    def _written_once(self, path: Path | None, text: Callable[[], str]) -> Json:
        """What the JSON in the file says; if there is none, or a damaged one, the main process writes this text first.

        The other processes of a distributed run are told, and need not see the file. Nothing is written without a path.
        """

        def content() -> bytes:
            if path is None:
                return text().encode()
            if sound_or_aside(path, self.log) is None:
                write_checked(path, text().encode())
            return read_checked(path)

        try:
            return parse_json(Processes.here().from_main(content))
        except ValueError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to make it again") from error


def _compare(path: Path, old: Json, new: Mapping[str, object]) -> None:
    """Raises CheckpointError that lists what differs."""
    before, after = dict(dotted(old if isinstance(old, dict) else {})), dict(dotted(new))
    differing = [
        f"{name}: {_shown(before.get(name))} there, {_shown(after.get(name))} now"
        for name in {**before, **after}
        if before.get(name, ...) != after.get(name, ...)
    ]
    if differing:
        raise CheckpointError.of(
            f"{path}: was created with other settings, weights or images; use another folder", differing
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def fingerprint(model: nn.Module, splits: Splits, *, with_head: bool = False) -> dict[str, object]:
    """What identifies a run's network and images: input, classes, weights and the split.

    The classifier of a transfer model counts only `with_head`: a new one is drawn at each start.
    """
    found: dict[str, object] = {
        "input": asdict(spec_of(model)),
        "classes": list(splits.classes),
        "weights": _weights_digest(model, with_head=with_head),
        "images": manifest_of(splits).digest,
    }
    targets = {name: part.targets_hash for name, part in splits.parts.items() if isinstance(part, LoaderPart)}
    return found | ({"targets": targets} if targets else {})


def _weights_digest(model: nn.Module, *, with_head: bool) -> str:
    """A fingerprint of the initial weights; without the classifier, if that may be reinitialised."""
    with_head = with_head or not isinstance(model, TransferModel)  # all others have their own
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if with_head or not name.startswith("classifier."):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
