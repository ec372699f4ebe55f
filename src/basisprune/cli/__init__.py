"""The command line: one thin file per subcommand; torch is imported only when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from basisprune.cli.certify import certify
from basisprune.cli.common import Command, Commands
from basisprune.cli.compress import compress
from basisprune.cli.demo import demo
from basisprune.cli.evaluate import evaluate
from basisprune.cli.export import export
from basisprune.cli.inspect import inspect
from basisprune.cli.predict import predict
from basisprune.cli.profile import profile
from basisprune.cli.sweep import sweep
from basisprune.cli.train import train

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (compress, certify, sweep, train, evaluate, predict, export, inspect, profile, demo):
    app.command(cls=Command)(command)


def _version(wanted: bool) -> None:
    if wanted:
        import basisprune

        typer.echo(basisprune.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Shrink a pretrained CNN for your own images.

    \b
    Examples:
      basisprune demo                          (see it work, in about ten minutes)
      basisprune compress --model resnet50 --data photos --output out
      basisprune predict out new-photos        (use the result)
      basisprune export out --to openvino      (for another runtime)

    Exit codes: 0 done, 1 error, 2 usage error, 3 no pruned model within the budget, 130 interrupted.
    """
