"""Which L1 norm prunes a decomposed network better: that of the dense filter, or of the second factor alone.

    python benchmarks/l1.py --assets DIR

Starts from the networks that benchmarks/recipe.py trained on Fashion-MNIST, removes 30 % of their basis vectors,
then filters by either norm, and measures the accuracy on 1,000 test images right after pruning. Writes
results/l1.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from backbones import build, data, trained
from common import Cells
from torch import nn

from basisprune import (
    PreparedBatches,
    evaluate,
    plan_basis,
    plan_filters,
    prune_basis,
    prune_filters,
    score_filters,
    taylor_scores,
    trace_coupling,
)
from basisprune.config import RECIPES
from basisprune.types import LayerScores, Scores


def dense_filters(model: nn.Module, layers: tuple[str, ...]) -> Scores:
    scores = {}
    for name in layers:
        owner: Any = model.get_submodule(name.removesuffix(".scaling"))
        weight = owner.weight.detach()  # of a pair, that of the dense layer it stands for
        scores[name] = LayerScores(tuple(weight.flatten(1).abs().sum(1).tolist()))
    return Scores("l1 of the dense filter", scores)


def compare(name: str, options: argparse.Namespace) -> list[dict[str, float]]:
    torch.manual_seed(0)
    recipe = RECIPES["quick"]
    splits, test = data("fashion_mnist", options.assets, images=2000, test_images=1000, seed=0)
    model = build(name, options.assets, num_classes=10, input_size=64)
    network = trained(model, splits.train, recipe, 0, options.runs / f"{name}-fashion_mnist-quick-0.pt")
    assert splits.val is not None
    scores = taylor_scores(network, PreparedBatches(splits.val, model.input_spec, limit=500, shuffle=True))
    network = prune_basis(network, plan_basis(scores, 0.3, recipe.plan))
    coupling = trace_coupling(network, torch.zeros(2, 3, 64, 64))
    rows = []
    for ratio in options.ratios:
        row = {"ratio": ratio}
        for key, given in (
            ("dense filter", dense_filters(network, coupling.layers)),
            ("second factor", score_filters(network, "l1", coupling.layers)),
        ):
            plan = plan_filters(network, given, ratio, recipe.filter_plan, coupling=coupling)
            row[key] = evaluate(prune_filters(network, plan), test).accuracy
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmarks"), help="where trained networks are")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.02, 0.05, 0.1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("l1", {"ratios": options.ratios})
    for name in ("efficientnet_lite0", "resnet50"):
        cells.run(name, lambda n=name: compare(n, options))  # type: ignore[misc]


if __name__ == "__main__":
    main()
