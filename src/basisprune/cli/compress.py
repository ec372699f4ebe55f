"""`basisprune compress`: the smallest model within the budget."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from basisprune.callback import NullCallback
from basisprune.cli.common import (
    INTERRUPTED,
    NOT_KEPT,
    ConfigFile,
    Data,
    Json,
    Output,
    Teller,
    command_line,
    show,
    show_json,
    takes_options,
    tell,
    typed_here,
)
from basisprune.cli.portfolio import (
    Keep,
    Models,
    ProbeEpochs,
    WeightsFolder,
    choose,
    front_table,
    one_of,
    refuse_for_one,
    show_portfolio,
)
from basisprune.cli.sweep import Jobs, RayAddress
from basisprune.runs.settings import BUDGETS, OPTIONS, RATIOS, Options

if TYPE_CHECKING:
    from basisprune.results import RunSummary

OneModel = Annotated[
    str | None,
    typer.Option(
        rich_help_panel="Model",
        help="A timm name, hf-hub:owner/name, local-dir:folder, torchvision:name, package.module:factory, a model/ "
        "folder written by train, or auto for the best of several.",
    ),
]


@takes_options(*OPTIONS)
def compress(
    ctx: typer.Context,
    data: Data,
    output: Output,
    model: OneModel = None,
    models: Models = None,
    keep: Keep = 3,
    probe_epochs: ProbeEpochs = 1,
    weights_folder: WeightsFolder = None,
    jobs: Jobs = 1,
    ray_address: RayAddress = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the expected time; write nothing.")
    ] = False,
    as_json: Json = False,
    _config: ConfigFile = None,
    **options: object,
) -> None:
    """Make a pretrained model as small as your accuracy budget allows.

    Fine-tunes the model on your images, searches for the smallest network within the budget, and writes the model (a
    bundle for Python, and ONNX), a report for the browser, and all numbers as JSON. By default, accuracy may drop by
    1%; the budget is certified on images held out from training and search, if there are enough of them. With
    --unlabelled, images without labels serve for that. If interrupted, the same command resumes.

    \b
    Examples:
      basisprune compress --model resnet50 --data photos --output out
      basisprune compress --model auto --data photos --output out
      basisprune compress --model resnet50 --data photos --output out \\
          --target-params 1M
      basisprune compress --model resnet50 --data photos --output out \\
          --optimize latency
      basisprune compress --model my_module:network --weights my.safetensors \\
          --keep-head --data photos --output out
      basisprune compress --config out/config.yaml --max-drop 2% --output new

    Exit codes: 0 done, 1 error, 2 usage error, 3 no pruned model within the budget, none that could be written in any
    form or, with --require-certified, none that is certified, 130 interrupted, with the best result so far written.
    """
    several = one_of(model, models, (keep, probe_epochs, weights_folder))
    if several is not None:
        if dry_run:
            show_portfolio(several, as_json=as_json)
        asked = _goal_as_typed(ctx, options)
        summary = choose(several, data, output, asked, (jobs, ray_address), dry_run=dry_run)
        if summary is not None:
            finish(summary, output, as_json=as_json)
        return
    refuse_for_one(ctx)
    from basisprune.runs.compress import run_job
    from basisprune.runs.estimate import expected_candidates
    from basisprune.runs.load import prepare_job
    from basisprune.runs.settings import configure
    from basisprune.torchkit.processes import Processes
    from basisprune.training.progress import SearchProgress

    config = configure(_goal_as_typed(ctx, options))
    if dry_run:
        from basisprune.cli.dry_run import show_plan

        show_plan(prepare_job(str(model), data, config, output=output, callback=Teller()), output, as_json=as_json)
        return
    is_main = Processes.joined().is_main
    progress = SearchProgress(1 + expected_candidates(config), config.recipe.finetune.epochs, tell)
    with progress if is_main else nullcontext(NullCallback()) as bar:
        job = prepare_job(str(model), data, config, output=output, callback=bar)
        result = run_job(job, output=output, callback=bar, command=command_line())
    if is_main:
        finish(result.summary, output, as_json=as_json)


def finish(summary: RunSummary, output: Path, *, as_json: bool, images: Path = Path("image.jpg")) -> None:
    """Shows the result and exits with the matching exit code."""
    from basisprune.report.html import amount as amount_of
    from basisprune.report.text import comparison_table

    if as_json:
        show_json(summary.as_dict())
    else:
        if summary.portfolio is not None:
            show("", *front_table(summary.portfolio).splitlines())
        show("", *comparison_table(summary).splitlines(), "", *summary.verdict.splitlines(), "")
        if (output / "report.html").exists():  # needs an extra
            show(f"{output / 'report.html'}: the report, for a browser")
        for name, about in summary.files.items():
            form = ".1%" if summary.metric_is_share else ".4g"
            measured = "" if about.accuracy is None else f", {summary.metric} {about.accuracy:{form}}"
            measured += {"certified": ", certified", "estimated": ", estimated, not certified", None: ""}[about.promise]
            show(f"{output / name}: {amount_of(about.bytes, 'bytes')}, {about.what}{measured}")
        if summary.classes and summary.files:
            show(f"next: basisprune predict {output} {images}")
        elif "model" in summary.files:
            show(f"next, in Python: basisprune.from_pretrained({str(output / 'model')!r})")
    if summary.interrupted:
        tell("interrupted; this is the best result so far; run the same command again to resume")
        raise typer.Exit(INTERRUPTED)
    if not summary.fulfilled:
        raise typer.Exit(NOT_KEPT)


def _goal_as_typed(ctx: typer.Context, options: dict[str, object]) -> Options:
    """Drop the budgets of a file if one is typed on the command line."""
    limits = (*BUDGETS, *RATIOS)
    typed = [name for name in limits if options[name] is not None and typed_here(ctx, name)]
    others = {name for name in limits if typed and name not in typed}
    return cast("Options", {name: value for name, value in options.items() if name not in others})
