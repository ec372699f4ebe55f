"""The Trainer of Hugging Face trains, and goes on training what is left: our part is one line in `main`.

    python examples/transformers_trainer.py [FOLDER]

Half of the basis vectors go, those that matter least for the loss on the training images. The network is a small ResNet
built from a config, the images are the handwritten digits of scikit-learn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

import basisprune as bp

SHAPE = (1, 16, 16)


class Digits(Dataset):
    """Items as the Trainer wants them."""

    def __init__(self, first: int, last: int) -> None:
        found = load_digits()
        images = np.kron(found.images[first:last], np.ones((1, 2, 2)))  # 8x8 -> 16x16
        self.images = torch.from_numpy(images).float()[:, None] / 8 - 1
        self.labels = torch.from_numpy(found.target[first:last])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def network() -> nn.Module:
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def trained(model: nn.Module, data: Digits, folder: Path, epochs: int) -> nn.Module:
    """Your own settings."""
    settings = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=50,
        learning_rate=5e-3,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Trainer(model, settings, train_dataset=data).train()
    return model


@torch.no_grad()
def measured(model: nn.Module, data: Digits) -> dict[str, float]:
    right = model.eval()(data.images).logits.argmax(1) == data.labels
    size = bp.measure(model, SHAPE)
    return {"accuracy": float(right.float().mean()), "parameters": size.parameters, "macs": size.macs}


def loss(output: ImageClassifierOutput, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, labels)


def main(folder: Path, epochs: int = 6) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    data, held_out = Digits(0, 1200), Digits(1200, 1797)
    model = trained(network(), data, folder, epochs)
    before = measured(model, held_out)
    batches = DataLoader(list(zip(data.images, data.labels, strict=True)), batch_size=50)

    small = bp.prune(model, 0.5, batches, remove="basis", loss=loss)

    trained(small, data, folder, epochs)
    plain = bp.fold(small, torch.zeros(1, *SHAPE))  # plain layers again, for whatever comes next
    after = measured(plain, held_out)
    for name, numbers in (("before", before), ("after", after)):
        print(f"{name:7}{numbers['accuracy']:.1%} right, {numbers['parameters']:,} parameters")
    return {"before": before, "after": after}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
