"""One network on one dataset with one seed: images, the trained start, tuning by the clock, and what comes out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune import Augment, PreparedBatches, Session, TrainConfig, decompose, fit, measure, predict
from basisprune.budget.proportions import wilson_interval
from basisprune.data import Splits, load_data, make_loader, prepare, take
from basisprune.deploy.export.onnx import open_session, to_proto
from basisprune.deploy.fold import deploy
from basisprune.deploy.latency import interleaved
from basisprune.deploy.timing import measured_table, wanted_shapes
from basisprune.layer_times import TimeTable
from basisprune.torchkit.running import mode
from basisprune.training.trainable import make_optimizer, set_trainable
from basisprune.transfer.model import TransferModel, spec_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from backbones import build  # the benchmarks use them too

SIDE = 64
IMAGES, VAL_IMAGES, TEST_IMAGES = 2000, 4000, 5000
BASIS_IMAGES = 2000
"""Those that scores, bases and statistics are computed on, of ours and of rivals: all that there are."""

START_PASSES, TUNE_PASSES = 4.0, 6.0
"""What the start and each tuning may take, in the time of one pass of the unpruned network with all its weights."""

CLOCK = "efficientnet_lite0"
"""The unpruned network that every deployed file takes turns with when it is timed."""


@dataclass(frozen=True)
class Point:
    """What a network can do and what it costs, as deployed; `clock_ms` is what the network of the clock took beside."""

    test_accuracy: float
    interval: tuple[float, float]
    val_accuracy: float
    parameters: int
    macs: int
    ms: float
    clock_ms: float


class Bench:
    """What all cells of a network, dataset and seed share. `runs` is a folder for networks to start from.

    `side` is that of its images, `clock_side` that at which the unpruned network is the clock of the training.
    """

    def __init__(
        self,
        model: str,
        dataset: str,
        seed: int,
        assets: Path,
        runs: Path,
        side: int = SIDE,
        clock_side: int = SIDE,
    ) -> None:
        self.model, self.dataset, self.seed, self.assets = model, dataset, seed, assets
        self.side, self.clock_side, self.runs = side, clock_side, runs
        self.folder = runs / f"{model}-{dataset}-{side}-{seed}"
        self.splits = _images(dataset, assets, seed)

    @cached_property
    def pretrained(self) -> TransferModel:
        """The network as it comes, with a new classifier."""
        torch.manual_seed(self.seed)
        return build(self.model, self.assets, num_classes=self.splits.num_classes, input_size=self.side)

    def at(self, side: int) -> Bench:
        """The same network for images of another size."""
        return Bench(self.model, self.dataset, self.seed, self.assets, self.runs, side, self.clock_side)

    # Images

    def batches(self, limit: int = BASIS_IMAGES, batch_size: int = 128) -> PreparedBatches:
        """Some of the training images, prepared."""
        return self._prepared(self.splits.train, limit=limit, batch_size=batch_size)

    def val_batches(self, batch_size: int = 128, limit: int | None = None) -> PreparedBatches:
        """The validation images, or some of them, prepared."""
        return self._prepared(self.splits.val, limit=limit, batch_size=batch_size)

    def _prepared(self, images: Any, **options: Any) -> PreparedBatches:
        return PreparedBatches(images, self.pretrained.input_spec, shuffle=True, **options)

    # Training by the clock

    def settled(self, config: TrainConfig) -> TrainConfig:
        """The settings with this bench's seed, and images mirrored where that makes sense."""
        augmentation = replace(config.augmentation, flip=self.dataset != "mnist")
        return replace(config, seed=self.seed, augmentation=augmentation)

    def passes(self, model: nn.Module, config: TrainConfig, budget: float, teacher: nn.Module | None = None) -> int:
        """How many passes of the model take as long as `budget` passes of the unpruned network, at least one."""
        images, labels = next(iter(self.batches(config.batch_size, config.batch_size)))
        reference = replace(config, train="all", norm_statistics="batch", distill=0.0)
        size = self.reference_network.input_spec.shape[1:]
        wide = F.interpolate(images, size, mode="nearest").contiguous(memory_format=torch.channels_last)
        runs = {
            "reference": _step(self.reference_network, reference, wide, labels),
            "this": _step(model, config, images, labels, teacher),
        }
        return max(1, round(budget * _relative(runs)))

    @cached_property
    def reference_network(self) -> TransferModel:
        """The network that the clock of the training runs by, as pretrained."""
        return self.pretrained if self.side == self.clock_side else self.at(self.clock_side).pretrained

    def trained(
        self,
        model: nn.Module,
        config: TrainConfig,
        budget: float,
        *,
        teacher: nn.Module | None = None,
        passes: int | None = None,
        checkpoint: str | None = None,
    ) -> tuple[nn.Module, int]:
        """The model trained for as long as the budget allows or for so many `passes`, and the passes that this took."""
        path = None if checkpoint is None else self.folder / f"{checkpoint}.pt"
        if path is not None and path.exists():
            saved = torch.load(path, weights_only=False)
            return saved["model"], saved["passes"]
        config = self.settled(config)
        config = replace(config, epochs=passes or self.passes(model, config, budget, teacher))
        result = fit(model, self.splits.train, None, config, progress=False, session=Session(teacher=teacher)).model
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": result, "passes": config.epochs}, path)
        return result, config.epochs

    def sparsely(self, step: Callable[[Tensor, Tensor], None], budget: float) -> None:
        """Calls `step` with augmented batches for as long as the budget allows."""
        config = self.settled(TrainConfig(batch_size=32, augmentation=Augment(shift=0.05)))
        images, labels = next(iter(self.batches(32, 32)))
        reference = _step(self.reference_network, replace(config, train="all"), images, labels)
        share = _relative({"reference": reference, "this": lambda: step(images, labels)})
        left = round(budget * share * len(self.splits.train) / config.batch_size)
        generator, epoch = torch.Generator().manual_seed(self.seed), 0
        while left > 0:
            for pixels, known in make_loader(self.splits.train, 32, shuffle=True, seed=self.seed, epoch=epoch):
                spec = self.pretrained.input_spec
                step(prepare(pixels, spec, augmentation=config.augmentation, generator=generator), known)
                left -= 1
                if left <= 0:
                    break
            epoch += 1

    # What comes out

    def times(self) -> TimeTable:
        """Those of all layers that the network could have, on this machine."""
        return _times(self.model, self.assets, self.side, self.splits.num_classes)

    def val_accuracy(self, model: nn.Module) -> float:
        """The accuracy on the validation images."""
        assert self.splits.val is not None
        return float(predict(model, self.splits.val).hits.mean())

    def point(self, model: nn.Module, file: Path, times: TimeTable | None = None) -> Point:
        """The network as it is deployed, judged by the test images; `file` is where its ONNX file goes.

        Of a split layer the smaller form is deployed or, with `times`, the faster one.
        """
        assert self.splits.test is not None
        small = deploy(model, spec_of(model), self.splits.classes, times)
        hits, report = predict(small, self.splits.test).hits, measure(small)
        content = to_onnx(small)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        ms, clock_ms = timed(content, self.side, self.assets)
        return Point(
            test_accuracy=float(hits.mean()),
            interval=wilson_interval(int(hits.sum()), len(hits)),
            val_accuracy=self.val_accuracy(small),
            parameters=report.parameters,
            macs=report.macs,
            ms=ms,
            clock_ms=clock_ms,
        )


@cache
def _times(model: str, assets: Path, side: int, classes: int) -> TimeTable:
    """Measured once, for all datasets and seeds."""
    network = build(model, assets, num_classes=classes, input_size=side)
    return measured_table(wanted_shapes(network, network.input_spec.shape))


@cache
def _images(dataset: str, assets: Path, seed: int) -> Splits:
    splits = load_data(assets / "data" / f"{dataset}.npz", val_fraction=0.1, limit=IMAGES, seed=seed)
    assert splits.val is not None
    assert splits.test is not None
    return replace(splits, val=take(splits.val, range(VAL_IMAGES)), test=take(splits.test, range(TEST_IMAGES)))


def _relative(runs: Mapping[str, Callable[[], object]]) -> float:
    """How often "this" can be run while "reference" is run once."""
    seconds = {name: min(values) for name, values in interleaved(runs, repeats=3, warmup=1).items()}
    return seconds["reference"] / seconds["this"]


def _step(
    model: nn.Module, config: TrainConfig, images: Tensor, labels: Tensor, teacher: nn.Module | None = None
) -> Callable[[], None]:
    """One step of training a copy of the model, as `fit` does it."""
    copied = copy.deepcopy(model).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(copied, config)

    def run() -> None:
        with mode(copied, training=config.norm_statistics == "batch"):
            loss = F.cross_entropy(copied(images), labels)
        if teacher is not None and config.distill > 0:
            with torch.no_grad():
                teacher(images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def to_onnx(model: nn.Module) -> bytes:
    """The network as an ONNX file."""
    content: bytes = to_proto(model, torch.zeros(2, *spec_of(model).shape)).SerializeToString()
    return content


@cache
def _clock(assets: Path) -> Callable[[], object]:
    torch.manual_seed(0)
    network = build(CLOCK, assets, num_classes=10, input_size=SIDE)
    return _runner(to_onnx(deploy(network, network.input_spec, tuple("0123456789"))), SIDE)


def _runner(file: bytes, side: int) -> Callable[[], object]:
    session = open_session(file, threads=1)
    noise = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    feed = {session.get_inputs()[0].name: noise.numpy()}
    return lambda: session.run(None, feed)


def timed(file: bytes, side: int, assets: Path) -> tuple[float, float]:
    """Milliseconds for one image in ONNX Runtime on one thread: of the file, and of the clock's network beside it."""
    seconds = interleaved({"clock": _clock(assets), "this": _runner(file, side)}, repeats=101, warmup=5)
    clock, this = (sorted(values)[len(values) // 4] for values in seconds.values())  # a busy machine only adds
    return 1e3 * this, 1e3 * clock


def split_start(bench: Bench, config: TrainConfig) -> nn.Module:
    """The network decomposed by its outputs and trained by the method: where `quick` starts."""
    split = decompose(bench.pretrained, scale_init=1.0, basis="outputs", batches=bench.batches())
    model, _ = bench.trained(split, config, START_PASSES, checkpoint="quick")
    set_trainable(model)
    return model
