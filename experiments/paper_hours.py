"""What the paper's 63 cells would take in GPU hours, from measured multiply-adds.

    python experiments/paper_hours.py            measures, writes results/paper_hours.json and the table in the docs

The cells are those of paper63.yaml, each run on its own. A training step takes three times the multiply-adds of a
forward pass, two operations each. Each cell trains its unpruned network, with a basis also the decomposed one, and then
as many candidates as `basisprune compress --dry-run` expects, for all epochs of the recipe. A candidate is taken to
have the mean of the multiply-adds of the unpruned network and of the paper's result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from cells import DATASETS, MODELS, PAPER

from basisprune import decompose, measure, transfer_model
from basisprune.files import write_text
from basisprune.recipes import DECOMPOSED, find_framework
from basisprune.runs.estimate import expected_candidates
from basisprune.runs.settings import Options, configure
from basisprune.sweeps.sweep import read_sweep
from basisprune.sweeps.table import BASELINE

HERE = Path(__file__).parent
FILE, RESULT, PAGE = HERE / "paper63.yaml", HERE / "results" / "paper_hours.json", HERE.parent / "docs" / "sweeps.md"
BEGIN, END = "<!-- hours:begin -->\n", "<!-- hours:end -->"
TRAIN_IMAGES = {"cifar10": 45_000, "mnist": 54_000, "fashion_mnist": 54_000}
"""The images that are trained on: 90 % of each training set."""

TFLOPS = (5, 20, 60)
"""Effective tera-operations a second, assumed: about a V100 in float32, an A100 in TF32, and an H100 in bf16."""

PASSES, OPERATIONS = 3, 2  # a step is a forward pass and two backward; a multiply-add is two operations


def multiply_adds(name: str, side: int) -> tuple[int, int]:
    """Those of a network for ten classes, as it is and decomposed, for one image of this size."""
    model = transfer_model(name, 10, input_size=side)
    return measure(model).macs, measure(decompose(model)).macs


def hours(operations: float, tflops: float) -> float:
    """The hours for so many operations.

    >>> hours(3.6e15, 1)
    1.0
    """
    return operations / (tflops * 1e12) / 3600


def cell(place: Any, options: dict[str, Any], macs: tuple[int, int]) -> dict[str, Any]:
    """The trainings of a cell, and all its operations."""
    config = configure(cast("Options", options))
    dense, decomposed = macs
    images, epochs = TRAIN_IMAGES[place.dataset], config.recipe.train.epochs
    steps, candidates = float(dense), 0
    decomposes = find_framework(place.framework).start == DECOMPOSED.name
    if place.framework != BASELINE:
        candidates = expected_candidates(config)
        removed = PAPER["tables"][place.dataset][place.model][place.framework]["flops_pr"] / 100
        steps += candidates * dense * (1 - removed / 2)
        if decomposes:
            steps += decomposed
    return {
        "model": place.model,
        "dataset": place.dataset,
        "framework": place.framework,
        "candidates": candidates,
        "decomposes": decomposes,
        "epochs": epochs,
        "images": images,
        "operations": steps * images * epochs * PASSES * OPERATIONS,
    }


def table(cells: list[dict[str, Any]]) -> str:
    """GPU hours of each network and dataset, its seven frameworks together, for each throughput."""
    lines = [
        f"| network | dataset | trainings | {' | '.join(f'{each} TFLOP/s' for each in TFLOPS)} |",
        f"| --- | --- | ---: | {' | '.join('---:' for _ in TFLOPS)} |",
    ]
    for model in MODELS:
        for dataset in DATASETS:
            own = [each for each in cells if (each["model"], each["dataset"]) == (model, dataset)]
            lines.append(_line(MODELS[model], DATASETS[dataset], own))
    return "\n".join([*lines, _line("**all**", f"{len(cells)} cells", cells)])


def _line(model: str, dataset: str, cells: list[dict[str, Any]]) -> str:
    trainings = sum(each["candidates"] + 1 + each["decomposes"] for each in cells)
    spent = [hours(sum(each["operations"] for each in cells), tflops) for tflops in TFLOPS]
    return f"| {model} | {dataset} | {trainings:,} | {' | '.join(f'{each:,.0f}' for each in spent)} |"


def main() -> None:
    sweep = read_sweep(FILE, HERE / "unused")
    known: dict[tuple[str, int], tuple[int, int]] = {}
    cells = []
    for place, each in sweep.cells.items():
        key = each.backbone.name, cast("int", each.options["size"])
        if key not in known:
            known[key] = multiply_adds(*key)
            print(key, known[key], flush=True)
        cells.append(cell(place, each.options, known[key]))
    measured = [{"model": name, "side": side, "dense": a, "decomposed": b} for (name, side), (a, b) in known.items()]
    config = {"tflops": TFLOPS, "passes": PASSES, "operations_per_multiply_add": OPERATIONS, "file": FILE.name}
    total = {str(each): round(hours(sum(one["operations"] for one in cells), each), 1) for each in TFLOPS}
    record = {"config": config, "multiply_adds": measured, "cells": cells, "gpu_hours": total}
    write_text(RESULT, json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    write_text(PAGE, f"{before}{BEGIN}{table(cells)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
