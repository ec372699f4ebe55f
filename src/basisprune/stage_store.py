"""Where a pipeline keeps what it has done, so that a run that was killed resumes where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import PartialState
from torch import nn

from basisprune.data import Splits
from basisprune.errors import CheckpointError, PlanError
from basisprune.files import write_text
from basisprune.frameworks import Steps
from basisprune.transfer.model import spec_of
from basisprune.types import BasisPlan, FilterPlan

Plan = TypeVar("Plan", BasisPlan, FilterPlan)
_LONGEST_NAME = 160


@dataclass(frozen=True)
class StageStore:
    """Networks, plans and numbers of a run, each by the steps that led to it; without a `root` nothing is kept.

    >>> from basisprune.frameworks import DECOMPOSED, Step
    >>> StageStore(Path("run")).path((DECOMPOSED, Step("basis", 0.5)), ".pt").name
    'decomposed-basis0.5.pt'
    """

    root: Path | None

    def path(self, steps: Steps, suffix: str) -> Path | None:
        """The file for what these steps made; None where nothing is kept."""
        if self.root is None:
            return None
        name = "-".join(str(step).replace(" ", "") for step in steps)
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.root / (name + suffix)

    def claim(self, common: Mapping[str, object]) -> None:
        """Notes what all starts of the run have in common; raises CheckpointError where it was something else."""
        if self.root is None:
            return
        text, path = json.dumps(common, indent=1) + "\n", self.root / "run.json"
        if _written_once(path, lambda: text) != text:
            raise CheckpointError(
                f"{path}: was made with other settings, weights or images than {common}; use another folder"
            )

    def number(self, steps: Steps, what: str, work: Callable[[], float]) -> float:
        """A number that is found only once, as it would not be the same again."""
        path = self.path(steps, f".{what}.json")
        return work() if path is None else float(_written_once(path, lambda: json.dumps(work())))

    def plan(self, steps: Steps, plan: Plan) -> Plan:
        """The plan that an earlier start of this run wrote here, or else this one, written now.

        Scores may differ in the last digit where devices do not add up in a fixed order; the network whose
        training goes on must still be the same.
        """
        path = self.path(steps, ".plan.json")
        if path is None:
            return plan
        text = _written_once(path, plan.to_json)
        try:
            old = type(plan).from_json(text)
        except PlanError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); delete it to plan anew") from error
        if (old.pruning_ratio, old.options) == (plan.pruning_ratio, plan.options):
            return old
        raise CheckpointError(
            f"{path}: was made for ratio {old.pruning_ratio} with {dict(old.options)}, now {plan.pruning_ratio} with "
            f"{dict(plan.options)} is asked for; use another folder"
        )


def _written_once(path: Path, text: Callable[[], str]) -> str:
    """The text in the file; where there is no file, this text is written there first, by one process."""
    state = PartialState()
    if state.is_main_process and not path.exists():
        write_text(path, text())
    state.wait_for_everyone()
    return path.read_text()


def fingerprint(model: nn.Module, splits: Splits) -> dict[str, object]:
    """What tells one run's network and images from another's: input, classes, weights and the split."""
    return {
        "input": asdict(spec_of(model)),
        "classes": list(splits.classes),
        "weights": _weights_digest(model),
        "data": _data_digest(splits),
    }


def _weights_digest(model: nn.Module) -> str:
    """A fingerprint of the weights that a run starts from, without the classifier, which may be drawn anew."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith("classifier."):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _data_digest(splits: Splits) -> str:
    """A fingerprint of the split: all labels in their order, and some images of each part."""
    digest = hashlib.sha256()
    for part in (splits.train, splits.val, splits.test):
        if part is not None:
            digest.update(np.asarray(part.labels, dtype=np.int64).tobytes())
            for index in range(0, len(part), max(1, len(part) // 8)):
                digest.update(np.ascontiguousarray(part[index][0]).tobytes())
    return digest.hexdigest()[:16]
