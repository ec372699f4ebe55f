"""A SegFormer of transformers from a folder of `from_pretrained`, made small within a loss of mean IoU.

    python examples/transformers_segformer.py [OUTPUT]

The folder is written here, from a small config that learns drawn shapes; with weights of your own, start at `compress`.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSemanticSegmentation, PreTrainedModel, SegformerConfig

import basisprune as bp

SIDE = 32


def shapes(count: int, seed: int) -> TensorDataset:
    """Images (N, 3, 32, 32) of noise with a bright disc, and its masks (N, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = torch.randint(8, SIDE - 8, (2, count, 1, 1), generator=generator)
    radii = torch.randint(5, 9, (count, 1, 1), generator=generator)
    masks = ((rows - places[0]) ** 2 + (columns - places[1]) ** 2 <= radii**2).long()
    return TensorDataset(masks[:, None] + 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=generator), masks)


def config() -> SegformerConfig:
    return SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=2,
    )  # fmt: skip


def trained(network: PreTrainedModel, loader: DataLoader[tuple[Tensor, Tensor]], epochs: int) -> PreTrainedModel:
    """Your own training; the loss is the library's."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for images, masks in loader:
            optimizer.zero_grad()
            network(pixel_values=images, labels=masks).loss.backward()
            optimizer.step()
    return network.eval()


def main(output: str | None = None, epochs: int = 10) -> bp.Compressed:
    torch.manual_seed(0)
    parts = zip(("train", "val", "confirm", "test"), (192, 96, 192, 96), strict=True)
    data = {part: shapes(count, seed) for seed, (part, count) in enumerate(parts)}
    loaders = bp.Loaders(**{part: DataLoader(each, 16, shuffle=part == "train") for part, each in data.items()})
    with tempfile.TemporaryDirectory() as folder:
        network = AutoModelForSemanticSegmentation.from_config(config())
        trained(network, loaders.train, epochs).save_pretrained(folder)

        network = AutoModelForSemanticSegmentation.from_pretrained(folder)
    result = bp.compress(
        network,
        loaders,
        task="segmentation",  # its small logits are enlarged as the library's post-processing does
        max_drop=0.05,
        keep_head=True,
        epochs=3,
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
