"""How to make scores of different layers comparable, and how much every layer should keep: accuracy after pruning.

    python benchmarks/plan.py --assets DIR [--models resnet50 ...] [--datasets fashion_mnist ...]

Starts from the networks that benchmarks/recipe.py trained (or trains them), scores them on 500 validation images,
removes basis vectors by each normalisation, floor and ratio, and measures the accuracy on 1,000 test images right
after pruning, without tuning. Writes results/plan.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch
from backbones import DATASETS, MODELS, trained_network
from common import Cells

from basisprune import PlanConfig, PreparedBatches, evaluate, measure
from basisprune.errors import PlanError
from basisprune.importance import taylor_scores
from basisprune.planning import Normalisation, plan_basis
from basisprune.pruning import prune_basis
from basisprune.transfer.model import spec_of

Row = dict[str, float | str | None]


def prune_every_way(name: str, dataset: str, options: argparse.Namespace) -> list[Row]:
    network, _, val, test = trained_network(name, dataset, options.assets, options.runs)
    scores = taylor_scores(network, PreparedBatches(val, spec_of(network), limit=500, shuffle=True))
    rows: list[Row] = [{"ratio": 0.0, "accuracy": evaluate(network, test).accuracy}]
    for ratio in options.ratios:
        for normalise in get_args(Normalisation):
            for share in options.shares:
                config = PlanConfig(normalise=normalise, min_share=share)
                row: Row = {"ratio": ratio, "normalise": normalise, "min_share": share}
                try:
                    pruned = prune_basis(network, plan_basis(scores, ratio, config))
                except PlanError:
                    rows.append(row | {"accuracy": None})
                    continue
                report = measure(pruned)
                row |= {"accuracy": evaluate(pruned, test).accuracy}
                rows.append(row | {"parameters": report.parameters, "macs": report.macs})
                print(name, dataset, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where trained networks are")
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"], choices=MODELS)
    parser.add_argument("--datasets", nargs="+", default=["fashion_mnist"], choices=DATASETS)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.3, 0.5, 0.7, 0.8])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.05, 0.1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("plan", {"ratios": options.ratios, "shares": options.shares})
    for name in options.models:
        for dataset in options.datasets:
            cells.run(f"{name}, {dataset}", lambda n=name, d=dataset: prune_every_way(n, d, options))  # type: ignore[misc]


if __name__ == "__main__":
    main()
