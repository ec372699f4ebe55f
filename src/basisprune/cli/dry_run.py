"""`basisprune compress --dry-run`: what would be done, and how long it would take."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from torch import nn

from basisprune.cli.common import show_json
from basisprune.costs import measure
from basisprune.data import Splits
from basisprune.deploy.fold import deploy
from basisprune.recipes import Recipe
from basisprune.runs.estimate import estimate
from basisprune.search import Budget, SearchConfig
from basisprune.training.progress import duration
from basisprune.transfer.model import spec_of


def show_plan(
    model: nn.Module,
    data: Splits,
    recipe: Recipe,
    search: SearchConfig,
    budget: Budget | None,
    ratios: tuple[float, float] | None,
    output: Path,
    *,
    as_json: bool,
) -> None:
    """Prints the plan and the time, measured on a few steps of training; writes nothing."""
    spec = spec_of(model)
    size = measure(deploy(model, spec, data.classes))
    time = estimate(model, data, recipe, search, budget)
    goal = {name: value for name, value in vars(budget).items() if value is not None} if budget else {}
    goal = goal or dict(zip(("basis_ratio", "filter_ratio"), ratios or (), strict=True))
    if as_json:
        plan: dict[str, Any] = {
            "images": {name: len(part) for name, part in data.parts.items()},
            "classes": list(data.classes),
            "parameters": size.parameters,
            "macs": size.macs,
            "goal": goal,
            "recipe": asdict(recipe),
            "search": asdict(search),
            "output": str(output),
            "candidates": time.candidates,
            "seconds": {"reference": time.reference, "candidate": time.candidate, "total": time.total},
        }
        show_json(plan)
        return
    wanted = ", ".join(f"{name} {value:g}" for name, value in goal.items())
    train, tune = recipe.train, recipe.finetune
    lines = [
        f"model    {size.parameters:,} parameters, {size.macs:,} multiply-adds at {spec.size[0]}x{spec.size[1]}",
        *(f"data     {line}" for line in data.describe().splitlines()),
        f"goal     {wanted}, by {search.framework}",
        f"recipe   {train.epochs} epochs to train, {tune.epochs} for each candidate at most, {train.optimizer}, "
        f"batches of {train.batch_size}",
        f"search   about {time.candidates} candidates",
        f"time     about {duration(time.total)} at most on this machine: {duration(time.reference)} for the unpruned "
        f"model, {duration(time.candidate)} for each candidate",
        f"output   {output}: config.yaml, summary.json, report.html, model/, model.onnx, candidates/",
        "nothing was written",
    ]
    typer.echo("\n".join(lines))
