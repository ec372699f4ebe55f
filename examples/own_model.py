"""A network of your own, trained by a loop of your own, made small without losing what it has learnt.

    python examples/own_model.py [FOLDER]

The images are the handwritten digits of scikit-learn. The same from the command line, for a network in `my_module.py`:

    basisprune compress --model my_module:network --weights net.safetensors --keep-head --data digits.npz \
        --size 8 --mean 0.5 --std 0.5 --output small
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import basisprune as bp

MEAN, STD, EPOCHS = 0.5, 0.5, 12


class Net(nn.Module):
    """Any module that gives scores (N, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.wider = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.wider(F.max_pool2d(self.stem(images), 2))
        return self.out(F.relu(x + self.block(x)).mean((2, 3)))


def digits() -> list[TensorDataset]:
    """1,797 digits of 8x8 pixels, in three parts: to train, to validate, to test."""
    found = load_digits()
    images = torch.from_numpy(found.images * 255 / 16).to(torch.uint8)[:, None]
    data = TensorDataset(images, torch.from_numpy(found.target))
    return random_split(data, [1000, 500, 297], torch.Generator().manual_seed(0))


def prepared(images: Tensor) -> Tensor:
    return (images / 255 - MEAN) / STD


def train(net: nn.Module, data: TensorDataset) -> None:
    """Your own loop."""
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(prepared(images)), labels).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(net: nn.Module, data: TensorDataset) -> float:
    images, labels = next(iter(DataLoader(data, batch_size=len(data))))
    return float((net.eval()(prepared(images)).argmax(1) == labels).float().mean())


def main(folder: Path, *, epochs: int = 5) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    parts = digits()
    net = Net()
    train(net, parts[0])
    save_file(net.state_dict(), folder / "net.safetensors")

    # Ours: the network with its own head and weights, which the budget is counted from.
    result = bp.compress(
        Net(),
        tuple(parts),
        max_drop=0.02,
        weights=str(folder / "net.safetensors"),
        keep_head=True,
        size=8,
        mean=[MEAN],
        std=[STD],
        epochs=epochs,  # of each candidate; the network itself is not trained again
        onnx=False,  # leave this out to get model.onnx too
        output=folder / "small",
    )
    print(result.summary.verdict)
    numbers = {}
    for name, model in (("before", result.original), ("after", bp.from_pretrained(folder / "small" / "model"))):
        size = bp.measure(model)
        numbers[name] = {"accuracy": accuracy(model, parts[2]), "parameters": size.parameters, "macs": size.macs}
        print(f"{name:7}{numbers[name]['accuracy']:.1%} of the test images, {size.parameters:,} parameters")
    return numbers


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
