"""One network on one dataset with one seed: images, the trained start, tuning by the clock, and what comes out."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune import Augment, PreparedBatches, Session, TrainConfig, fit, measure, predict, prepare
from basisprune.data import Splits, load_data, make_loader, take
from basisprune.deploy.export.runtime import feed_of, open_session, to_proto
from basisprune.deploy.fold import deploy
from basisprune.deploy.latency import interleaved
from basisprune.deploy.timing import profile_here, wanted_shapes
from basisprune.errors import TrainingError
from basisprune.files import write_text
from basisprune.joint_plan.times import TimeTable
from basisprune.torchkit.running import mode
from basisprune.training.choosing import choose, divide
from basisprune.training.intervals import wilson_interval
from basisprune.training.loop import FitResult
from basisprune.training.trainable import make_optimizer
from basisprune.training.trainer import Images
from basisprune.transfer.model import TransferModel, spec_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from backbones import build  # the benchmarks use them too

SIDE = 64
IMAGES, VAL_IMAGES, TEST_IMAGES = 2000, 4000, 5000
BASIS_IMAGES = 2000
"""Those that scores, bases and statistics are computed on, of ours and of rivals: all that there are."""

START_PASSES, TUNE_PASSES = 4.0, 12.0
"""What the start may take, and each method to prune and tune, in the time of one pass of the unpruned network.

It is enough for the longest pruning, and some tuning after it.
"""

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


@dataclass(frozen=True)
class Pace:
    """The CPU seconds of one pass over the training images: of the unpruned network, and of this one."""

    reference: float
    this: float

    def passes(self, budget: float, spent: float = 0.0) -> int:
        """How many passes the budget allows, in passes of the unpruned network, less the seconds spent; at least one.

        >>> Pace(reference=10.0, this=5.0).passes(6.0, spent=20.0)
        8
        """
        return max(1, round((budget * self.reference - spent) / self.this))


class Bench:
    """What all cells of a network, dataset and seed share. `runs` is a folder for networks to start from.

    `side` is that of its images, `clock_side` that at which the unpruned network is the clock of the training.
    `tuning_seconds` are the CPU seconds that methods have spent on training between steps of pruning.
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
        self.tuning_seconds = 0.0

    @cached_property
    def pretrained(self) -> TransferModel:
        """The network as it comes, with a new classifier."""
        torch.manual_seed(self.seed)
        return build(self.model, self.assets, num_classes=self.splits.num_classes, input_size=self.side)

    @cached_property
    def reference_network(self) -> TransferModel:
        """The network that the clock of the training runs by, as pretrained."""
        if self.side == self.clock_side:
            return self.pretrained
        return Bench(self.model, self.dataset, self.seed, self.assets, self.runs, self.clock_side).pretrained

    def batches(self, limit: int = BASIS_IMAGES, batch_size: int = 128) -> PreparedBatches:
        """Some of the training images, prepared."""
        return self._prepared(self.splits.train, limit=limit, batch_size=batch_size)

    def val_batches(self, batch_size: int = 128, limit: int | None = None) -> PreparedBatches:
        """The validation images, or some of them, prepared."""
        return self._prepared(self.splits.val, limit=limit, batch_size=batch_size)

    def _prepared(self, images: Any, **options: Any) -> PreparedBatches:
        return PreparedBatches(images, self.pretrained.input_spec, shuffle=True, **options)

    # Training

    def pace(self, model: nn.Module, config: TrainConfig, teacher: nn.Module | None = None) -> Pace:
        """Measure training steps of the model and of the unpruned network with all its weights, in turns."""
        images, labels = next(iter(self.batches(config.batch_size, config.batch_size)))
        return self._pace(_step(model, config, images, labels, teacher), config, images, labels)

    def _pace(self, step: Callable[[], None], config: TrainConfig, images: Tensor, labels: Tensor) -> Pace:
        reference = replace(config, train="all", norm_statistics="batch", distill=0.0)
        size = self.reference_network.input_spec.shape[1:]
        wide = F.interpolate(images, size, mode="nearest").contiguous(memory_format=torch.channels_last)
        runs = {"reference": _step(self.reference_network, reference, wide, labels), "this": step}
        seconds = interleaved(runs, repeats=3, warmup=1)
        learnt = len(self.splits.train) * (1 - (config.choices.held_out if config.choices else 0.0))
        return Pace(*(learnt / config.batch_size * min(seconds[name]) for name in ("reference", "this")))

    def trained(
        self, model: nn.Module, config: TrainConfig, passes: int, teacher: nn.Module | None = None
    ) -> FitResult:
        """Train a copy of the model for so many passes."""
        config = replace(config, seed=self.seed, epochs=passes)
        return fit(model, self.splits.train, None, config, progress=False, session=Session(teacher=teacher))

    def kept(self, name: str, train: Callable[[], nn.Module]) -> nn.Module:
        """Return the network of that name from the folder of runs; train it if it is not there."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(train(), path)
        network: nn.Module = torch.load(path, weights_only=False)
        return network

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Count the CPU seconds of the block as tuning."""
        began = time.process_time()
        try:
            yield
        finally:
            self.tuning_seconds += time.process_time() - began

    def sparsely(self, step: Callable[[Tensor, Tensor], None], budget: float) -> None:
        """Call `step` with augmented batches for as long as the budget allows, in passes of the unpruned network."""
        with self.tuning():
            config = TrainConfig(batch_size=32, augmentation=Augment(shift=0.05, flip=self.dataset != "mnist"))
            images, labels = next(iter(self.batches(32, 32)))
            pace = self._pace(lambda: step(images, labels), config, images, labels)
            left = round(budget * pace.reference / pace.this * len(self.splits.train) / config.batch_size)
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

    @property
    def times(self) -> tuple[TimeTable, float]:
        """The times of all layers that the network could have, on this machine, and the CPU seconds of measuring them.

        They are measured once for each network and kept in the folder of runs.
        """
        path = self.runs / "times" / f"{self.model}-{self.side}.json"
        if not path.exists():
            began, shape = time.process_time(), self.pretrained.input_spec.shape
            table = profile_here(wanted_shapes(self.pretrained, shape))
            write_text(path, json.dumps({"seconds": time.process_time() - began, "table": table.to_json()}))
        kept = json.loads(path.read_text())
        return TimeTable.from_json(kept["table"]), float(kept["seconds"])

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


class ShortTunings:
    """Trainings in place between steps of pruning, `count` within a budget; the first finds the settings of all."""

    def __init__(self, bench: Bench, config: TrainConfig, budget: float, count: int) -> None:
        self.bench, self.config, self.budget, self.count = bench, config, budget, count
        self.found: TrainConfig | None = None
        self.images: Any = None

    def __call__(self, model: nn.Module) -> None:
        """Train the model itself."""
        with self.bench.tuning():
            pace = self.bench.pace(model, replace(self.config, norm_statistics="batch"))
            if self.found is None:
                self._find(model, pace)
            passes = self.budget / self.count * pace.reference / pace.this
            epochs = max(1, math.ceil(passes))
            order = np.random.default_rng(self.bench.seed).permutation(len(self.images))
            some = take(self.images, order[: max(1, round(passes / epochs * len(self.images)))])
            self._train(model, some, epochs)

    def _find(self, model: nn.Module, pace: Pace) -> None:
        """Find rate, statistics, augmentation and precision, as for one training as long as all of these."""
        config = replace(self.config, seed=self.bench.seed, epochs=pace.passes(self.budget))
        halves = divide(model, Images(self.bench.splits.train), config, Session())
        self.found, self.images = choose(model, halves, config, Session()), halves.proper.train

    def _train(self, model: nn.Module, images: Any, epochs: int) -> None:
        """Train in place; if that diverges, start again at a third of the rate, as `fit` does with its choices."""
        assert self.found is not None
        untouched = copy.deepcopy(model.state_dict())
        for _ in range(4):
            try:
                fit(model, images, None, replace(self.found, epochs=epochs), progress=False, inplace=True)
                return
            except TrainingError:
                model.load_state_dict(untouched)
                self.found = replace(self.found, lr=self.found.lr / 3, min_lr=self.found.min_lr / 3)


@cache
def _images(dataset: str, assets: Path, seed: int) -> Splits:
    splits = load_data(assets / "data" / f"{dataset}.npz", val_fraction=0.1, limit=IMAGES, seed=seed)
    assert splits.val is not None
    assert splits.test is not None
    return replace(splits, val=take(splits.val, range(VAL_IMAGES)), test=take(splits.test, range(TEST_IMAGES)))


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
    feed = feed_of(session, torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0)))
    return lambda: session.run(None, feed)


def timed(file: bytes, side: int, assets: Path) -> tuple[float, float]:
    """Milliseconds for one image in ONNX Runtime on one thread: of the file, and of the clock's network beside it."""
    seconds = interleaved({"clock": _clock(assets), "this": _runner(file, side)}, repeats=101, warmup=5)
    clock, this = (sorted(values)[len(values) // 4] for values in seconds.values())  # a busy machine only adds
    return 1e3 * this, 1e3 * clock
