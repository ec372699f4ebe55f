"""`basisprune train`: a pretrained model fine-tuned on your images, without pruning."""

from __future__ import annotations

import json
from typing import cast

from basisprune.cli.common import (
    ConfigFile,
    Data,
    Json,
    Model,
    Output,
    Teller,
    command_line,
    show,
    show_json,
    takes_options,
)
from basisprune.runs.settings import TRAIN_OPTIONS, Options


@takes_options(*TRAIN_OPTIONS)
def train(
    model: Model,
    data: Data,
    output: Output,
    as_json: Json = False,
    _config: ConfigFile = None,
    **options: object,
) -> None:
    """Fine-tune a pretrained model on your images, without pruning.

    Trains with the settings of the recipe, and writes a folder that evaluate, predict and inspect can read. compress
    can start from its model/ folder, and certifies its budget on the images that are set aside here, which nothing
    looks at.

    \b
    Examples:
      basisprune train --model resnet50 --data photos --output trained
      basisprune train --model resnet18 --data torchvision:CIFAR10 \\
          --size 96 --epochs 3 --output trained
      basisprune compress --model trained/model --data photos --output out
    """
    from basisprune.runs.load import prepare_job
    from basisprune.runs.settings import configure
    from basisprune.runs.train import train_job
    from basisprune.torchkit.processes import Processes

    config = configure(cast("Options", options))
    job = prepare_job(model, data, config, output=output, callback=Teller())
    summary = train_job(job, output, Teller(), command=command_line())
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
