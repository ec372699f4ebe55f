"""`basisprune evaluate`: how often a model is right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from basisprune.cli.common import ConfigFile, Json, show_json, told_errors

Part = Literal["train", "val", "test", "all"]


def evaluate(
    result: Annotated[Path, typer.Argument(help="What compress or train wrote, a model/ folder, or an .onnx file.")],
    data: Annotated[str | None, typer.Option(help="As for compress; the run's own where it is known.")] = None,
    part: Annotated[
        Part | None, typer.Option(help="Which images; those held out of the run's own data, all of any other.")
    ] = None,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Measure the accuracy of a model on labelled images, with its 95 % confidence interval.

    \b
    Examples:
      basisprune evaluate out                           (the images that its run held out)
      basisprune evaluate out --data new-photos         (all images of another folder)
      basisprune evaluate out/model.int8.onnx --data photos --part test --json
    """
    with told_errors():
        from basisprune.runs.accuracy import accuracy_on
        from basisprune.runs.load import load_any

        found = accuracy_on(load_any(result), data, part)
    if as_json:
        show_json({"result": str(result), **asdict(found)})
        return
    low, high = found.interval
    typer.echo(f"{found.accuracy:.2%} of {found.images} images ({low:.1%} to {high:.1%} with 95 % confidence)")
    for name, count in found.classes.items():
        typer.echo(f"  {name}: {count.right} of {count.images}")
