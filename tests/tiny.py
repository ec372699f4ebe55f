"""A network and images small enough to train on in a test, and a callback that remembers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.callback import NullCallback
from basisprune.data import ArrayImages
from basisprune.recipes import RECIPES, Recipe
from basisprune.training.config import TrainConfig
from basisprune.transfer.model import TransferModel, transfer_model

CLASSES = 3
NAMES = ("r", "g", "b")


class Notes(NullCallback):
    """Remember the logged lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def tiny_model(seed: int = 0) -> TransferModel:
    """A transfer model for 16x16 images of three classes, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        )  # fmt: skip
        return transfer_model(backbone, CLASSES, input_size=16)


def tiny_backbone() -> nn.Module:
    """The backbone of `tiny_model`, as a factory that a command line can name."""
    backbone: nn.Module = tiny_model().backbone
    return backbone


def smaller_backbone() -> nn.Module:
    """Another one, with a layer less."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())


class _Grey(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True)


def poor_backbone() -> nn.Module:
    """One that sees no colours, and cannot tell the classes of `tiny_images` apart."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        conv = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(_Grey(), conv, nn.BatchNorm2d(4), nn.ReLU())


def tiny_decomposed(seed: int = 0) -> nn.Module:
    return decompose(tiny_model(seed), scale_init=0.8)


class WithIdleNorm(nn.Module):
    """A network with a norm that is trained and that nothing reads."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.idle = body, nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """What the body makes of the images."""
        return self.body(images)


def with_idle_norm() -> nn.Module:
    """The tiny transfer model with such a norm."""
    model = tiny_model()
    model.backbone = WithIdleNorm(model.backbone)
    return model


def tiny_images(count: int = 48, seed: int = 0) -> ArrayImages:
    """Noise that is mostly red, green or blue, by class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    images = rng.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 120
    return ArrayImages(images, labels)


def tiny_training(**settings) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "batch_size": 16, "lr": 0.05, "min_lr": 1e-3, **settings})


def differing(one: nn.Module, other: nn.Module) -> set[str]:
    """The names of all tensors in which two networks of one architecture differ."""
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return {key for key, value in states[0].items() if not torch.equal(value, states[1][key])}


def tiny_recipe(training: TrainConfig, name: str = "quick") -> Recipe:
    """The recipe of that name with another training, and without blocks of channels, which a tiny network has not."""
    recipe = RECIPES[name]
    plan, filter_plan = replace(recipe.plan, round_to=None), replace(recipe.filter_plan, round_to=None)
    return replace(recipe, train=training, finetune=training, plan=plan, filter_plan=filter_plan)
