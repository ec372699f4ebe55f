"""The one table of small networks that drives the tests of every stage.

Each entry builds a network in eval mode with random weights (its norm layers have statistics and affine
parameters that are not the trivial ones) and names the shape of one batch of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def __call__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
        """The network and a batch of inputs for it."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build()
            randomise_norms(model)
            return model.to(dtype).eval(), torch.randn(self.shape, dtype=dtype)


def randomise_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def head(channels: int, classes: int = 4) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), *head(6),
    )  # fmt: skip


def vgg_like() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), *head(16),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1 = nn.Conv2d(8, 4, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Sequential(*head(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return self.head(torch.relu(self.down(x) + self.conv3(x)))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 8, 1)
        self.head = nn.Sequential(*head(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(torch.relu(self.norm1(x)))], dim=1)
        return self.head(self.conv2(torch.relu(self.norm2(x))))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, groups=4), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 8, 1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), *head(8),
    )  # fmt: skip


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 12, 1, bias=False), nn.BatchNorm2d(12), *head(12),
    )  # fmt: skip


def dilated() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, (3, 5), dilation=(2, 1), padding=(1, 3)), nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding="same", dilation=2), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding="valid", bias=False), nn.BatchNorm2d(8), *head(8),
    )  # fmt: skip


def reflect_padded() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.ReLU(),
        nn.Conv2d(6, 8, 4, padding="same", padding_mode="replicate"), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=(2, 0), padding_mode="circular"), *head(8),
    )  # fmt: skip


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.shared = nn.Conv2d(6, 6, 3, padding=1)
        self.alias = self.shared
        self.head = nn.Sequential(*head(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.shared(self.stem(x)))
        return self.head(torch.relu(self.alias(x)))


def one_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Conv1d(8, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


def three_dimensional() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(),
        nn.Conv3d(6, 8, (1, 3, 3), stride=(1, 2, 2)), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False), *head(4),
    )  # fmt: skip


IMAGE = (2, 3, 12, 12)
NETWORKS = {
    "plain": Network(plain, IMAGE),
    "vgg_like": Network(vgg_like, IMAGE),
    "residual": Network(Residual, IMAGE),
    "concat": Network(Concat, IMAGE),
    "grouped": Network(grouped, IMAGE),
    "depthwise": Network(depthwise, IMAGE),
    "dilated": Network(dilated, IMAGE),
    "reflect_padded": Network(reflect_padded, IMAGE),
    "used_twice": Network(UsedTwice, IMAGE),
    "one_dimensional": Network(one_dimensional, (2, 3, 20)),
    "three_dimensional": Network(three_dimensional, (2, 2, 5, 8, 8)),
    "transposed": Network(transposed, IMAGE),
}
