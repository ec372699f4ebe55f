"""Results of runs -> cells for tables and figures; the paper's own numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import studies

DEFAULT = "default"
MODELS = {"resnet50": "ResNet-50", "vgg16": "VGG-16", "densenet121": "DenseNet-121"}
DATASETS = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}
LABELS = {
    "baseline": "Unpruned",
    "decomposed": "Decomposed, unpruned",
    "l1": "L1",
    "taylor": "Taylor-FO",
    "hrank": "HRank",
    "basis": "Basis",
    "basis+taylor": "Basis + Taylor-FO",
    "basis+hrank": "Basis + HRank",
}
"""The paper's names for its frameworks; peers keep their own names."""

PAPER: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text())
"""The paper's Tables 1 to 4 as printed, and the layers of its Figure 2, counted from 1."""


@dataclass(frozen=True)
class Cell:
    """The result of one run of `run.py`; `result` is `baseline` if nothing was pruned."""

    model: str
    dataset: str
    framework: str
    variant: str
    seed: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    baseline: Mapping[str, Any]
    result: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]] = ()
    scales: Mapping[str, Mapping[str, Sequence[float]]] | None = None

    @property
    def pruned(self) -> bool:
        """Whether anything was removed; if nothing passed, the result is the unpruned network."""
        return any(self.result.get(ratio, 0) > 0 for ratio in ("basis_ratio", "filter_ratio"))

    @property
    def limit(self) -> float:
        """The accuracy that may be lost on the validation images."""
        budget = self.config["budget"]
        if budget["max_drop"] is not None:
            return float(budget["max_drop"])
        return float(self.baseline["val_accuracy"] - budget["min_accuracy"])

    @property
    def drops(self) -> tuple[float, float]:
        """The accuracy lost on validation and test images."""
        val = self.baseline["val_accuracy"] - self.result["val_accuracy"]
        return val, self.result.get("test_drop", 0.0)

    @property
    def passes(self) -> int:
        """The total number of epochs that all candidates were tuned for."""
        return sum(len(candidate["history"]) for candidate in self.candidates[1:])  # the first is the unpruned one


def read_cells(study: Path) -> tuple[Cell, ...]:
    """All results of the study, sorted by seed; exits with a hint if there are none."""
    names = {field.name for field in fields(Cell)}
    found = []
    for record in studies.read(study).values():
        values = {key: value for key, value in record.items() if key in names} | {"seed": int(record["seed"])}
        found.append(Cell(**{"result": record["baseline"]} | values))
    if not found:
        raise SystemExit(f"{study}: no results there; create them with `python experiments/run.py --assets DIR`")
    return tuple(sorted(found, key=lambda cell: cell.seed))


def pick(
    cells: Iterable[Cell], model: str, dataset: str, framework: str | None = None, variant: str = DEFAULT
) -> list[Cell]:
    """The cells of a network on a dataset, sorted by seed, for one framework or all."""
    return [
        cell
        for cell in cells
        if (cell.model, cell.dataset, cell.variant) == (model, dataset, variant) and framework in (None, cell.framework)
    ]


def label(framework: str) -> str:
    """A framework's name in the tables.

    >>> label("basis+taylor"), label("truncated svd")
    ('Basis + Taylor-FO', 'truncated svd')
    """
    return LABELS.get(framework, framework)


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean.

    >>> mean([1, 2])
    1.5
    """
    listed = list(values)
    return sum(listed) / len(listed)
