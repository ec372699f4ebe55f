"""The folder of a run, in which one that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from basisprune.errors import CheckpointError, PlanError
from basisprune.files import write_text
from basisprune.types import BasisPlan, FilterPlan

Plan = TypeVar("Plan", BasisPlan, FilterPlan)
_LONGEST_NAME = 160


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its networks, plans and numbers, each under a key; without a `root` nothing is kept.

    >>> RunFolder(Path("run")).path("decomposed, basis 0.5", ".pt").name
    'decomposed-basis0.5.pt'
    """

    root: Path | None

    def path(self, key: str, suffix: str) -> Path | None:
        """The file for what has this key; None where nothing is kept."""
        if self.root is None:
            return None
        name = key.replace(", ", "-").replace(" ", "")
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.root / (name + suffix)

    def claim(self, common: Mapping[str, Any]) -> None:
        """Notes what all starts of the run have in common; raises CheckpointError where it was something else."""
        if self.root is None:
            return
        text, path = json.dumps(common, indent=1) + "\n", self.root / "run.json"
        if _written_once(path, lambda: text) != text:
            raise CheckpointError(
                f"{path}: was made with other settings, weights or images than {common}; use another folder"
            )

    def number(self, key: str, work: Callable[[], float]) -> float:
        """A number that is found only once, as it would not be the same again."""
        path = self.path(key, ".json")
        return work() if path is None else float(_written_once(path, lambda: json.dumps(work())))

    def plan(self, key: str, plan: Plan) -> Plan:
        """The plan that an earlier start of this run wrote here, or else this one, written now.

        Scores may differ in the last digit where devices do not add up in a fixed order; the network whose
        training goes on must still be the same.
        """
        path = self.path(key, ".plan.json")
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
