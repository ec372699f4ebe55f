"""`basisprune demo`: the paper's frameworks compared on the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from basisprune.cli.common import told_errors

if TYPE_CHECKING:
    from basisprune.pipeline import Framework, Pruned

FRAMEWORKS: tuple[Framework, ...] = ("baseline", "taylor", "basis", "basis+taylor")


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
    with told_errors():
        results = _compare(output, basis_ratio, filter_ratio, size, epochs)
        from basisprune.report import framework_table

        typer.echo(f"\n{framework_table(results)}\n\nsummaries and layer tables are in {output}")


def _compare(output: Path, basis_ratio: float, filter_ratio: float, size: int, epochs: int) -> list[Pruned]:
    from dataclasses import replace

    import torch

    from basisprune.checkpoint import write_text
    from basisprune.config import RECIPES
    from basisprune.demo import demo_data, demo_model
    from basisprune.measure import measure
    from basisprune.pipeline import Pipeline
    from basisprune.report import layer_table

    torch.manual_seed(0)
    data, model = demo_data(), demo_model(input_size=size)
    typer.echo(f"EfficientNet-Lite0 with ImageNet weights, handwritten digits at {size}x{size}")
    typer.echo(data.describe())
    training = replace(RECIPES["quick"].train, epochs=epochs)
    recipe = replace(RECIPES["quick"], train=training, finetune=training)
    pipeline = Pipeline(model, data, recipe, checkpoints=output, say=typer.echo)
    results = []
    for name in FRAMEWORKS:
        result = pipeline.run(name, basis_ratio=basis_ratio, filter_ratio=filter_ratio)
        result.save_summary(output / f"{name}.json")
        write_text(output / f"{name}.txt", layer_table(measure(result.model)) + "\n")
        results.append(result)
    return results
