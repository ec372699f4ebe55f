"""A U-Net that segments shapes, made small within a loss of mean IoU that is certified.

    python examples/segmentation.py [OUTPUT]

The images are drawn here: a disc, a square or both on noise. Replace `shapes` by your own loader and `UNet` by your own
network; nothing else depends on them.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import basisprune as bp

SIDE = 24


class Block(nn.Sequential):
    """Two convs with their norms."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net of two levels: scores (N, classes, H, W)."""

    def __init__(self, classes: int = 3, width: int = 16) -> None:
        super().__init__()
        self.top, self.deep = Block(3, width), Block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = Block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        top = self.top(images)
        up = self.up(self.deep(F.max_pool2d(top, 2)))
        return self.head(self.join(torch.cat([top, up], dim=1)))


def shapes(count: int, seed: int) -> TensorDataset:
    """Images (N, 3, 24, 24) with a disc or a square or both, and their masks (N, 24, 24)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(SIDE).view(1, -1, 1)
    columns = torch.arange(SIDE).view(1, 1, -1)
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for kind in (1, 2):
        places = torch.randint(6, SIDE - 6, (2, count, 1, 1), generator=generator)
        sizes = torch.randint(3, 6, (count, 1, 1), generator=generator)
        down, right = (rows - places[0]).abs(), (columns - places[1]).abs()
        inside = down**2 + right**2 <= sizes**2 if kind == 1 else torch.maximum(down, right) <= sizes - 1
        masks[inside & (torch.rand(count, 1, 1, generator=generator) < 0.8)] = kind
    colours = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.5, 0.2], [0.2, 0.5, 0.9]])
    images = colours[masks].movedim(-1, 1) + 0.6 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(images, masks)


def trained(network: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], task: bp.Task, epochs: int) -> nn.Module:
    """The network after your own training, whatever that is."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(epochs):
        for images, masks in loader:
            optimizer.zero_grad()
            task.mean_loss(network, images, masks).backward()
            optimizer.step()
    return network.eval()


def main(output: str | None = None, epochs: int = 4) -> bp.Compressed:
    torch.manual_seed(0)
    train, val, confirm, test = (shapes(count, seed) for seed, count in enumerate((192, 96, 192, 96)))
    loaders = bp.Loaders(
        train=DataLoader(train, batch_size=16, shuffle=True),
        val=DataLoader(val, batch_size=32),
        confirm=DataLoader(confirm, batch_size=32),
        test=DataLoader(test, batch_size=32),
    )
    task = bp.segmentation()  # bp.segmentation("dice"), or a bp.Task of your own
    network = trained(UNet(), loaders.train, task, epochs)
    result = bp.compress(
        network,
        loaders,
        task=task,
        max_drop=0.05,  # five points of mean IoU
        epochs=2,
        search=bp.SearchConfig(polish=False, tolerance=0.5),
        output=output,
    )
    before, after = result.summary.test.before, result.summary.test.after
    print(result.summary.verdict)
    print(f"mean IoU on the test images: {before.accuracy:.1%} before, {after.accuracy:.1%} after")
    print(f"parameters: {before.parameters:,} before, {after.parameters:,} after")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
