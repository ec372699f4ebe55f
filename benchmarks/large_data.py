"""Data larger than memory: how much of it a run holds, and whether reading keeps up with training.

    python benchmarks/large_data.py [--images 300] [--times 8] [--side 256] [--size 128] [--rounds 3] [--scratch DIR]

Writes JPEG files of random colours, as class folders, as WebDataset shards and as a Hugging Face dataset, once
`--images` of them and once `--times` as many. `memory`: for each, in a process of its own, all images are opened and
then gone through once in random order with one worker, as a training does. `peak` is the most that the process and its
worker held (anonymous and shared memory, what both share counted once; pages of mapped files can be dropped at any time
and do not count, `mapped` has their peak), `megabytes` is what came on top of what was held before. `ratio` is the
peak with `--times` as many images over that with `--images`. `speed`: images a second of the loader with 0, 1 and 2
workers, and of training EfficientNet-Lite0 on a batch that is there already, in turns; the median of the rounds.
Writes results/large_data.json, cell by cell: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Cells
from PIL import Image

from basisprune import load_data, transfer_model
from basisprune.data import LabelledImages, make_loader, prepare
from basisprune.training.trainable import set_trainable

SOURCES = ("folder", "shards", "hugging face")
CLASSES, PICTURES, IN_SHARD = 4, 64, 500
MEGABYTE = 1 << 20


def pictures(side: int) -> list[bytes]:
    """JPEG files of soft random colours, about as large as those of photographs."""
    random, found = np.random.default_rng(0), []
    for _ in range(PICTURES):
        coarse = Image.fromarray(random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
        soft = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(soft + random.integers(-12, 13, soft.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noisy).save(buffer, format="JPEG", quality=90)
        found.append(buffer.getvalue())
    return found


def files(count: int, side: int) -> Iterator[tuple[int, bytes]]:
    """So many files, none of which is a copy of another: each ends in its number."""
    known = pictures(side)
    return ((number, known[number % PICTURES] + number.to_bytes(8, "big")) for number in range(count))


def write_folder(root: Path, count: int, side: int) -> None:
    for label in range(CLASSES):
        (root / str(label)).mkdir(parents=True)
    for number, content in files(count, side):
        (root / str(number % CLASSES) / f"{number:07d}.jpg").write_bytes(content)


def write_shards(root: Path, count: int, side: int) -> None:
    root.mkdir()
    every = files(count, side)
    for shard in range(-(-count // IN_SHARD)):
        with tarfile.open(root / f"photos-{shard:04d}.tar", "w") as archive:
            for number, content in islice(every, IN_SHARD):
                for name, part in ((f"{number:07d}.jpg", content), (f"{number:07d}.cls", b"%d" % (number % CLASSES))):
                    about = tarfile.TarInfo(name)
                    about.size = len(part)
                    archive.addfile(about, io.BytesIO(part))


def write_hub(root: Path, count: int, side: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    label = datasets.ClassLabel(names=[str(each) for each in range(CLASSES)])
    kinds = datasets.Features({"image": datasets.Image(), "label": label})

    def rows() -> Iterator[dict[str, Any]]:
        for number, content in files(count, side):
            yield {"image": {"bytes": content, "path": None}, "label": number % CLASSES}

    cache = root.with_name(f"{root.name}-cache")
    datasets.Dataset.from_generator(rows, features=kinds, cache_dir=str(cache)).save_to_disk(str(root))


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "folder": write_folder,
    "shards": write_shards,
    "hugging face": write_hub,
}


def held(process: int) -> tuple[int, int]:
    """The bytes that a process holds for itself, and those of files that it has mapped."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0, 0
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_")}
    return values.get("Pss_Anon", 0) + values.get("Pss_Shmem", 0), values.get("Pss_File", 0)


def held_by_all() -> tuple[int, int]:
    """The same of this process and of its workers."""
    here = os.getpid()
    workers = [int(each) for path in Path(f"/proc/{here}/task").glob("*/children") for each in path.read_text().split()]
    every = [held(process) for process in (here, *workers)]
    return sum(own for own, _ in every), sum(mapped for _, mapped in every)


@contextmanager
def peak(found: dict[str, int]) -> Iterator[None]:
    """Fills in the peaks of what is held while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            own, mapped = held_by_all()
            found["own"], found["mapped"] = max(found["own"], own), max(found["mapped"], mapped)

    found |= {"own": 0, "mapped": 0}
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def memory(source: str, size: int, batch: int) -> dict[str, float]:
    """The megabytes that opening all images and going through them once takes, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, int] = {}
    if (Path(source) / "dataset_info.json").exists():
        import datasets  # noqa: F401  # so that it counts as held before
    before, _ = held_by_all()
    with peak(found):
        train = load_data(source, size=(size, size)).train
        images = sum(len(labels) for _, labels in make_loader(train, batch, shuffle=True, workers=1))
    return {
        "images trained on": images,
        "before": round(before / MEGABYTE, 1),
        "megabytes": round((found["own"] - before) / MEGABYTE, 1),
        "peak": round(found["own"] / MEGABYTE, 1),
        "mapped": round(found["mapped"] / MEGABYTE, 1),
    }


def loading(train: LabelledImages, batch: int, workers: int, batches: int) -> Callable[[], float]:
    """Images a second of the loader, after its first batch."""
    epoch = iter(range(1 << 30))

    def run() -> float:
        found = iter(make_loader(train, batch, shuffle=True, workers=workers, epoch=next(epoch)))
        next(found)
        start = time.perf_counter()
        images = sum(len(labels) for _, labels in islice(found, batches))
        return images / (time.perf_counter() - start)

    return run


def training(train: LabelledImages, model: str, batch: int, size: int, steps: int) -> Callable[[], float]:
    """Images a second of training the network on a batch that is there already, prepared anew each time."""
    network = transfer_model(model, CLASSES, input_size=size)
    network.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(set_trainable(network), lr=1e-3, momentum=0.9)
    images, labels = next(iter(make_loader(train, batch)))

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            F.cross_entropy(network(prepare(images, network.input_spec)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return steps * batch / (time.perf_counter() - start)

    return run


def speed(sources: dict[str, Path], options: argparse.Namespace) -> dict[str, float]:
    """The median images a second of every loader and of the training, in turns."""
    torch.manual_seed(0)
    size, batch = options.size, options.batch
    parts = {name: load_data(path, size=(size, size)).train for name, path in sources.items()}
    turns = {
        f"{name}, {workers} workers": loading(part, batch, workers, options.batches)
        for name, part in parts.items()
        for workers in (0, 1, 2)
    }
    turns["training"] = training(parts["folder"], options.model, batch, size, options.steps)
    rounds = [{name: run() for name, run in turns.items()} for _ in range(options.rounds + 1)][1:]
    return {name: round(statistics.median(each[name] for each in rounds), 1) for name in turns}


def roots(scratch: Path, name: str) -> dict[str, Path]:
    return {source: scratch / f"{source.replace(' ', '-')}-{name}" for source in SOURCES}


def compared(source: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The memory for few and for many images of a source, and its ratio."""
    found: dict[str, Any] = {}
    for name, count in (("once", options.images), ("many", options.images * options.times)):
        root = roots(scratch, name)[source]
        WRITERS[source](root, count, options.side)
        command = [sys.executable, __file__, "--memory", str(root), "--size", str(options.size)]
        command += ["--batch", str(options.batch)]
        found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {**found, "ratio": round(found["many"]["peak"] / found["once"]["peak"], 3)}


def run(cells: Cells, options: argparse.Namespace, scratch: Path) -> None:
    for source in SOURCES:
        cells.run(source, lambda source=source: compared(source, options, scratch))  # type: ignore[misc]
    sources = roots(scratch, "once")
    for source, root in sources.items():
        if not root.exists():  # its memory was measured by an earlier start
            WRITERS[source](root, options.images, options.side)
    cells.run("speed", lambda: speed(sources, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--memory", help="measures only that, of this source, and prints it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory is not None:
        print(json.dumps(memory(options.memory, options.size, options.batch)))
        return
    config = {name: value for name, value in vars(options).items() if name not in ("scratch", "memory")}
    config["bytes per image"] = round(statistics.mean(map(len, pictures(options.side))))
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        run(Cells("large_data", config), options, Path(scratch))


if __name__ == "__main__":
    main()
