"""Norms, scales and classifier trained, against logistic regression on frozen features, which users would try first.

    python benchmarks/recipe.py --assets DIR [--models resnet50 ...] [--datasets mnist ...]

2,000 training images at 64x64, 1,000 test images, one thread; the decomposed network is trained for the recipe's
passes. DIR is described in benchmarks/backbones.py. Goes on where it was stopped; writes results/recipe.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from backbones import DATASETS, METHOD, MODELS, build, data, trained
from common import Cells
from sklearn.linear_model import LogisticRegressionCV

from basisprune import PreparedBatches, evaluate
from basisprune.data import LabelledImages
from basisprune.transfer.model import TransferModel

Array: TypeAlias = npt.NDArray[np.generic]


def features(model: TransferModel, data: LabelledImages) -> tuple[np.ndarray, np.ndarray]:
    with torch.inference_mode():
        rows = [(model.forward_features(images), labels) for images, labels in PreparedBatches(data, model.input_spec)]
    return torch.cat([row for row, _ in rows]).numpy(), torch.cat([labels for _, labels in rows]).numpy()


def logistic_regression(model: TransferModel, train: LabelledImages, test: LabelledImages) -> float:
    """Its accuracy on the test images, with the regularisation chosen by cross-validation."""
    (x, y), (x_test, y_test) = features(model, train), features(model, test)
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    regression = LogisticRegressionCV(
        Cs=[1e-3, 1e-2, 1e-1], cv=3, max_iter=300, l1_ratios=(0,), use_legacy_attributes=False, scoring="accuracy"
    )
    return float(regression.fit((x - mean) / deviation, y).score((x_test - mean) / deviation, y_test))


def compare(name: str, dataset: str, options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(options.seed)
    recipe = METHOD
    splits, test = data(
        dataset, options.assets, images=options.images, test_images=options.test_images, seed=options.seed
    )
    model = build(name, options.assets, num_classes=10, input_size=options.size)
    start = time.perf_counter()
    checkpoint = options.runs / f"{name}-{dataset}-method-{options.seed}.pt"
    network = trained(model, splits.train, recipe, options.seed, checkpoint)
    seconds = time.perf_counter() - start
    return {
        "logistic regression": logistic_regression(model, splits.train, test),
        "decomposed and trained": evaluate(network, test).accuracy,
        "epochs": recipe.train.epochs,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where trained networks go")
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"], choices=MODELS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {key: value for key, value in vars(options).items() if key not in ("assets", "runs", "models", "datasets")}
    cells = Cells("recipe", config | {"training": dataclasses.asdict(METHOD.train)})
    for name in options.models:
        for dataset in options.datasets:
            cells.run(f"{name}, {dataset}", lambda n=name, d=dataset: compare(n, d, options))  # type: ignore[misc]


if __name__ == "__main__":
    main()
