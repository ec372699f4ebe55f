"""`basisprune compress`: the smallest model within the accuracy that can be lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basisprune.cli.common import (
    INTERRUPTED,
    NOT_KEPT,
    ConfigFile,
    Data,
    Epochs,
    Json,
    Limit,
    Model,
    Output,
    Pretrained,
    RecipeOption,
    Seed,
    Size,
    TestFraction,
    ValFraction,
    amount,
    as_given,
    command_line,
    fraction,
    milliseconds,
    show_json,
    tell,
    told_errors,
    typed_here,
)

if TYPE_CHECKING:
    from basisprune.recipes import Recipe
    from basisprune.runs.compress import Compressed
    from basisprune.search import Budget, Candidate, SearchConfig

_RATIOS = ("basis_ratio", "filter_ratio")


def compress(
    ctx: typer.Context,
    model: Model,
    data: Data,
    output: Output,
    max_drop: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="The accuracy that may be lost; 1%.")
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="The least accuracy, such as 95%.")
    ] = None,
    target_params: Annotated[
        int | None, typer.Option(parser=amount, metavar="NUMBER", help="The most parameters, such as 1.5M.")
    ] = None,
    target_macs: Annotated[
        int | None, typer.Option(parser=amount, metavar="NUMBER", help="The most multiply-adds, such as 200M.")
    ] = None,
    target_latency: Annotated[
        float | None, typer.Option(parser=milliseconds, metavar="TIME", help="The longest for one image, such as 5ms.")
    ] = None,
    basis_ratio: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="No search: remove so many basis vectors.")
    ] = None,
    filter_ratio: Annotated[
        float | None, typer.Option(parser=fraction, metavar="PERCENT", help="No search: remove so many filters.")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="What prunes: basis, l1, taylor, hrank, or basis+taylor and the like.")
    ] = None,
    recipe: RecipeOption = "quick",
    epochs: Epochs = None,
    search: Annotated[Any, typer.Option(parser=as_given, hidden=True)] = None,
    size: Size = None,
    pretrained: Pretrained = True,
    val_fraction: ValFraction = 0.1,
    test_fraction: TestFraction = 0.1,
    limit: Limit = None,
    onnx: Annotated[bool | None, typer.Option(help="Write model.onnx too; if its packages are installed.")] = None,
    int8: Annotated[bool, typer.Option(help="Write model.int8.onnx too, calibrated on your images.")] = False,
    seed: Seed = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and how long it takes.")] = False,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Make a pretrained model as small as the accuracy you can lose allows.

    Adapts the model to your images, searches how much can be removed, and writes a folder with the model (a
    bundle for Python, and ONNX), a report to open in a browser, and everything in numbers. Without a budget, 1 %
    of accuracy may be lost. Stopped at any moment, the same command goes on from there.

    \b
    Examples:
      basisprune compress --model resnet50 --data photos --output out
      basisprune compress --model mobilenetv3_large_100 --data photos --target-params 1M --int8 --output out
      basisprune compress --config out/config.yaml --max-drop 2% --output another --dry-run

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 no pruning keeps to the budget, 130 interrupted with the best so
    far written.
    """
    with told_errors():
        from basisprune.runs.compress import compress as run
        from basisprune.runs.compress import starting_point

        budget, ratios = _budget_of(
            ctx,
            max_drop=max_drop,
            min_accuracy=min_accuracy,
            target_params=target_params,
            target_macs=target_macs,
            target_latency=target_latency,
            basis_ratio=basis_ratio,
            filter_ratio=filter_ratio,
        )
        settings, plan = _recipe_of(recipe, epochs), _search_of(search, framework)
        loading: dict[str, Any] = {"val_fraction": val_fraction, "test_fraction": test_fraction, "limit": limit}
        network, splits = starting_point(model, data, input_size=size, pretrained=pretrained, seed=seed, **loading)
        if dry_run:
            from basisprune.cli.dry_run import show_plan

            show_plan(network, splits, settings, plan, budget, ratios, output, as_json=as_json)
            return
        with _progress(settings, plan, budget) as bar:
            result = run(
                network,
                splits,
                budget,
                ratios=ratios,
                recipe=settings,
                search=plan,
                output=output,
                onnx=onnx,
                int8=int8,
                seed=seed,
                about={"model": model, "data": data, "size": size, "pretrained": pretrained, **loading},
                command=command_line(),
                say=bar.say,
                watch=lambda candidate: bar.candidate_done(describe(candidate)),
            )
    finish(result, output, as_json=as_json)


def finish(result: Compressed, output: Path, *, as_json: bool, images: Path = Path("image.jpg")) -> None:
    """Shows the result and ends with the exit code that says how it went."""
    from basisprune.report.html import amount as amount_of
    from basisprune.report.text import comparison_table

    if as_json:
        show_json(dict(result.summary))
    else:
        typer.echo(f"\n{comparison_table(result.summary)}\n\n{result.summary['verdict']}\n")
        if (output / "report.html").exists():  # it needs an extra
            typer.echo(f"{output / 'report.html'}: what happened, for a browser")
        for name, about in result.summary["files"].items():
            measured = f", accuracy {about['accuracy']:.1%}" if "accuracy" in about else ""
            typer.echo(f"{output / name}: {amount_of(about['bytes'], 'bytes')}, {about['what']}{measured}")
        typer.echo(f"next: basisprune predict {output} {images}")
    if result.summary["interrupted"]:
        tell("interrupted; this is the best so far, and the same command goes on from here")
        raise typer.Exit(INTERRUPTED)
    if not result.summary["kept_to_budget"]:
        raise typer.Exit(NOT_KEPT)


def describe(candidate: Candidate) -> str:
    """One line on a candidate: what was removed of it, and how good it is."""
    from basisprune.runs.summary import label

    name = label(candidate)
    name = name if name == "unpruned" else f"without {name}"
    outcome = "passed" if candidate.passed else "failed"
    doubt = ", but the images are too few to be sure" if candidate.undecided else ""
    return f"{name}: accuracy {candidate.accuracy:.1%}, {candidate.parameters:,} parameters, {outcome}{doubt}"


def _progress(recipe: Recipe, plan: SearchConfig, budget: Budget | None) -> Any:
    from basisprune.runs.estimate import expected_candidates
    from basisprune.training.progress import SearchProgress

    return SearchProgress(1 + expected_candidates(plan, budget), recipe.finetune.epochs, tell)


def _budget_of(ctx: typer.Context, **options: Any) -> tuple[Budget | None, tuple[float, float] | None]:
    """What to keep to, or the ratios; one that is typed goes before one in a file."""
    from basisprune.errors import ConfigError
    from basisprune.search import Budget

    given = {name: value for name, value in options.items() if value is not None}
    given = {name: value for name, value in given.items() if typed_here(ctx, name)} or given
    if set(given) & set(_RATIOS):
        others = [f"--{name.replace('_', '-')}" for name in given if name not in _RATIOS]
        if others:
            raise ConfigError(f"fixed ratios and {', '.join(others)} given; leave one of them out")
        return None, (given.get("basis_ratio", 0.0), given.get("filter_ratio", 0.0))
    return Budget(**given or {"max_drop": 0.01}), None


def _recipe_of(given: Any, epochs: int | None) -> Recipe:
    from dataclasses import replace

    from basisprune.runs.settings import recipe_of

    recipe = recipe_of(given)
    if epochs is None:
        return recipe
    return replace(recipe, train=replace(recipe.train, epochs=epochs), finetune=replace(recipe.finetune, epochs=epochs))


def _search_of(given: Any, framework: str | None) -> SearchConfig:
    from basisprune.runs.settings import search_of

    return search_of(dict(given or {}) | ({} if framework is None else {"framework": framework}))
