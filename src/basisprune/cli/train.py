"""`basisprune train`: a pretrained model adapted to your images, and nothing removed."""

from __future__ import annotations

import typer

from basisprune.cli.common import (
    ConfigFile,
    Data,
    Epochs,
    Json,
    Limit,
    Model,
    Output,
    Pretrained,
    RecipeOption,
    Seed,
    Size,
    TestFraction,
    ValFraction,
    command_line,
    show_json,
    tell,
    told_errors,
)


def train(
    model: Model,
    data: Data,
    output: Output,
    recipe: RecipeOption = "quick",
    epochs: Epochs = None,
    size: Size = None,
    pretrained: Pretrained = True,
    val_fraction: ValFraction = 0.1,
    test_fraction: TestFraction = 0.1,
    limit: Limit = None,
    seed: Seed = 0,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Adapt a pretrained model to your images, without pruning.

    Trains batch norm and the classifier, as the recipe says, and writes a folder that evaluate, predict and
    inspect read; its model/ folder is what compress can start from.

    \b
    Examples:
      basisprune train --model resnet50 --data photos --output trained
      basisprune train --model resnet18 --data torchvision:CIFAR10 --size 96 --epochs 3 --output trained
      basisprune compress --model trained/model --data photos --output out
    """
    with told_errors():
        from basisprune.runs.adapt import adapt

        summary = adapt(
            model,
            data,
            output,
            recipe=recipe,
            epochs=epochs,
            seed=seed,
            input_size=size,
            command=command_line(),
            say=tell,
            pretrained=pretrained,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            limit=limit,
        )
    if as_json:
        show_json(summary)
        return
    for name in ("validation", "test"):
        if name in summary:
            low, high = summary[name]["interval"]
            typer.echo(f"{name} accuracy {summary[name]['accuracy']:.1%} ({low:.1%} to {high:.1%})")
    typer.echo(f"the model is in {output / 'model'}\nnext: basisprune predict {output} image.jpg")
