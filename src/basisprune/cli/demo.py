"""`basisprune demo`: the search on the model and images of the extra `demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import Json, command_line, tell
from basisprune.cli.compress import finish


def demo(
    output: Annotated[Path, typer.Option(help="The output folder; an unfinished run in it resumes.")] = Path(
        "runs/demo"
    ),
    size: Annotated[int, typer.Option(help="Image height and width in pixels.")] = 64,
    as_json: Json = False,
) -> None:
    """Shrink an ImageNet-pretrained EfficientNet-Lite0 for handwritten digits, in about ten minutes on two cores.

    Trains it, searches for how much can be removed at a loss of at most 1% accuracy, and writes the report and the
    model. The package's extra "demo" includes everything it needs; nothing is downloaded.

    \b
    Examples:
      basisprune demo
      basisprune demo --output runs/my-demo
      basisprune predict runs/demo runs/demo/digits
    """
    # Before torch is loaded: with one thread the demo ends in the same network on every machine of a kind. It is as
    # fast as with two that sleep while they wait; two that spin are slow beside others (benchmarks/threads.py).
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from basisprune.demo import run_demo

    result = run_demo(output, size=size, command=command_line(), write=tell)
    finish(result.summary, output, as_json=as_json, images=output / "digits")
