"""`basisprune sweep`: many runs of compress, from one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from basisprune.cli.common import FAILED, Json, Teller, TrustCode, indented, show, show_json, tell
from basisprune.errors import BasisPruneError

if TYPE_CHECKING:
    from basisprune.sweeps.running import Run
    from basisprune.sweeps.sweep import Sweep
    from basisprune.sweeps.table import Cell

Jobs = Annotated[int, typer.Option(min=1, help="Processes on this machine, which share its cores.")]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Run on this Ray cluster: an address, auto, or local to start one here."),
]


def sweep(
    file: Annotated[Path, typer.Argument(help="A YAML file with models, datasets, frameworks, seeds and options.")],
    output: Annotated[Path | None, typer.Option(help="The folder for all results (default: the file's).")] = None,
    jobs: Jobs = 1,
    ray_address: RayAddress = None,
    trust_code: TrustCode = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells; run and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Compress many models on many datasets, here or on a Ray cluster.

    Every combination of the file's models, datasets, frameworks and seeds is a cell: a run of compress in a folder of
    its own. Finished cells are never repeated, stopped ones resume, failed ones are repeated. The results go to
    sweep.json, sweep.csv and sweep.html, a page with the Pareto front of each dataset.

    \b
    Examples:
      basisprune sweep sweep.yaml --output out --jobs 2
      basisprune sweep sweep.yaml --output /shared/out --ray-address auto
      basisprune sweep experiments/paper63.yaml --dry-run

    Exit codes: 0 all cells done, 1 an error or cells that failed every time, 2 usage error, 130 interrupted.
    """
    from basisprune.sweeps.sweep import PAGE, read_sweep, run_sweep
    from basisprune.sweeps.table import as_json as rows_as_json
    from basisprune.sweeps.table import as_text

    plan = read_sweep(file, output, trust_code=trust_code)
    if dry_run:
        _show_cells(plan, as_json=as_json)
        return
    result = run_sweep(plan, jobs=jobs, ray_address=ray_address, callback=Teller())
    if as_json:
        show_json(rows_as_json(result.rows))
    else:
        show("", *as_text(result.rows).splitlines(), "")
        if (result.folder / PAGE).exists():  # needs an extra
            show(f"{result.folder / PAGE}: the Pareto fronts, for a browser")
    if result.failed:
        tell(f"{len(result.failed)} cells failed; their logs are in {result.folder / 'cells'}")
        raise typer.Exit(FAILED)


def _show_cells(plan: Sweep, *, as_json: bool) -> None:
    """List the cells, and report what the unfinished ones would fail at, once for all their seeds."""
    from basisprune.callback import NullCallback
    from basisprune.sweeps.worker import check_run, is_done

    done = {cell.name: is_done(run) for cell, run in plan.cells.items()}
    if as_json:
        show_json(done)
    else:
        show(*(f"{name}{': done' if is_there else ''}" for name, is_there in done.items()))
        show(f"{len(done)} cells, {sum(done.values())} of them done; nothing was written")
    waiting: dict[Cell, Run] = {}
    for cell, run in plan.cells.items():
        if not done[cell.name]:
            waiting.setdefault(replace(cell, seed=0), run)
    failed = False
    for run in waiting.values():
        try:
            check_run(run, NullCallback())
        except BasisPruneError as error:
            tell(f"error: {run.name}: {error.text(indented)}")
            failed = True
    if failed:
        raise typer.Exit(FAILED)
