"""How many images the loss basis needs: what its scores promise, against the same on images that it was not made from.

    python benchmarks/basis_images.py --assets DIR [--counts 128 512 1500]

EfficientNet-Lite0 with its ImageNet weights is trained briefly on CIFAR-10 at 64x64, then split by the loss on so many
of its training images. For each layer the half of its vectors that are worth least is taken, and what they are worth is
estimated on the images of the basis and on as many other training images. A basis made from few images finds directions
that seem free on these alone: the ratio says how much more they are worth on the others, the median over the layers of
the first, the middle and the last third of the network. DIR is described in benchmarks/backbones.py. Writes
results/basis_images.json.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from backbones import build, data
from common import write_result
from torch import nn

from basisprune import RECIPES, PreparedBatches, fit
from basisprune.data import take
from basisprune.importance import loss_scores
from basisprune.importance.loss import split_by_loss
from basisprune.types import Scores

MODEL, DATASET, SIDE, IMAGES, PASSES, SEED = "efficientnet_lite0", "cifar10", 64, 4096, 3, 0
THIRDS = ("first", "middle", "last")


def cheap_halves(scores: Scores) -> dict[str, list[int]]:
    """The vectors of each layer that are worth least, half of them."""
    return {
        name: sorted(range(len(layer.values)), key=layer.values.__getitem__)[: len(layer.values) // 2]
        for name, layer in scores.layers.items()
    }


def worth(scores: Scores, chosen: dict[str, list[int]]) -> list[float]:
    """What the chosen vectors of each layer are worth."""
    return [sum(scores.layers[name].values[place] for place in places) for name, places in chosen.items()]


def ratios(model: nn.Module, own: PreparedBatches, others: PreparedBatches) -> dict[str, float]:
    """How much more the cheap half of the vectors is worth on other images, in each third of the layers."""
    split, found = split_by_loss(model, own)
    chosen = cheap_halves(found.scores)
    pairs = zip(worth(loss_scores(split, others), chosen), worth(found.scores, chosen), strict=True)
    each = [there / here for there, here in pairs if here > 0]
    size = -(-len(each) // len(THIRDS))
    return {
        third: round(statistics.median(each[place * size : (place + 1) * size]), 2)
        for place, third in enumerate(THIRDS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    splits, _ = data(DATASET, options.assets, images=IMAGES, test_images=1, seed=SEED)
    train = replace(RECIPES["quick"].train, epochs=PASSES)
    model = build(MODEL, options.assets, num_classes=10, input_size=SIDE)
    trained = fit(model, splits.train, None, train, progress=False).model
    found = {}
    for count in options.counts:
        parts = range(count), range(IMAGES // 2, IMAGES // 2 + count)
        own, others = (PreparedBatches(take(splits.train, part), model.input_spec, batch_size=64) for part in parts)
        found[str(count)] = ratios(trained, own, others)
        print(count, found[str(count)], flush=True)
    config = {"model": MODEL, "dataset": DATASET, "side": SIDE, "images": IMAGES, "passes": PASSES, "seed": SEED}
    write_result("basis_images", config, found)


if __name__ == "__main__":
    main()
