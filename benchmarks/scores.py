"""What is lost at once when basis vectors go: by the size of the batches that score, and by what makes up for them.

    python benchmarks/scores.py --assets DIR [--models resnet50 ...] [--datasets fashion_mnist ...]

Starts from the networks that benchmarks/recipe.py trained (or trains them). A score is an average of squares, one for
each batch: of 500 validation images, batches of 128 give four of them, batches of 8 give 63. `compensate` is what
`prune_basis` does about what the removed vectors contributed. The accuracy is that on 1,000 test images right after
pruning, without tuning. Writes results/scores.json.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from backbones import DATASETS, MODELS, trained_network
from common import Cells

from basisprune import PlanConfig, PreparedBatches, evaluate, measure
from basisprune.basis.refit import basis_statistics
from basisprune.importance import taylor_scores
from basisprune.planning import plan_basis
from basisprune.pruning import Compensation, prune_basis
from basisprune.transfer.model import spec_of


def prune_every_way(name: str, dataset: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    network, train, val, test = trained_network(name, dataset, options.assets, options.runs)
    statistics = basis_statistics(network, PreparedBatches(train, spec_of(network), limit=512, shuffle=True))
    rows: list[dict[str, Any]] = [{"ratio": 0.0, "accuracy": evaluate(network, test).accuracy}]
    for size in options.batches:
        batches = PreparedBatches(val, spec_of(network), batch_size=size, limit=500, shuffle=True)
        scores = taylor_scores(network, batches)
        for ratio, how in product(options.ratios, get_args(Compensation)):
            plan = plan_basis(scores, ratio, PlanConfig())
            given = statistics if how == "refit" else None
            pruned = prune_basis(network, plan, compensate=how, statistics=given)
            row = {"batch": size, "ratio": ratio, "compensate": how, "parameters": measure(pruned).parameters}
            rows.append(row | {"accuracy": evaluate(pruned, test).accuracy})
            print(name, dataset, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where trained networks are")
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"], choices=MODELS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.7])
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("scores", {"ratios": options.ratios, "batches": options.batches})
    for name, dataset in product(options.models, options.datasets):
        cells.run(f"{name}, {dataset}", lambda n=name, d=dataset: prune_every_way(n, d, options))  # type: ignore[misc]


if __name__ == "__main__":
    main()
