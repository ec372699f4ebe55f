"""Lightning trains, and goes on training what is left: our part is one line in the middle of `main`.

    python examples/lightning.py

Half of the basis vectors go, those that matter least for the loss on the training images. The images are the
handwritten digits of scikit-learn.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This file is named like the package, which a script would find here otherwise.
sys.path = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).parent]

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset, random_split  # noqa: E402

import basisprune as bp  # noqa: E402


class Classifier(L.LightningModule):
    """Your own module; `net` is what is made small."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([part for part in self.parameters() if part.requires_grad], lr=3e-3)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def loaders() -> tuple[DataLoader, DataLoader]:
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    data = TensorDataset(images, torch.from_numpy(found.target))
    train, held_out = random_split(data, [1200, 597], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=50, shuffle=True), DataLoader(held_out, batch_size=597)


def fitted(module: Classifier, train: DataLoader, held_out: DataLoader, epochs: int) -> dict[str, float]:
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, held_out)
    (found,) = trainer.validate(module, held_out, verbose=False)
    size = bp.measure(module.net, (1, 8, 8))
    return {"accuracy": found["accuracy"], "parameters": size.parameters, "macs": size.macs}


def main(epochs: int = 8) -> dict[str, dict[str, float]]:
    L.seed_everything(0, verbose=False)
    train, held_out = loaders()
    module = Classifier(network())
    before = fitted(module, train, held_out, epochs)

    module.net = bp.prune(module.net, 0.5, train, remove="basis")

    after = fitted(module, train, held_out, epochs)
    small = bp.fold(module.net, torch.zeros(1, 1, 8, 8))  # plain layers again, for whatever comes next
    after |= {"parameters": bp.measure(small, (1, 8, 8)).parameters}
    for name, numbers in (("before", before), ("after", after)):
        print(f"{name:7}{numbers['accuracy']:.1%} right, {numbers['parameters']:,} parameters")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
