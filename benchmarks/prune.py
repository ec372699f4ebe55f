"""How long filter pruning takes against torch-pruning, and HRank against a plain forward pass.

    python benchmarks/prune.py [--models resnet50 densenet121] [--size 224] [--repeats 5]

Random weights, one thread, an example image of the usual size. `pruning` is our time for tracing, scoring by L1,
planning and pruning 30 % of the filters over that of torch-pruning's MagnitudePruner (graph included) for the same,
interleaved. `hrank` is the time to score 500 images at 64x64 by HRank over that of the forward pass alone. Writes
results/prune.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import timm
import torch
import torch_pruning
from common import write_result
from torch import nn

from basisprune.coupling import trace_coupling
from basisprune.deploy.latency import interleaved, speedup
from basisprune.importance import score_filters
from basisprune.importance.hrank import mean_ranks
from basisprune.planning import plan_filters
from basisprune.pruning import prune_filters


def ours(model: nn.Module, images: torch.Tensor) -> nn.Module:
    coupling = trace_coupling(model, images)
    scores = score_filters(model, "l1", coupling.layers)
    return prune_filters(model, plan_filters(model, scores, 0.3, coupling=coupling), inplace=True)


def theirs(model: nn.Module, images: torch.Tensor) -> nn.Module:
    pruner = torch_pruning.pruner.MagnitudePruner(
        model,
        images,
        importance=torch_pruning.importance.MagnitudeImportance(p=1),
        global_pruning=True,
        pruning_ratio=0.3,
        ignored_layers=[model.get_classifier()],  # type: ignore[operator]
    )
    pruner.step()
    return model


def on_copies(
    run: Callable[[nn.Module, torch.Tensor], nn.Module], model: nn.Module, images: torch.Tensor, count: int
) -> Callable[[], object]:
    """A run that prunes a fresh copy each time; the copies are made beforehand."""
    copies = [copy.deepcopy(model) for _ in range(count)]
    return lambda: run(copies.pop(), images)


def compare(name: str, size: int, repeats: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    images = torch.randn(1, 3, size, size)
    runs = {
        "basisprune": on_copies(ours, model, images, repeats + 1),
        "torch-pruning": on_copies(theirs, model, images, repeats + 1),
    }
    pruning = interleaved(runs, repeats=repeats, warmup=1)
    batches = list(torch.randn(500, 3, 64, 64).to(memory_format=torch.channels_last).split(50))
    model = model.to(memory_format=torch.channels_last)
    layers = [module_name for module_name, module in model.named_modules() if isinstance(module, nn.Conv2d)]

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    ranking = interleaved(
        {"hrank": lambda: mean_ranks(model, layers, batches), "forward": forward}, repeats=3, warmup=0
    )
    medians = {key: statistics.median(values) for key, values in (pruning | ranking).items()}
    return {
        "pruning": speedup(pruning, "basisprune", "torch-pruning"),
        "hrank": speedup(ranking, "hrank", "forward"),
        "median seconds": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "densenet121"])
    parser.add_argument("--size", type=int, default=224, help="the side of the example image")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in options.models:
        results[name] = compare(name, options.size, options.repeats)
        print(name, results[name], flush=True)
    print(f"written to {write_result('prune', vars(options), results)}")


if __name__ == "__main__":
    main()
