"""Intermediate results of a pipeline, so that a run that was killed resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from torch import nn

from basisprune.data import Splits
from basisprune.data.roles import manifest_of
from basisprune.errors import CheckpointError, PlanError
from basisprune.files import write_text
from basisprune.frameworks import Steps
from basisprune.transfer.model import spec_of
from basisprune.types import BasisPlan, FilterPlan

Plan = TypeVar("Plan", BasisPlan, FilterPlan)
_LONGEST_NAME = 160


@dataclass(frozen=True)
class StageStore:
    """Networks, plans and numbers of a run, stored by the steps that led to them; without a `root`, nothing is stored.

    >>> from basisprune.frameworks import DECOMPOSED, Step
    >>> StageStore(Path("run")).path((DECOMPOSED, Step("basis", 0.5)), ".pt").name
    'decomposed-basis0.5.pt'
    """

    root: Path | None

    def path(self, steps: Steps, suffix: str) -> Path | None:
        """The file for the result of these steps; None if nothing is stored."""
        if self.root is None:
            return None
        name = "-".join(str(step).replace(" ", "") for step in steps)
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.root / (name + suffix)

    def claim(self, common: Mapping[str, object]) -> None:
        """Records what all starts of the run have in common; raises CheckpointError if it differs."""
        if self.root is None:
            return
        text, path = json.dumps(common, indent=1) + "\n", self.root / "run.json"
        if _written_once(path, lambda: text) != text:
            raise CheckpointError(
                f"{path}: was created with other settings, weights or images than {common}; use another folder"
            )

    def number(self, steps: Steps, what: str, work: Callable[[], float]) -> float:
        """A number that is measured only once, because it would differ the next time."""
        path = self.path(steps, f".{what}.json")
        return work() if path is None else float(_written_once(path, lambda: json.dumps(work())))

    def plan(self, steps: Steps, plan: Plan) -> Plan:
        """The plan that an earlier start of this run stored, or else this one, stored now.

        Scores can differ in the last digit on devices that do not sum in a fixed order, but the network whose
        training resumes must be the same.
        """
        path = self.path(steps, ".plan.json")
        if path is None:
            return plan
        text = _written_once(path, plan.to_json)
        try:
            old = type(plan).from_json(text)
        except PlanError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to plan again") from error
        if (old.pruning_ratio, old.options) == (plan.pruning_ratio, plan.options):
            return old
        raise CheckpointError(
            f"{path}: was created for ratio {old.pruning_ratio} with {dict(old.options)}, but {plan.pruning_ratio} "
            f"with {dict(plan.options)} was requested; use another folder"
        )


def _written_once(path: Path, text: Callable[[], str]) -> str:
    """The text in the file; if it does not exist, one process writes this text first."""
    state = PartialState()
    if state.is_main_process and not path.exists():
        write_text(path, text())
    state.wait_for_everyone()
    return path.read_text()


def fingerprint(model: nn.Module, splits: Splits) -> dict[str, object]:
    """What identifies a run's network and images: input, classes, weights and the split."""
    return {
        "input": asdict(spec_of(model)),
        "classes": list(splits.classes),
        "weights": _weights_digest(model),
        "images": manifest_of(splits).digest,
    }


def _weights_digest(model: nn.Module) -> str:
    """A fingerprint of the initial weights, without the classifier, which may be reinitialised."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("classifier."):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
