"""Every framework of the paper and its peers: the smallest network within 1 % of the unpruned accuracy.

    python experiments/run.py --assets DIR [--preset mini] [--models resnet50 ...] [--datasets fashion_mnist ...]
                              [--frameworks basis+taylor ...] [--variants default] [--seeds 0] [--ratio 0.8]

Each cell (network, dataset, framework, variant, seed) is written to <results>/<preset>.jsonl as soon as it is done,
and skipped when it is there. With other folders for --results and --runs any of them is repeated from scratch. A run
that was stopped goes on. `python experiments/summarise.py` makes tables and figures of the results.

With --ratio there is no search: each framework removes that fraction at once and tunes for all passes. So variants of
the recipe are compared from the same start with the same budget. Their results go to <preset>-<ratio>.jsonl.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import studies
import torch
from peers import RIVALS, RivalPipeline
from protocol import FRAMEWORKS, PROTOCOLS, ROWS, START, VARIANTS, Protocol

from basisprune import Recipe, measure, predict
from basisprune.basis.layers import basis_pairs
from basisprune.budget.proportions import Paired, wilson_interval
from basisprune.callback import NullCallback
from basisprune.data import Splits, load_data, take
from basisprune.importance import taylor_scores
from basisprune.method.states import State
from basisprune.recipes import Steps, named
from basisprune.search import Search
from basisprune.search.candidates import SearchResult

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from backbones import DATASETS, build  # the benchmarks use them too

RESULTS = Path(__file__).parent / "results"


def load(dataset: str, assets: Path, protocol: Protocol, seed: int) -> Splits:
    """The dataset's parts, as many images of each as the protocol says."""
    splits = load_data(assets / "data" / f"{dataset}.npz", val_fraction=0.1, limit=protocol.images, seed=seed)
    assert splits.val is not None
    assert splits.test is not None
    val = splits.val if protocol.val_images is None else take(splits.val, range(protocol.val_images))
    test = splits.test if protocol.test_images is None else take(splits.test, range(protocol.test_images))
    return replace(splits, val=val, test=test)


def seeded(recipe: Recipe, seed: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, seed=seed), finetune=replace(recipe.finetune, seed=seed))


class Bench:
    """One network on one dataset: what all its cells share."""

    def __init__(self, model: str, dataset: str, variant: str, seed: int, options: argparse.Namespace) -> None:
        self.protocol = PROTOCOLS[options.preset]
        self.dataset, self.variant, self.ratio = dataset, variant, options.ratio
        self.known_hits: dict[Steps, Any] = {}
        torch.manual_seed(seed)
        splits = load(dataset, options.assets, self.protocol, seed)
        network = build(model, options.assets, num_classes=splits.num_classes, input_size=self.protocol.side(dataset))
        recipe = seeded(VARIANTS[variant](self.protocol.recipe(dataset)), seed)
        folder = options.runs / options.preset / f"{model}-{dataset}-{seed}"
        self.pipeline = RivalPipeline(network, splits, recipe, folder / variant.replace(" ", "-"), callback=Log())
        for plainer in ("default", "weights"):  # what a variant does not change is trained only once
            shared = seeded(VARIANTS[plainer](self.protocol.recipe(dataset)), seed)
            start = RivalPipeline(network, splits, shared, folder / plainer, callback=Log())
            if variant != plainer == "default":
                self.pipeline.adopt(start.dense())
            if recipe.basis == shared.basis:
                if variant != plainer:
                    self.pipeline.adopt(start.decomposed())
                break

    def search(self, framework: str) -> Search:
        """The search that a framework or peer calls for; all compare with the network trained without pruning."""
        pipeline, reference = self.pipeline, self.pipeline.dense()
        budget, config = self.protocol.budget(self.dataset), self.protocol.search
        if framework in FRAMEWORKS:
            return Search(pipeline, budget, replace(config, framework=framework), reference=reference)  # type: ignore[arg-type]
        if framework == "truncated svd":
            pipeline = pipeline.for_truncation()
        return Search(pipeline, budget, config, framework=RIVALS[framework], reference=reference)

    def config(self, framework: str) -> dict[str, Any]:
        """The settings that a framework or peer is run with, as JSON values."""
        with_search = framework not in (FRAMEWORKS[0], START)
        pipeline = self.search(framework).pipeline if with_search else self.pipeline
        return self.protocol.describe(self.dataset) | {"recipe": asdict(pipeline.settings)}

    def cell(self, framework: str) -> dict[str, Any]:
        """The result of one framework: the smallest network that was found, and all that were tried."""
        start = time.perf_counter()
        reference = self.pipeline.dense()
        record: dict[str, Any] = {"baseline": self.on_test(reference)}
        if framework == START:
            record |= {"result": self.compared(self.pipeline.decomposed(), reference)}
        elif framework != FRAMEWORKS[0] and self.ratio is not None:
            record |= {"result": self.pruned_at_once(framework)}
        elif framework != FRAMEWORKS[0]:
            record |= self.outcome(self.search(framework).run())
        if framework == "basis" and self.variant in ("default", "paper"):
            record["scales"] = self.scales()
        return record | {"seconds": round(time.perf_counter() - start, 1)}

    def outcome(self, found: SearchResult) -> dict[str, Any]:
        chosen = found.candidates[found.chosen]
        result = self.compared(found.state, found.reference) | {
            "basis_ratio": chosen.basis_ratio,
            "filter_ratio": chosen.filter_ratio,
            "undecided": chosen.undecided,
            "deployed_parameters": chosen.parameters,
            "deployed_macs": chosen.macs,
        }
        return {
            "result": result,
            "candidates": [asdict(each) | {"name": named(each.steps)} for each in found.candidates],
        }

    def pruned_at_once(self, framework: str) -> dict[str, Any]:
        """What is left after removing the ratio of basis vectors, filters or both, and tuning for all passes."""
        search = self.search(framework)
        state = search.pipeline.start(search.framework)
        for move in search.framework.moves:
            state = search.pipeline.prune(state, move, self.ratio)
        untuned = state.stages[-2].accuracy
        return self.compared(state, self.pipeline.dense()) | {"ratio": self.ratio, "untuned_val_accuracy": untuned}

    def compared(self, state: State, reference: State) -> dict[str, Any]:
        """Accuracy and size of a network, and what it lost on the test images against the unpruned one."""
        pair = Paired.of(self.hits(reference), self.hits(state))
        return self.on_test(state) | {"test_drop": pair.drop, "test_drop_interval": pair.interval()}

    def on_test(self, state: State) -> dict[str, Any]:
        """Accuracy on the test images, and the size as the paper counts it."""
        report, hits = measure(state.model), self.hits(state)
        return {
            "val_accuracy": state.outcomes.value,
            "test_accuracy": float(hits.mean()),
            "test_interval": wilson_interval(int(hits.sum()), len(hits)),
            "parameters": report.paper_parameters,
            "torch_parameters": report.parameters,
            "macs": report.macs,
        }

    def hits(self, state: State) -> Any:
        """Which test images the network gets right; asked for once."""
        if state.steps not in self.known_hits:
            assert self.pipeline.splits.test is not None
            self.known_hits[state.steps] = predict(state.model, self.pipeline.splits.test).hits
        return self.known_hits[state.steps]

    def scales(self) -> dict[str, Any]:
        """Scaling factors and Taylor scores of every decomposed layer, in the order of the basis."""
        model = self.pipeline.decomposed().model
        scores = taylor_scores(model, self.pipeline.scoring.batches())
        return {
            name: {
                "scales": [round(scale, 5) for scale in pair.scaling.scale.detach().double().tolist()],
                "taylor": [float(f"{value:.4g}") for value in scores.layers[name].values],
            }
            for name, pair in basis_pairs(model).items()
        }


class Log(NullCallback):
    """Writes each line of a run with the time."""

    def log(self, line: str) -> None:
        log(line)


def log(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="weights and datasets, see benchmarks/backbones.py")
    parser.add_argument("--preset", default="mini", choices=list(PROTOCOLS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where trained networks go")
    parser.add_argument("--models", nargs="+", choices=PROTOCOLS["full"].models, help="all of the preset by default")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--frameworks", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--variants", nargs="+", default=["default"], choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--ratio", type=float, help="remove this fraction at once instead of searching")
    options = parser.parse_args()
    study = options.results / f"{options.preset}{'' if options.ratio is None else f'-{options.ratio}'}.jsonl"
    if options.preset == "mini":
        torch.set_num_threads(1)
    models = options.models or PROTOCOLS[options.preset].models
    for seed, model, dataset, variant in product(options.seeds, models, options.datasets, options.variants):
        bench = None
        for framework in options.frameworks:
            names = (model, dataset, framework, variant, str(seed))
            cell = "-".join(names).replace(" ", "_")
            if cell in studies.read(study):
                continue
            log(f"== {', '.join(names)}")
            bench = bench or Bench(model, dataset, variant, seed, options)
            identity = dict(zip(("model", "dataset", "framework", "variant", "seed"), names, strict=True))
            record = identity | {"preset": options.preset, "config": bench.config(framework)}
            record |= {"versions": versions(), "device": device()} | bench.cell(framework)
            studies.add(study, cell, record)
            log(f"   {record.get('result', record['baseline'])}")


def versions() -> dict[str, str]:
    packages = ("basisprune", "torch", "timm", "numpy", "torch-pruning")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def device() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"


if __name__ == "__main__":
    main()
