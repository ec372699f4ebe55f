"""`basisprune compress --model auto`: start from the best of several backbones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basisprune.callback import counted
from basisprune.cli.common import Teller, show, show_json, typed_here

if TYPE_CHECKING:
    from basisprune.results import Portfolio, RunSummary
    from basisprune.runs.settings import Options
    from basisprune.sweeps.portfolio import PortfolioConfig

AUTO = "auto"
_OF_SEVERAL = ("keep", "probe_epochs", "weights_folder", "jobs", "ray_address")


def names(given: Any) -> list[str]:
    """Split names at commas; return a list, as in a file, as it is.

    >>> names("resnet18, resnet50"), names(["resnet18"])
    (['resnet18', 'resnet50'], ['resnet18'])
    """
    listed = given.split(",") if isinstance(given, str) else given
    found = [name.strip() for name in listed if isinstance(name, str) and name.strip()] if listed else []
    if not found or not isinstance(listed, list | tuple) or len(found) < len(listed):
        raise typer.BadParameter(f"{given!r} given; expected names such as resnet18,resnet50")
    return found


Models = Annotated[
    Any,
    typer.Option(
        "--models", parser=names, metavar="A,B,...", help="Start from the best of these; --model auto chooses some."
    ),
]
Keep = Annotated[int, typer.Option(min=1, help="With several models: how many are compressed.")]
ProbeEpochs = Annotated[int, typer.Option(min=1, help="With several models: epochs of the first, short training.")]
WeightsFolder = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="With several models: where files such as resnet50.safetensors are."),
]


def one_of(
    model: str | None, models: Sequence[str] | None, plan: tuple[int, int, str | None]
) -> tuple[str | list[str], PortfolioConfig] | None:
    """Return the models to choose from, and how; None for one model. Raises BadParameter for none, or for both."""
    if model is None and models is None:
        raise typer.BadParameter("a model is needed", param_hint="--model")
    if models is not None and model not in (None, AUTO):
        raise typer.BadParameter(f"--model {model} given too; pass one of them", param_hint="--models")
    if model != AUTO and models is None:
        return None
    from basisprune.sweeps.portfolio import PortfolioConfig

    keep, probe_epochs, weights = plan
    return AUTO if models is None else list(models), PortfolioConfig(keep, probe_epochs, weights)


def refuse_for_one(ctx: typer.Context) -> None:
    """Raise BadParameter for options that have no effect with one model."""
    for name in _OF_SEVERAL:
        if typed_here(ctx, name):
            raise typer.BadParameter(
                "given with one model; it is for --model auto, or for several --models",
                param_hint=f"--{name.replace('_', '-')}",
            )


def choose(
    chosen: tuple[str | list[str], PortfolioConfig],
    data: str,
    output: Path,
    options: Options,
    where: tuple[int, str | None],
    *,
    dry_run: bool,
) -> RunSummary | None:
    """Return the summary of the recommended model; for --dry-run, only raise the error that the run would end with."""
    from basisprune.sweeps.portfolio import check_portfolio, compress_portfolio
    from basisprune.sweeps.running import Running

    models, plan = chosen
    given: dict[str, Any] = {
        "output": output,
        "plan": plan,
        "running": Running(*where),
        "callback": Teller(),
        **options,
    }
    if dry_run:
        check_portfolio(models, data, **given)
        return None
    return compress_portfolio(models, data, **given).summary


def show_portfolio(chosen: tuple[str | list[str], PortfolioConfig], *, as_json: bool) -> None:
    """List the backbones and rounds, for --dry-run."""
    from basisprune.sweeps.backbones import PORTFOLIO, is_cached, is_timm, refuse_unknown

    models, plan = chosen
    listed = PORTFOLIO if isinstance(models, str) else models
    refuse_unknown(listed)
    there = {name: not is_timm(name) or is_cached(name) for name in listed}
    rungs = plan.rounds(len(listed))
    if as_json:
        show_json({"backbones": there, "rungs": rungs, "keep": plan.keep})
        return
    for name, is_here in there.items():
        show(f"{name}{'' if is_here else ': its weights must be fetched, or are in the folder of weights'}")
    for epochs, left in rungs:
        show(f"after {counted(epochs, 'epoch')}: {left} continue")
    show("nothing was written")


def front_table(portfolio: Portfolio) -> str:
    """Format the networks on the Pareto front as a text table; mark the delivered one."""
    from basisprune.report.text import text_table

    rows = [
        (
            ">" if point.chosen else "",
            point.group,
            point.name,
            f"{point.accuracy:.1%}",
            f"{point.parameters:,}",
            "-" if point.latency_ms is None else f"{point.latency_ms:.3g} ms",
        )
        for point in portfolio.points
        if point.front or point.chosen
    ]
    table = text_table(("", "backbone", "without", "accuracy", "parameters", "one image"), rows, left={0, 1, 2})
    left_out = [f"{row.name}: {row.status}, {row.said}" for row in portfolio.backbones if row.said]
    return "\n".join([table, *left_out])
