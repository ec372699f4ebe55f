"""What training all weights gains over norms, scales and classifier alone, before and after pruning.

    python benchmarks/all_weights.py --assets DIR [--models resnet50 ...] [--ways method all ...] [--seeds 0 1 ...]

CIFAR-10, 2,000 training images at 64x64, 2,000 test images, one thread. Each network is trained from its ImageNet
weights ("unpruned"); or trained by the method for six passes, 80 % of its basis vectors removed (the basis of the
outputs, by Taylor scores, with a refit), and tuned for two passes ("pruned"). The number in the name of a way is its
`weight_lr`. DIR is described in benchmarks/backbones.py. Goes on where it was stopped; writes results/all_weights.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from backbones import MODELS, build, data
from common import Cells
from torch import nn

from basisprune import PreparedBatches, Session, TrainConfig, decompose, evaluate, fit, measure
from basisprune.basis.refit import basis_statistics
from basisprune.data import Augment, LabelledImages, Splits
from basisprune.importance import taylor_scores
from basisprune.planning import plan_basis
from basisprune.pruning import prune_basis

RATIO = 0.8
METHOD = TrainConfig(
    batch_size=32,
    optimizer="adamw",
    lr=3e-3,
    min_lr=3e-5,
    norm_statistics="fixed",
    augmentation=Augment(shift=0.05, flip=True),
)
ALL = replace(METHOD, train="all", clip_norm=5.0)
CROPS = Augment(flip=True, crop=0.5)
WAYS = {
    "method": METHOD,
    "all 0.1": replace(ALL, weight_lr=0.1),
    "all 0.3": replace(ALL, weight_lr=0.3),
    "all 1": replace(ALL, weight_lr=1.0),
    "all 0.3, classifier first": replace(ALL, weight_lr=0.3, head_first=0.25, warmup=0.05),
    "all 0.3, batch statistics": replace(ALL, weight_lr=0.3, norm_statistics="batch"),
    "all 0.3, smoothing": replace(ALL, weight_lr=0.3, label_smoothing=0.1),
    "all 0.3, crop": replace(ALL, weight_lr=0.3, augmentation=CROPS),
    "all 0.3, crop, colour": replace(ALL, weight_lr=0.3, augmentation=replace(CROPS, colour=0.3)),
    "all 0.3, trivial": replace(ALL, weight_lr=0.3, augmentation=replace(CROPS, crop=1.0, policy="trivial")),
    "all 0.3, mixup": replace(ALL, weight_lr=0.3, augmentation=replace(METHOD.augmentation, mixup=0.2)),
    "all 0.3, cutmix": replace(ALL, weight_lr=0.3, augmentation=replace(METHOD.augmentation, cutmix=1.0)),
    "method, taught": replace(METHOD, distill=0.5),
    "all 0.3, taught": replace(ALL, weight_lr=0.3, distill=0.5),
}


def pruned(model: nn.Module, splits: Splits, seed: int, file: Path) -> tuple[nn.Module, nn.Module]:
    """The network after six passes of the method, and what is left of it without most of its basis vectors."""
    if file.exists():
        dense, small = torch.load(file, weights_only=False)
        return dense, small
    dense = fit(model, splits.train, None, replace(METHOD, epochs=6, seed=seed)).model

    def batches(part: LabelledImages, size: int, limit: int) -> PreparedBatches:
        return PreparedBatches(part, dense.input_spec, batch_size=size, limit=limit, shuffle=True)  # type: ignore[arg-type]

    assert splits.val is not None
    split = decompose(dense, scale_init=1.0, basis="outputs", batches=batches(splits.train, 128, 512))
    plan = plan_basis(taylor_scores(split, batches(splits.val, 8, 500)), RATIO)
    statistics = basis_statistics(split, batches(splits.train, 128, 512))
    small = prune_basis(split, plan, compensate="refit", statistics=statistics)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save((dense, small), file)
    return dense, small


def trained(name: str, start: str, config: TrainConfig, options: argparse.Namespace) -> dict[str, float]:
    """How good the network gets that way, and in how many seconds of the processor."""
    torch.manual_seed(config.seed)
    splits, test = data("cifar10", options.assets, images=2000, test_images=2000, seed=config.seed)
    model: nn.Module = build(name, options.assets, num_classes=10, input_size=64)
    teacher = None
    if start == "pruned":
        teacher, model = pruned(model, splits, config.seed, options.runs / f"{name}-{config.seed}.pt")
    before = time.process_time()
    result = fit(model, splits.train, None, config, session=Session(teacher=teacher))
    seconds = time.process_time() - before
    found = evaluate(result.model, test)
    return {
        "accuracy": round(found.accuracy, 4),
        "loss": round(found.loss, 4),
        "training loss": round(result.history[-1].train_loss, 4),
        "parameters": measure(result.model).parameters,
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/all_weights"), help="where networks to start from go")
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"], choices=MODELS)
    parser.add_argument("--starts", nargs="+", default=["unpruned", "pruned"], choices=["unpruned", "pruned"])
    parser.add_argument("--ways", nargs="+", default=["method", "all 0.3"], choices=list(WAYS))
    parser.add_argument("--passes", type=int, help="over the images; default 8 for what is not pruned, 2 for what is")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("all_weights", {"ratio": RATIO, "images": 2000, "test images": 2000, "size": 64})
    for seed in options.seeds:
        for name in options.models:
            for start in options.starts:
                passes = options.passes or {"unpruned": 8, "pruned": 2}[start]
                for way in options.ways:
                    config = replace(WAYS[way], epochs=passes, seed=seed)
                    cell = f"{name}, {start}, {passes} passes, {way}, seed {seed}"
                    cells.run(cell, partial(trained, name, start, config, options))


if __name__ == "__main__":
    main()
