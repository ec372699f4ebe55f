"""`basisprune compress --dry-run`: the plan and the expected time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from basisprune.budget import Budget, Goal
from basisprune.budget.metrics import Metric, in_points, in_words
from basisprune.callback import counted
from basisprune.cli.common import show, show_json
from basisprune.costs import measure
from basisprune.data import LoaderPart
from basisprune.deploy.fold import deploy
from basisprune.files import user_path
from basisprune.runs.certify import certifiable_here
from basisprune.runs.estimate import estimate
from basisprune.runs.folder import OutputFolder
from basisprune.runs.load import Job
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import BUDGETS, RATIOS
from basisprune.tasks import Task
from basisprune.training.progress import duration
from basisprune.transfer.model import spec_of


def show_plan(job: Job, output: Path, *, as_json: bool) -> None:
    """Prints the plan and the expected time, measured on a few training steps; writes nothing."""
    preflight(job, OutputFolder(user_path(output, "output")), job.to_dict())
    data, recipe, search, goal = job.splits, job.config.recipe, job.config.search, job.config.goal
    spec = spec_of(job.network)
    size = measure(deploy(job.network, spec, data.classes))
    time = estimate(job)
    limits = {name: value for name, value in job.config.to_dict().items() if name in (*BUDGETS, *RATIOS)}
    promise = job.config.guarantee
    certifiable = None if promise is None else certifiable_here(promise, data)
    if as_json:
        show_json(
            {
                "images": {name: len(part) for name, part in data.parts.items()},
                "classes": list(data.classes),
                "parameters": size.parameters,
                "macs": size.macs,
                "goal": limits,
                "certifiable": certifiable,
                "recipe": asdict(recipe),
                "search": asdict(search),
                "output": str(output),
                "candidates": time.candidates,
                "most_candidates": time.most,
                "seconds": {
                    "reference": time.reference,
                    "candidate": time.candidate,
                    "total": time.total,
                    "longest": time.longest,
                },
            }
        )
        return
    train, tune = recipe.train, recipe.finetune
    before = "the model as it is" if job.config.is_trained else f"{counted(train.epochs, 'epoch')} to train"
    batches = "batches of your loader" if isinstance(data.train, LoaderPart) else f"batches of {train.batch_size}"
    is_open = time.most > time.candidates
    most = f", rarely more than {time.most}" if is_open else ""
    longest = f", rarely more than {duration(time.longest)}" if is_open else ""
    lines = [
        f"model    {size.parameters:,} parameters, {size.macs:,} multiply-adds at {'x'.join(map(str, spec.size))}",
        *(f"data     {line}" for line in data.describe().splitlines()),
        f"goal     {_wanted(goal, job.config.metric)}, with {job.config.method.name}",
        *([] if certifiable is None else [f"promise  {certifiable}"]),
        f"recipe   {before}, at most {counted(tune.epochs, 'epoch')} per candidate, {train.optimizer}, {batches}",
        f"search   about {counted(time.candidates, 'candidate')}{most}",
        f"time     about {duration(time.total)} on this machine{longest}: {duration(time.reference)} for the unpruned "
        f"model, at most {duration(time.candidate)} per candidate",
        f"output   {output}: config.yaml, images.json, summary.json, report.html, model/, model.onnx, candidates/",
        "nothing was written",
    ]
    show(*lines)


def _wanted(goal: Goal, metric: Metric) -> str:
    """The goal in words.

    >>> _wanted(Budget(max_drop=0.0025), "accuracy"), _wanted(Budget(target_latency=5), "accuracy")
    ('lose at most 0.25 points of accuracy', 'at most 5 ms per image')
    >>> _wanted(Budget(min_accuracy=0.9555), "accuracy")
    'accuracy of at least 95.55%'
    """
    if not isinstance(goal, Budget):
        return f"remove {100 * goal.basis:g}% of the basis vectors and {100 * goal.filters:g}% of the filters"
    is_share = not isinstance(metric, Task) or metric.is_share
    if goal.max_drop is not None:
        most = in_points(goal.max_drop) if is_share else f"{goal.max_drop:g}"
        return f"lose at most {most} of {in_words(metric)}"
    if goal.min_accuracy is not None:
        least = f"{100 * goal.min_accuracy:g}%" if is_share else f"{goal.min_accuracy:g}"
        return f"{in_words(metric)} of at least {least}"
    if goal.target_latency is not None:
        return f"at most {goal.target_latency:g} ms per image"
    return f"at most {goal.value:,.0f} {'parameters' if goal.target_params is not None else 'multiply-adds'}"
