"""A small detector with a loss and a metric of its own, made small within a loss of that metric.

    python examples/detection.py [OUTPUT]

Each cell of a grid says whether the centre of a box lies in it, and where the box is: an anchor-free head. The images,
rectangles on noise, are drawn here, with as many boxes as there happen to be. What is special about detection is in the
twenty lines of `loss`, `outcome` and `f1`: the targets are lists of boxes, and the metric counts boxes over all images.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou

import basisprune as bp

SIDE, CELL = 32, 4
GRID = SIDE // CELL


class Detector(nn.Module):
    """What each of 8 x 8 cells says (N, 5, 8, 8): whether there is a box, its centre in the cell, and its size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((3, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
            conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(2 * width, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


def boxes_of(output: Tensor) -> Tensor:
    """The boxes (N, 8, 8, 4) of all cells: left, top, right, bottom in pixels."""
    places = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"))
    centres = CELL * (output[:, 1:3].sigmoid() + places)
    half = SIDE / 2 * output[:, 3:5].sigmoid()
    return torch.cat([centres - half, centres + half], dim=1).permute(0, 2, 3, 1)


def cells_of(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """The row and column of the cell that each box belongs to."""
    centres = ((boxes[:, :2] + boxes[:, 2:]) / 2 / CELL).long().clamp(0, GRID - 1)
    return centres[:, 1], centres[:, 0]


def loss(output: Tensor, targets: list[Tensor]) -> Tensor:
    """Is there a box, and where: focal weights are left out, the grid is small."""
    wanted, found = torch.zeros_like(output[:, 0]), boxes_of(output)
    distances = [found.new_zeros(0, 4)]
    for index, boxes in enumerate(targets):
        rows, columns = cells_of(boxes)
        wanted[index, rows, columns] = 1
        distances.append(found[index, rows, columns] - boxes)
    is_box = F.binary_cross_entropy_with_logits(output[:, 0], wanted, pos_weight=torch.tensor(8.0))
    return is_box + torch.cat(distances).abs().mean() / 4


def outcome(output: Tensor, targets: list[Tensor]) -> Tensor:
    """For each image: the boxes that are found, all that are said, and all that are there."""
    rows = []
    for said, cells, boxes in zip(output[:, 0], boxes_of(output), targets, strict=True):
        named = cells[said > 0]
        hits = 0
        if len(named) and len(boxes):
            hits = int((box_iou(boxes, named).amax(1) > 0.5).sum())
        rows.append([hits, len(named), len(boxes)])
    return torch.tensor(rows)


def f1(rows: np.ndarray) -> float:
    """The F1 score of all boxes at an IoU of one half."""
    hits, said, there = rows.sum(0)
    return 2 * hits / max(said + there, 1)


TASK = bp.Task("detection", loss, outcome, f1, metric_name="F1 of boxes", is_share=True)


def scenes(count: int, seed: int, batch_size: int = 32) -> list[tuple[Tensor, list[Tensor]]]:
    """Batches of images (N, 3, 32, 32) with the boxes of each, one to three of them."""
    generator = torch.Generator().manual_seed(seed)
    images, boxes = 0.25 * torch.randn(count, 3, SIDE, SIDE, generator=generator), []
    for image in images:
        mine = []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            left, top = torch.randint(0, SIDE - 12, (2,), generator=generator).tolist()
            width, height = torch.randint(6, 12, (2,), generator=generator).tolist()
            image[:, top : top + height, left : left + width] = torch.rand(3, 1, 1, generator=generator) + 0.5
            mine.append([left, top, left + width, top + height])
        boxes.append(torch.tensor(mine, dtype=torch.float32))
    starts = range(0, count, batch_size)
    return [(images[start : start + batch_size], boxes[start : start + batch_size]) for start in starts]


def trained(model: nn.Module, batches: list[tuple[Tensor, list[Tensor]]], epochs: int) -> nn.Module:
    """The network after your own training, whatever that is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for images, boxes in batches:
            optimizer.zero_grad()
            loss(model(images), boxes).backward()
            optimizer.step()
    return model.eval()


def main(output: str | None = None, epochs: int = 12) -> bp.Compressed:
    torch.manual_seed(0)
    train, val, confirm, test = (scenes(count, seed) for seed, count in enumerate((256, 96, 256, 96)))
    result = bp.compress(
        trained(Detector(), train, epochs),
        bp.Loaders(train=train, val=val, confirm=confirm, test=test),
        task=TASK,
        max_drop=0.08,
        epochs=3,
        search=bp.SearchConfig(polish=False, tolerance=0.5),
        output=output,
    )
    before, after = result.summary.test.before, result.summary.test.after
    print(result.summary.verdict)
    print(f"F1 of boxes on the test images: {before.accuracy:.1%} before, {after.accuracy:.1%} after")
    print(f"parameters: {before.parameters:,} before, {after.parameters:,} after")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
