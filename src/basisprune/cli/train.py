"""`basisprune train`: a pretrained model fine-tuned on your images, without pruning."""

from __future__ import annotations

import json
from typing import cast

import typer

from basisprune.cli.common import (
    AugmentOption,
    ConfigFile,
    ConfirmFraction,
    Data,
    Epochs,
    Groups,
    Interpolation,
    Json,
    KeepHead,
    Limit,
    Mean,
    Model,
    Output,
    PrecisionOption,
    Pretrained,
    RecipeOption,
    Seed,
    Size,
    Std,
    Strict,
    Teller,
    TestFraction,
    TrustCode,
    ValFraction,
    Weights,
    WeightsKey,
    command_line,
    show,
    show_json,
    told_errors,
)


def train(
    ctx: typer.Context,
    model: Model,
    data: Data,
    output: Output,
    recipe: RecipeOption = "quick",
    epochs: Epochs = None,
    augment: AugmentOption = None,
    precision: PrecisionOption = None,
    size: Size = None,
    pretrained: Pretrained = True,
    weights: Weights = None,
    weights_key: WeightsKey = None,
    keep_head: KeepHead = False,
    mean: Mean = None,
    std: Std = None,
    interpolation: Interpolation = None,
    val_fraction: ValFraction = 0.2,
    test_fraction: TestFraction = 0.1,
    confirm_fraction: ConfirmFraction = 0.5,
    limit: Limit = None,
    groups: Groups = None,
    strict: Strict = False,
    seed: Seed = 0,
    trust_code: TrustCode = False,
    as_json: Json = False,
    _config: ConfigFile = None,
) -> None:
    """Fine-tune a pretrained model on your images, without pruning.

    Trains with the settings of the recipe, and writes a folder that evaluate, predict and inspect can read. compress
    can start from its model/ folder, and certifies its budget on the images that are set aside here, which nothing
    looks at.

    \b
    Examples:
      basisprune train --model resnet50 --data photos --output trained
      basisprune train --model resnet18 --data torchvision:CIFAR10 --size 96 --epochs 3 --output trained
      basisprune compress --model trained/model --data photos --output out
    """
    with told_errors():
        from basisprune.runs.adapt import adapt
        from basisprune.runs.job import prepare_job
        from basisprune.runs.options import Options, configure
        from basisprune.torchkit.processes import Processes

        given = {name: value for name, value in ctx.params.items() if name in Options.__annotations__}
        config = configure(cast("Options", given))
        job = prepare_job(model, data, config, output=output, listener=Teller())
        summary = adapt(job, output, Teller(), command=command_line())
        if not Processes.here().is_main:
            return
    if as_json:
        show_json(json.loads(summary.to_json()))
        return
    for name, found in (("validation", summary.validation), ("test", summary.test)):
        if found is not None:
            low, high = found.interval
            show(f"{name} accuracy {found.accuracy:.1%} ({low:.1%} to {high:.1%})")
    show(f"the model is in {output / 'model'}", f"next: basisprune predict {output} image.jpg")
