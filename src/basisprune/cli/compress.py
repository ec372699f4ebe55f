"""`basisprune compress`: the smallest model within the budget."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from basisprune.cli.common import (
    INTERRUPTED,
    NOT_KEPT,
    AugmentOption,
    ConfigFile,
    ConfirmFraction,
    Data,
    Epochs,
    Groups,
    Interpolation,
    Json,
    KeepHead,
    Limit,
    Mean,
    Output,
    PrecisionOption,
    Pretrained,
    RecipeOption,
    Seed,
    Size,
    Std,
    Strict,
    Teller,
    TestFraction,
    TrustCode,
    TuneFirst,
    ValFraction,
    Weights,
    WeightsKey,
    amount,
    as_given,
    command_line,
    fraction,
    level,
    milliseconds,
    show,
    show_json,
    tell,
    told_errors,
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
from basisprune.listener import Silence

if TYPE_CHECKING:
    from basisprune.results import RunSummary
    from basisprune.runs.options import Options

OneModel = Annotated[
    str | None,
    typer.Option(
        help="A timm model name, package.module:factory, a model/ folder written by train, or auto for the best of "
        "several."
    ),
]


def compress(
    ctx: typer.Context,
    data: Data,
    output: Output,
    model: OneModel = None,
    models: Models = None,
    max_drop: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="Accuracy you can lose (default: 1%).")
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(parser=level, metavar="PERCENT", help="Minimum accuracy, such as 95%.")
    ] = None,
    target_params: Annotated[
        int | None, typer.Option(parser=amount, metavar="NUMBER", help="Maximum number of parameters, such as 1.5M.")
    ] = None,
    target_macs: Annotated[
        int | None, typer.Option(parser=amount, metavar="NUMBER", help="Maximum number of multiply-adds, such as 200M.")
    ] = None,
    target_latency: Annotated[
        float | None, typer.Option(parser=milliseconds, metavar="TIME", help="Maximum time per image, such as 5ms.")
    ] = None,
    basis_ratio: Annotated[
        float | None,
        typer.Option(parser=fraction, metavar="PERCENT", help="No search: remove this share of basis vectors."),
    ] = None,
    filter_ratio: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="No search: remove this share of filters.")
    ] = None,
    optimize: Annotated[
        str | None,
        typer.Option(help="What to make small: params, macs or latency (default: params; latency for its target)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="FILE", help="Plan for the device that `basisprune profile` measured.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Pruning method: basis, l1, taylor, hrank, loss, basis+taylor, ... (default: the recipe's)."),
    ] = None,
    recipe: RecipeOption = "quick",
    epochs: Epochs = None,
    augment: AugmentOption = None,
    precision: PrecisionOption = None,
    search: Annotated[Any, typer.Option(parser=as_given, hidden=True)] = None,
    size: Size = None,
    pretrained: Pretrained = True,
    weights: Weights = None,
    weights_key: WeightsKey = None,
    keep_head: KeepHead = False,
    tune_first: TuneFirst = False,
    mean: Mean = None,
    std: Std = None,
    interpolation: Interpolation = None,
    val_fraction: ValFraction = 0.2,
    test_fraction: TestFraction = 0.1,
    confirm_fraction: ConfirmFraction = 0.5,
    limit: Limit = None,
    groups: Groups = None,
    strict: Strict = False,
    confidence: Annotated[
        float, typer.Option(parser=fraction, metavar="PERCENT", help="How surely an accuracy budget is to be kept.")
    ] = 0.95,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What accuracy budgets are counted in: accuracy, balanced, macro-f1 or worst-class; for other tasks "
            "iou or dice, ap or f1, r2, mae or mse."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What the model is for: classification, segmentation, multilabel, regression, or package.module:task."
        ),
    ] = None,
    require_certified: Annotated[
        bool, typer.Option("--require-certified", help="Exit with code 3 if the budget is only estimated to be kept.")
    ] = False,
    onnx: Annotated[
        bool | None, typer.Option(help="Also write model.onnx (default: if its packages are installed).")
    ] = None,
    int8: Annotated[bool, typer.Option(help="Also write model.int8.onnx, calibrated on your images.")] = False,
    seed: Seed = 0,
    trust_code: TrustCode = False,
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
) -> None:
    """Make a pretrained model as small as your accuracy budget allows.

    Fine-tunes the model on your images, searches for how much can be removed, and writes a folder with the model (a
    bundle for Python, and ONNX), a report for the browser, and all numbers as JSON. The default budget is 1 %
    accuracy; it is certified on images that the search has not seen, if there are enough of them. If interrupted, the
    same command resumes.

    \b
    Examples:
      basisprune compress --model resnet50 --data photos --output out
      basisprune compress --model mobilenetv3_large_100 --data photos --target-params 1M --int8 --output out
      basisprune compress --model auto --data photos --output out              (which backbone to start from)
      basisprune compress --model resnet50 --data photos --optimize latency --device device.json --output out
      basisprune compress --model my_module:network --weights my.safetensors --keep-head --data photos --output out
      basisprune compress --config out/config.yaml --max-drop 2% --output another --dry-run

    Exit codes: 0 done, 1 error, 2 usage error, 3 no pruned model within the budget, none that could be written in any
    form or, with --require-certified, none that is certified, 130 interrupted, with the best result so far written.
    """
    several = one_of(model, models, (keep, probe_epochs, weights_folder))
    if several is not None:
        with told_errors():
            if dry_run:
                show_portfolio(several, as_json=as_json)
            summary = choose(several, data, output, _options(ctx), (jobs, ray_address), dry_run=dry_run)
        if summary is not None:
            finish(summary, output, as_json=as_json)
        return
    refuse_for_one(ctx)
    with told_errors():
        from basisprune.runs.compress import run_job
        from basisprune.runs.estimate import expected_candidates
        from basisprune.runs.job import prepare_job
        from basisprune.runs.options import configure
        from basisprune.torchkit.processes import Processes
        from basisprune.training.progress import SearchProgress

        config = configure(_options(ctx))
        if dry_run:
            from basisprune.cli.dry_run import show_plan

            show_plan(prepare_job(str(model), data, config, output=output, listener=Teller()), output, as_json=as_json)
            return
        is_main = Processes.joined().is_main
        progress = SearchProgress(1 + expected_candidates(config), config.recipe.finetune.epochs, tell)
        with progress if is_main else nullcontext(Silence()) as bar:
            job = prepare_job(str(model), data, config, output=output, listener=bar)
            result = run_job(job, output=output, listener=bar, command=command_line())
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


def _options(ctx: typer.Context) -> Options:
    """The settings among the command's options; a budget on the command line overrides one in a file."""
    from basisprune.runs.options import BUDGETS, RATIOS, Options

    limits = (*BUDGETS, *RATIOS)
    given = {name: value for name, value in ctx.params.items() if name in Options.__annotations__}
    typed = [name for name in limits if given.get(name) is not None and typed_here(ctx, name)]
    if typed:
        given = {name: value for name, value in given.items() if name not in limits or name in typed}
    return cast("Options", given)
