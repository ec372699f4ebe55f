"""`basisprune demo`: the search on the model and images of the extra `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import Json, command_line, tell, told_errors
from basisprune.cli.compress import finish


def demo(
    output: Annotated[Path, typer.Option(help="The output folder; an unfinished run in it resumes.")] = Path(
        "runs/demo"
    ),
    size: Annotated[int, typer.Option(help="Image height and width in pixels.")] = 64,
    as_json: Json = False,
) -> None:
    """Shrink an ImageNet-pretrained EfficientNet-Lite0 for handwritten digits, in about five minutes.

    Trains it, searches for how much can be removed at a loss of at most 1 % accuracy, and writes the report and the
    model. The package's extra "demo" includes everything it needs; nothing is downloaded.

    \b
    Examples:
      basisprune demo
      basisprune demo --output runs/my-demo
      basisprune predict runs/demo runs/demo/digits
    """
    with told_errors():
        from basisprune.demo import run_demo

        result = run_demo(output, size=size, command=command_line(), write=tell)
    finish(result.summary, output, as_json=as_json, images=output / "digits")
