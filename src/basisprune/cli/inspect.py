"""`basisprune inspect`: what a model costs, layer by layer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from basisprune.cli.common import told_errors


def inspect(
    model: Annotated[str, typer.Argument(help="A timm model name, or package.module:factory.")],
    size: Annotated[int | None, typer.Option(help="The side of the images in pixels.")] = None,
    classes: Annotated[int, typer.Option(help="How many classes it tells apart.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Show the layers of a transfer model: kind, rank, parameters and multiply-adds.

    Example: basisprune inspect resnet50 --size 128
    """
    with told_errors():
        from basisprune.measure import measure
        from basisprune.report import layer_table
        from basisprune.transfer import transfer_model

        report = measure(transfer_model(model, classes, input_size=size))
    typer.echo(json.dumps(asdict(report)) if as_json else layer_table(report))
