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
from backbones import METHOD, trained_network
from common import Cells
from torch import nn

from basisprune import PreparedBatches, evaluate
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.transfer.model import spec_of
from basisprune.types import LayerScores, Scores


def dense_filters(model: nn.Module, layers: tuple[str, ...]) -> Scores:
    scores = {}
    for name in layers:
        owner: Any = model.get_submodule(name.removesuffix(".scaling"))
        weight = owner.weight.detach()  # of a pair, that of the dense layer it stands for
        scores[name] = LayerScores(tuple(weight.flatten(1).abs().sum(1).tolist()))
    return Scores("l1 of the dense filter", scores)


def compare(name: str, options: argparse.Namespace) -> list[dict[str, float]]:
    recipe = METHOD
    network, _, val, test = trained_network(name, "fashion_mnist", options.assets, options.runs)
    scores = taylor_scores(network, PreparedBatches(val, spec_of(network), limit=500, shuffle=True))
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
