"""`basisprune compress`: the smallest model within the accuracy that can be lost."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from basisprune.cli.common import amount, fraction, told_errors


def compress(
    model: Annotated[str, typer.Option(help="A timm model name, or package.module:factory.")],
    data: Annotated[str, typer.Option(help="A folder of class folders, an .npz file, or torchvision:NAME.")],
    output: Annotated[Path, typer.Option(help="Where the result goes; an unfinished one is continued.")],
    max_drop: Annotated[str | None, typer.Option(help="The accuracy that may be lost, such as 1%.")] = None,
    min_accuracy: Annotated[str | None, typer.Option(help="The least accuracy wanted, such as 95%.")] = None,
    target_params: Annotated[str | None, typer.Option(help="The most parameters, such as 1.5M.")] = None,
    target_macs: Annotated[str | None, typer.Option(help="The most multiply-adds, such as 200M.")] = None,
    recipe: Annotated[str, typer.Option(help="How to train: quick, or paper.")] = "quick",
    filters: Annotated[str, typer.Option(help="Filter scores on top: taylor, hrank, l1 or none.")] = "taylor",
    size: Annotated[int | None, typer.Option(help="The side of the images in pixels.")] = None,
    pretrained: Annotated[bool, typer.Option(help="Start from pretrained weights.")] = True,
    seed: Annotated[int, typer.Option(help="For the split, the start and the training.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, for machines.")] = False,
) -> None:
    """Make a pretrained model as small as the accuracy you can lose allows.

    Example: basisprune compress --model resnet50 --data ./photos --max-drop 1% --output out
    """
    given = {
        "max_drop": None if max_drop is None else fraction(max_drop),
        "min_accuracy": None if min_accuracy is None else fraction(min_accuracy),
        "target_params": None if target_params is None else amount(target_params),
        "target_macs": None if target_macs is None else amount(target_macs),
    }
    if not any(value is not None for value in given.values()):
        given["max_drop"] = 0.01
    with told_errors():
        from basisprune.compress import compress as run
        from basisprune.search import Budget, SearchConfig

        budget = Budget(**given)  # type: ignore[arg-type]
        result = run(
            model,
            data,
            budget,
            recipe=recipe,
            search=SearchConfig(filter_method=filters),
            input_size=size,
            pretrained=pretrained,
            output=output,
            seed=seed,
            command=shlex.join(["basisprune", *sys.argv[1:]]),
            say=lambda line: typer.echo(line, err=True),
        )
    typer.echo(json.dumps(dict(result.summary)) if as_json else result.summary["verdict"])
    if not as_json:
        typer.echo(f"report.html and summary.json are in {output}")
