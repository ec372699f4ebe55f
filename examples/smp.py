"""A network of segmentation-models-pytorch, made smaller within a loss of mean IoU that is certified.

    python examples/smp.py [OUTPUT]

The pictures are drawn here: discs and squares on noise. Replace `shapes` by your own loaders and `FPN` by any network
of the library, with weights of your own: pip install 'basisprune[onnx,report,smp]'.
"""

from __future__ import annotations

import sys

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import basisprune as bp

SIDE = 64


def shapes(count: int, seed: int) -> TensorDataset:
    """Pictures (N, 3, 64, 64) with a disc or a square or both, and their masks (N, 64, 64)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.arange(SIDE).view(1, -1, 1), torch.arange(SIDE).view(1, 1, -1)
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for kind in (1, 2):
        places = torch.randint(14, SIDE - 14, (2, count, 1, 1), generator=generator)
        sizes = torch.randint(8, 14, (count, 1, 1), generator=generator)
        down, right = (rows - places[0]).abs(), (columns - places[1]).abs()
        inside = down**2 + right**2 <= sizes**2 if kind == 1 else torch.maximum(down, right) < sizes
        masks[inside & (torch.rand(count, 1, 1, generator=generator) < 0.8)] = kind
    colours = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.5, 0.2], [0.2, 0.5, 0.9]])
    pictures = colours[masks].movedim(-1, 1) + 0.4 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(pictures, masks)


def trained(network: nn.Module, loader: DataLoader[tuple[Tensor, ...]], task: bp.Task, epochs: int) -> nn.Module:
    """The network after your own training, whatever that is."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for pictures, masks in loader:
            optimizer.zero_grad()
            task.mean_loss(network, pictures, masks).backward()
            optimizer.step()
    return network.eval()


def main(output: str | None = None, epochs: int = 8) -> bp.Compressed:
    torch.manual_seed(0)
    train, val, confirm, test = (shapes(count, seed) for seed, count in enumerate((192, 64, 128, 64)))
    loaders = bp.Loaders(
        train=DataLoader(train, batch_size=16, shuffle=True),
        val=DataLoader(val, batch_size=32),
        confirm=DataLoader(confirm, batch_size=32),
        test=DataLoader(test, batch_size=32),
    )
    task = bp.segmentation(loss=smp.losses.DiceLoss("multiclass"))
    widths = {"decoder_pyramid_channels": 64, "decoder_segmentation_channels": 32}
    network = smp.FPN("tu-mobilenetv3_small_050", encoder_weights=None, classes=3, **widths)

    result = bp.compress(
        trained(network, loaders.train, task, epochs),
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
