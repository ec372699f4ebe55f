"""The command line; each subcommand is one thin file, and torch is imported only when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from basisprune.cli.compress import compress
from basisprune.cli.demo import demo
from basisprune.cli.inspect import inspect

app = typer.Typer(help="Make a pretrained CNN small for your own images.", no_args_is_help=True, add_completion=False)
for command in (compress, inspect, demo):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        import basisprune

        typer.echo(basisprune.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Make a pretrained CNN small for your own images."""
