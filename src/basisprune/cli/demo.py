"""`basisprune demo`: the paper's frameworks compared on the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FRAMEWORKS = ("baseline", "taylor", "basis", "basis+taylor")


def demo(
    output: Annotated[Path, typer.Option(help="Where summaries and checkpoints go.")] = Path("runs/demo"),
    basis_ratio: Annotated[float, typer.Option(help="The fraction of all basis vectors to remove.")] = 0.6,
    filter_ratio: Annotated[float, typer.Option(help="The fraction of all filters to remove.")] = 0.3,
    size: Annotated[int, typer.Option(help="The side of the images in pixels.")] = 64,
    epochs: Annotated[int, typer.Option(help="How often each training sees the images.")] = 3,
) -> None:
    """Prune an ImageNet-pretrained EfficientNet-Lite0 for handwritten digits, in several ways.

    Compares the baseline, filter pruning by Taylor importance, basis pruning, and both together, on accuracy,
    parameters and multiply-adds. A run that is stopped goes on when started again.

    Example: basisprune demo --basis-ratio 0.7 --output runs/my-demo
    """
    from dataclasses import replace

    import torch

    from basisprune.config import RECIPES
    from basisprune.demo import demo_data, demo_model
    from basisprune.errors import BasisPruneError
    from basisprune.measure import measure
    from basisprune.pipeline import Framework, Pipeline, Pruned
    from basisprune.report import framework_table, layer_table

    results: list[Pruned] = []
    try:
        torch.manual_seed(0)
        data, model = demo_data(), demo_model(input_size=size)
        typer.echo(f"EfficientNet-Lite0 with ImageNet weights, handwritten digits at {size}x{size}")
        typer.echo(data.describe())
        quick = RECIPES["quick"]
        training = replace(quick.train, epochs=epochs)
        recipe = replace(quick, train=training, finetune=training)
        pipeline = Pipeline(model, data, recipe, checkpoints=output, say=typer.echo)
        names: tuple[Framework, ...] = FRAMEWORKS  # type: ignore[assignment]
        for name in names:
            result = pipeline.run(name, basis_ratio=basis_ratio, filter_ratio=filter_ratio)
            result.save_summary(output / f"{name}.json")
            (output / f"{name}.txt").write_text(layer_table(measure(result.model)) + "\n")
            results.append(result)
    except BasisPruneError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"\n{framework_table(results)}\n\nsummaries and layer tables are in {output}")
