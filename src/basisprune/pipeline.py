"""The only file that knows the order of the stages (the paper's Section 3.5 and Algorithm 1)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from basisprune.checkpoint import write_text
from basisprune.config import Recipe, TrainConfig, find_recipe
from basisprune.data import LabelledImages, PreparedBatches, Splits, load_data
from basisprune.decompose import decompose
from basisprune.errors import CheckpointError, DataError
from basisprune.importance import taylor_scores
from basisprune.measure import measure
from basisprune.plan import plan_basis
from basisprune.prune import prune_basis
from basisprune.training import EpochRecord, classes_of, evaluate, fit, set_trainable, spec_of
from basisprune.types import BasisPlan, Scores

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """What a network was at one stage: accuracy on the held-out images, and what it costs."""

    name: str
    accuracy: float
    parameters: int
    trainable: int
    macs: int
    history: tuple[EpochRecord, ...] = ()


@dataclass(frozen=True)
class BasisPruned:
    """The pruned model with the scores and plan that led to it; `stages` tell the story."""

    model: nn.Module
    scores: Scores
    plan: BasisPlan
    stages: tuple[Stage, ...]

    def save_summary(self, path: str | Path) -> None:
        """Writes the stages and the plan as JSON."""
        summary: dict[str, Any] = {
            "stages": [asdict(stage) for stage in self.stages],
            "plan": json.loads(self.plan.to_json()),
        }
        write_text(Path(path), json.dumps(summary, indent=1) + "\n")


def basis_prune(
    model: nn.Module,
    data: Any,
    pruning_ratio: float,
    recipe: str | Recipe = "quick",
    *,
    checkpoints: str | Path | None = None,
    progress: bool | None = None,
    say: Say = lambda _: None,
) -> BasisPruned:
    """The model without the fraction `pruning_ratio` of its basis vectors, trained before and after.

    `model` comes from `transfer_model` and is not changed; `data` is anything that `load_data` takes. The
    steps are the paper's: decompose, train, score on the validation images, prune, train. The accuracies
    are those on the validation images, and that of the last stage on the test images where there are any.
    With `checkpoints`, a folder, a run that was killed goes on where it was.
    """
    recipe = find_recipe(recipe)
    spec = spec_of(model)
    splits = load_data(data, size=spec.size)
    val = _check(model, splits)
    folder = None if checkpoints is None else Path(checkpoints)
    stages: list[Stage] = []

    def train(name: str, network: nn.Module, config: TrainConfig) -> nn.Module:
        say(f"{name}: training for {config.epochs} epochs")
        path = None if folder is None else folder / f"{name.replace(' ', '-')}.pt"
        result = fit(network, splits.train, val, config, checkpoint=path, progress=progress, inplace=True)
        stages.append(_stage(name, result.model, val, result.history))
        return result.model

    say("decomposing every conv")
    images = PreparedBatches(splits.train, spec, limit=recipe.basis_images, shuffle=True)
    decomposed = decompose(
        model,
        scale_init=recipe.scale_init,
        basis=recipe.basis,
        batches=images if recipe.basis == "outputs" else None,
    )
    trained = train("decomposed", decomposed, recipe.train)
    say("scoring the basis vectors on the validation images")
    scores = taylor_scores(trained, PreparedBatches(val, spec))
    plan = _same_plan(folder, plan_basis(scores, pruning_ratio, recipe.plan))
    say(f"removing {plan.removed} of {plan.total} basis vectors")
    pruned = prune_basis(trained, plan, compensate=recipe.compensate)
    stages.append(_stage("pruned, not tuned", pruned, val))
    final = train("basis-pruned", pruned, recipe.finetune)
    if splits.test is not None:
        stages.append(_stage("basis-pruned, test images", final, splits.test))
    return BasisPruned(final, scores, plan, tuple(stages))


def _same_plan(folder: Path | None, plan: BasisPlan) -> BasisPlan:
    """The plan that an earlier start of this run wrote into the folder, or else this one, written there.

    Scores may differ in the last digit where devices do not add up in a fixed order; the network whose
    training goes on must still be the same.
    """
    if folder is None:
        return plan
    path = folder / "plan.json"
    if path.exists():
        old = BasisPlan.from_json(path.read_text())
        if (old.pruning_ratio, old.options) == (plan.pruning_ratio, plan.options):
            return old
        raise CheckpointError(
            f"{path}: was made for ratio {old.pruning_ratio} with {dict(old.options)}, now {plan.pruning_ratio} "
            f"with {dict(plan.options)} is asked for; use another folder"
        )
    write_text(path, plan.to_json())
    return plan


def _check(model: nn.Module, splits: Splits) -> LabelledImages:
    """The validation images; raises DataError where there are none, or other classes than the model's."""
    if classes_of(model) != splits.num_classes:
        raise DataError(
            f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), the model tells "
            f"{classes_of(model)} apart; build it with transfer_model(..., num_classes={splits.num_classes})"
        )
    if splits.val is None:
        raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
    return splits.val


def _stage(name: str, model: nn.Module, data: LabelledImages, history: tuple[EpochRecord, ...] = ()) -> Stage:
    set_trainable(model)
    report = measure(model)
    accuracy = evaluate(model, data).accuracy
    return Stage(name, accuracy, report.parameters, report.trainable, report.macs, history)
