"""`basisprune demo`: the search on the embedded default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import Json, command_line, tell, told_errors
from basisprune.cli.compress import finish


def demo(
    output: Annotated[Path, typer.Option(help="The folder for the result; an unfinished run in it goes on.")] = Path(
        "runs/demo"
    ),
    size: Annotated[int, typer.Option(help="The side of the images in pixels.")] = 64,
    as_json: Json = False,
) -> None:
    """Make an ImageNet-pretrained EfficientNet-Lite0 small for handwritten digits, in about five minutes.

    Trains it, searches how much can be removed for 1 % of accuracy, and writes the report and the model. All that
    it needs comes with the package's extra "demo"; nothing is downloaded.

    \b
    Examples:
      basisprune demo
      basisprune demo --output runs/my-demo
      basisprune predict runs/demo runs/demo/digits
    """
    _let_waiting_threads_sleep()
    with told_errors():
        from basisprune.demo import run_demo

        result = run_demo(output, size=size, command=command_line(), write=tell)
    finish(result.summary, output, as_json=as_json, images=output / "digits")


def _let_waiting_threads_sleep() -> None:
    """Threads that wait for one another sleep, unless the user decided otherwise; to be called before torch is loaded.

    By default they spin. Next to another busy program they then use up the time that the thread they all wait for
    would need, and the demo takes many times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
