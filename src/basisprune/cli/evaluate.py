"""`basisprune evaluate`: the accuracy of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import ConfigFile, Json, Teller, TrustCode, show, show_json
from basisprune.types import Part


def evaluate(
    result: Annotated[
        Path, typer.Argument(help="An output folder of compress or train, a model/ folder, or an .onnx or .xml file.")
    ],
    data: Annotated[str | None, typer.Option(help="As for compress (default: the data of the run).")] = None,
    part: Annotated[
        Part | None, typer.Option(help="Which images (default: test for the data of the run, otherwise all).")
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Measure the accuracy of a model on labelled images, with its 95% confidence interval.

    \b
    Examples:
      basisprune evaluate out                      (images held out by its run)
      basisprune evaluate out --data new-photos    (all images of another folder)
      basisprune evaluate out/model.int8.onnx --data photos --part test --json
    """
    from basisprune.runs.finished import accuracy_on, load_any

    found = accuracy_on(load_any(result, trust_remote_code=trust_code), data, part, callback=Teller())
    if as_json:
        show_json({"result": str(result), **asdict(found)})
        return
    low, high = found.interval
    show(f"{found.accuracy:.2%} of {found.images} images ({low:.1%} to {high:.1%} with 95% confidence)")
    for name, count in found.classes.items():
        show(f"  {name}: {count.right} of {count.images}")
