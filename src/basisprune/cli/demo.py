"""`basisprune demo`: the whole method on the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Where the summary and the checkpoints go.")] = Path("runs/demo"),
    ratio: Annotated[float, typer.Option(help="The fraction of all basis vectors to remove.")] = 0.7,
    size: Annotated[int, typer.Option(help="The side of the images in pixels.")] = 64,
) -> None:
    """Prune an ImageNet-pretrained EfficientNet-Lite0 for handwritten digits.

    Decomposes every conv, trains, removes the least important basis vectors and trains again; then prints
    what became of accuracy, parameters and multiply-adds. A run that is stopped goes on when started again.
    """
    from basisprune.demo import demo_data, demo_model
    from basisprune.errors import BasisPruneError
    from basisprune.pipeline import basis_prune
    from basisprune.report import layer_table, stage_table

    try:
        data, model = demo_data(), demo_model(input_size=size)
        typer.echo(
            f"EfficientNet-Lite0 with ImageNet weights, handwritten digits at {size}x{size}\n{data.describe()}"
        )
        output.mkdir(parents=True, exist_ok=True)
        result = basis_prune(model, data, ratio, checkpoints=output, say=typer.echo)
    except BasisPruneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    result.save_summary(output / "summary.json")
    from basisprune.measure import measure

    (output / "layers.txt").write_text(layer_table(measure(result.model)) + "\n")
    typer.echo(f"\n{stage_table(result.stages)}\n\nsummary.json and layers.txt are in {output}")
