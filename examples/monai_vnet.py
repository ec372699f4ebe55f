"""MONAI's V-Net and U-Net on volumes, made small within a loss of mean Dice that is certified.

    python examples/monai_vnet.py [unet|vnet] [OUTPUT]

The volumes are drawn here: a bright ball or two in noise. Transforms, data set, loader and loss are MONAI's own.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.networks.nets import UNet, VNet
from monai.transforms import Compose, EnsureChannelFirstd, NormalizeIntensityd, RandFlipd, Transform
from torch import Tensor, nn

import basisprune as bp

SIDE = 16
KEYS = ("image", "label")


def volumes(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Volumes (16, 16, 16) of noise with one or two balls, and which voxels these are."""
    draw = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"))
    found = []
    for _ in range(count):
        label = np.zeros([SIDE] * 3, dtype=np.int64)
        for _ in range(draw.integers(1, 3)):
            centre, radius = draw.integers(4, SIDE - 4, 3), draw.uniform(2.5, 4.5)
            label |= ((grid - centre[:, None, None, None]) ** 2).sum(0) <= radius**2
        image = 100 + 40 * label + 25 * draw.standard_normal(label.shape)
        found.append({"image": image.astype(np.float32), "label": label})
    return found


def loader(count: int, seed: int, more: tuple[Transform, ...] = ()) -> DataLoader:
    """As in any program with MONAI."""
    steps = [EnsureChannelFirstd(KEYS, channel_dim="no_channel"), NormalizeIntensityd("image"), *more]
    return DataLoader(Dataset(volumes(count, seed), Compose(steps)), batch_size=8, shuffle=bool(more))


def read(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the network is given, and the voxels (N, 1, 16, 16, 16) that are wanted."""
    return batch["image"], batch["label"]


def network(name: str) -> nn.Module:
    if name == "vnet":
        return VNet(spatial_dims=3, in_channels=1, out_channels=2, dropout_prob_down=0.1, dropout_prob_up=(0.1, 0.1))
    return UNet(3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)


def trained(model: nn.Module, batches: DataLoader, task: bp.Task, epochs: int, rate: float) -> nn.Module:
    """The network after your own training, whatever that is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            task.mean_loss(model, *task.inputs_and_targets(batch)).backward()
            optimizer.step()
    return model.eval()


def main(name: str = "vnet", output: str | None = None, ratio: float | None = None, size: int = 32) -> bp.Compressed:
    """With a ratio, so much goes; otherwise as much as a loss of ten points of mean Dice allows."""
    torch.manual_seed(0)
    flips = RandFlipd(KEYS, prob=0.5, spatial_axis=0), RandFlipd(KEYS, prob=0.5, spatial_axis=1)
    loaders = bp.Loaders(
        train=loader(2 * size, 0, flips),
        val=loader(size, 1),  # and all others without anything random
        confirm=loader(2 * size, 2),
        test=loader(size, 3),
    )
    task = bp.segmentation("dice", loss=DiceCELoss(to_onehot_y=True, softmax=True), read=read)
    epochs, rate = (2, 1e-3) if name == "vnet" else (12, 1e-2)
    goal = {"max_drop": 0.1} if ratio is None else {"basis_ratio": ratio, "filter_ratio": ratio}
    result = bp.compress(
        trained(network(name), loaders.train, task, epochs, rate),
        loaders,
        task=task,
        keep_head=True,  # the baseline is the network as it was trained above
        epochs=1 if name == "vnet" else 3,
        search=bp.SearchConfig(polish=False, tolerance=0.5),
        output=output,
        **goal,
    )
    before, after = result.summary.test.before, result.summary.test.after
    print(result.summary.verdict)
    print(f"mean Dice on the test volumes: {before.accuracy:.1%} before, {after.accuracy:.1%} after")
    print(f"parameters: {before.parameters:,} before, {after.parameters:,} after")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:3])
