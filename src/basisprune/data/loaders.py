"""Data -> batches, in an order that repeats exactly; loaders of the user's own, any iterable of batches."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from basisprune.data.arrays import Labels, as_groups, as_labels, numbered_classes, read_only
from basisprune.data.copies import look_at, looks_of, note_near_copies, units_of
from basisprune.data.datasets import Item, LabelledImages, WrappedDataset, is_prepared
from basisprune.data.decode import Look, image_hash, random_numbers_kept, thumbnail
from basisprune.data.load import Reading
from basisprune.data.split import Splits
from basisprune.data.transforms import prepare
from basisprune.errors import ConfigError, DataError
from basisprune.signatures import Count, ImageSize, Seed, Within, checked
from basisprune.tasks.base import Task
from basisprune.torchkit.processes import Processes, prepare_worker, worker_context
from basisprune.torchkit.running import ReadBatch, plain_tensors
from basisprune.types import InputSpec

_THE_SAME = "networks are compared example by example, so pass one with shuffle=False and without random changes"
_REPEATABLE = "a list, a DataLoader or an object whose __iter__ starts again each time"


@checked
def make_loader(
    dataset: object,
    batch_size: Count,
    *,
    shuffle: bool = False,
    seed: Seed = 0,
    epoch: Seed = 0,
    workers: Annotated[int, Within(0, 1024, "a whole number from 0 to 1024")] = 0,
    size: ImageSize | None = None,
) -> DataLoader[object]:
    """Return a loader of (images, labels): tensors (N, C, H, W) and int64 (N,).

    A DataLoader and a user's own batches are returned unchanged. The order is a function of (seed, epoch) alone, and
    no global random state is touched. PIL images of other people's datasets are resized to `size` (height, width) if
    given. A shuffled loader leaves out a last batch of one image, on which batch normalisation cannot train.

    >>> from basisprune.data import ArrayImages
    >>> images = ArrayImages(np.zeros((9, 4, 4), dtype=np.uint8), [0, 1, 2] * 3)
    >>> [len(labels) for _, labels in make_loader(images, 4)]
    [4, 4, 1]
    >>> [len(labels) for _, labels in make_loader(images, 4, shuffle=True)]
    [4, 4]
    """
    if isinstance(dataset, DataLoader | LoaderPart):
        return cast("DataLoader[object]", dataset)  # both yield batches
    images = (
        dataset if isinstance(dataset, LabelledImages) else WrappedDataset(cast("Dataset[object]", dataset), size=size)
    )
    order = np.arange(len(images))
    if shuffle:
        order = np.random.default_rng((seed, epoch)).permutation(order)
        if len(order) > 1 and len(order) % batch_size == 1:
            order = order[:-1]
    return DataLoader(
        images,
        batch_size,
        sampler=order.tolist(),
        num_workers=workers,
        collate_fn=collate,
        multiprocessing_context=worker_context() if workers else None,
        worker_init_fn=partial(prepare_worker, os.getcwd()) if workers else None,
        pin_memory=torch.cuda.is_available(),
        # Workers draw their random numbers from it, other ones in each epoch.
        generator=torch.Generator().manual_seed(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])),
    )


def collate(items: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """Stack the items into one batch: images (N, C, H, W) and labels int64 (N,)."""
    images, labels = zip(*plain_tensors(list(items)), strict=True)
    kinds = {(image.dtype, image.shape) for image in images}
    if len(kinds) > 1:
        found = sorted(f"{dtype} {tuple(shape)}" for dtype, shape in kinds)
        raise DataError(
            f"images of different kinds in one batch ({', '.join(found)}); "
            "all must have one type and shape: pass size=(height, width) to have them resized"
        )
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


class PreparedBatches:
    """Batches of prepared images and their labels, in a fixed order; can be iterated many times.

    `limit` stops after the first batches that hold that many images; `shuffle` draws them from all of the data by
    `seed`, so that a limit sees every class. `shared` divides the batches among the processes of a
    distributed run, except those of a loader that was given; `copies` is how many processes go through each.

    >>> from basisprune.data import ArrayImages
    >>> images = ArrayImages(np.zeros((3, 4, 4), dtype=np.uint8), [0, 1, 2])
    >>> [len(labels) for _, labels in PreparedBatches(images, InputSpec((4, 4), (0.5,), (0.5,)), batch_size=2)]
    [2, 1]
    """

    @checked
    def __init__(
        self,
        data: object,
        spec: InputSpec,
        *,
        batch_size: Count = 128,
        limit: Count | None = None,
        shuffle: bool = False,
        seed: Seed = 0,
        shared: bool = False,
    ) -> None:
        size = None if isinstance(data, LoaderPart) else spec.image_size
        self.loader = make_loader(data, batch_size, shuffle=shuffle, seed=seed, size=size)
        self.spec, self.prepared, self.limit = spec, is_prepared(data), math.inf if limit is None else limit
        self._spans: list[range] | None = None
        self.copies = Processes.here().count
        if shared and self.loader is not data:
            self._divide(batch_size)

    def _divide(self, batch_size: int) -> None:
        processes, places = Processes.here(), list(cast("Sequence[int]", self.loader.sampler))
        count = min(len(places), batch_size * math.ceil(min(self.limit, len(places)) / batch_size))
        spans = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        mine = processes.share(spans)
        if len(mine) == len(spans):
            return
        batches = [places[span.start : span.stop] for span in mine]
        self.loader = DataLoader(self.loader.dataset, batch_sampler=batches, collate_fn=self.loader.collate_fn)
        self.limit, self._spans, self._images = math.inf, mine, count
        self.copies = 1

    def gathered(self, found: Sequence[Tensor]) -> Tensor:
        if self._spans is None:
            return torch.cat(list(found))
        whole = torch.zeros(self._images, *found[0].shape[1:], dtype=found[0].dtype)
        for span, part in zip(self._spans, found, strict=True):
            whole[span.start : span.stop] = part
        return Processes.here().sum(whole)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen, own = 0, isinstance(self.loader, LoaderPart)  # whose inputs are what the network reads
        for images, labels in map(plain_tensors, self.loader):
            ready = images if own else prepare(images, self.spec, prepared=self.prepared)
            yield cast("tuple[Tensor, Tensor]", ReadBatch(ready, labels))  # the targets of a task may be anything
            seen += len(images)
            if seen >= self.limit:
                return


@dataclass(frozen=True, eq=False)
class Loaders:
    """Your own loaders in place of a folder of images: anything that yields batches, again and again.

    A batch is what the task reads: by default a pair of prepared inputs, a float tensor (N, ...), and targets. All but
    `train` must yield the same examples in the same order each time, because networks are compared example by example.

    Args:
        train: Examples to train on, in any order.
        val: Examples on which candidates are compared.
        test: Examples that are used once, at the end.
        confirm: Examples held out to certify the budget; without them it is estimated.
        unlabelled: The same without targets, in place of `confirm`: batches of inputs, or of inputs and anything else.
            Only those on which networks differ are labelled, at the end.
        classes: The names of a classifier's classes.
        groups: For each part what its examples belong to, a patient or a scene: those of one group count as one.

    >>> batches = [(torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8))]
    >>> list(Loaders(train=batches, val=batches).given)
    ['train', 'val']
    """

    train: Iterable[object]
    val: Iterable[object] | None = None
    test: Iterable[object] | None = None
    confirm: Iterable[object] | None = None
    classes: tuple[str, ...] = ()
    groups: Mapping[str, object] = field(default_factory=dict)
    unlabelled: Iterable[object] | None = None

    def __post_init__(self) -> None:
        faults = [f"groups: {name!r} given, which is no part" for name in self.groups if name not in self.given]
        faults += [fault for name, loader in self.given.items() if (fault := _fault_of(name, loader))]
        if self.confirm is not None and self.unlabelled is not None:
            faults.append("unlabelled: given with confirm; pass one of them")
        if "train" not in self.given:
            faults.append("train: None given; a loader is needed")
        if faults:
            raise ConfigError.of("Loaders", faults)

    @property
    def given(self) -> dict[str, Iterable[object]]:
        """The loaders that exist, by the name of their part."""
        confirm = self.confirm if self.unlabelled is None else _WithoutTargets(self.unlabelled)
        named = {"train": self.train, "val": self.val, "confirm": confirm, "test": self.test}
        return {name: loader for name, loader in named.items() if loader is not None}

    def splits(self, task: Task, reading: Reading | None = None) -> Splits:
        """Return the loaders as parts of a dataset, each iterated once; raise DataError for what the task cannot read.

        Examples to confirm that are near copies of others are reported, and count as one all together.
        """
        parts: dict[str, LoaderPart] = {}
        for name, loader in self.given.items():
            part = LoaderPart(loader, task, name, fixed=name != "train", classes=tuple(self.classes))
            if len(part) == 0:
                raise DataError(f"Loaders: {name} yields no batches; if it is a generator, pass {_REPEATABLE}")
            if name in self.groups:
                part.groups = as_groups(self.groups[name], len(part), f"Loaders: {name}")
            parts[name] = part
        self._refuse_seen(parts)
        if self.unlabelled is not None:
            if not task.has_classes:
                raise ConfigError(f"Loaders: unlabelled: given with the task {task.name}; only classes can be compared")
            parts["confirm"].labelled = False
        _note_units(parts, reading or Reading())
        return Splits.of(parts, parts["train"].classes)

    def _refuse_seen(self, parts: Mapping[str, LoaderPart]) -> None:
        """Raise DataError if examples held out for the end are among those that train or compare networks."""
        for name, other in (("confirm", "train"), ("confirm", "val"), ("test", "train"), ("test", "val")):
            if name not in parts or other not in parts:
                continue
            data = getattr(self.given[name], "dataset", self.given[name])
            if data is getattr(self.given[other], "dataset", self.given[other]):
                raise DataError(f"Loaders: {name} has the examples of {other}; pass a loader of other ones")
            for what, mine, theirs in (
                ("examples", parts[name].hashes, parts[other].hashes),
                ("groups", parts[name].groups or (), parts[other].groups or ()),
            ):
                if both := sum(map(set(theirs).__contains__, mine)):
                    said = f"{both} of {len(parts[name])} examples of {name} are also in {other}, or of the same {what}"
                    raise DataError(f"Loaders: {said}; pass other {what}, or {name} would promise too much")


@dataclass(frozen=True)
class _WithoutTargets:
    loader: Iterable[object]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            inputs = cast("Tensor", batch[0] if isinstance(batch, tuple | list) else batch)
            yield inputs, torch.zeros(len(inputs), dtype=torch.int64)


def _note_units(parts: Mapping[str, LoaderPart], reading: Reading) -> None:
    """Note in the parts that judge which examples belong together; all near copies of seen ones form one unit."""
    look_at(parts.values())
    note_near_copies(parts.values())
    known: set[str] = set()
    for name in ("train", "val", "confirm"):
        looks = looks_of(parts[name]) if name in parts else []
        seen = [bool(look.cluster) and look.cluster in known and name == "confirm" for look in looks]
        if any(seen):
            said = f"Loaders: {sum(seen)} of {len(looks)} examples of confirm are near copies of others"
            reading.report(f"{said}, and count as one", [f"confirm[{place}]" for place in np.flatnonzero(seen)])
        if name != "train" and looks:
            groups = parts[name].groups or ("",) * len(looks)
            rows = zip(looks, groups, seen, strict=True)
            found = units_of([(look.sha256, group, look.cluster, "seen" * leaked) for look, group, leaked in rows])
            parts[name].units = found if len(np.unique(found)) < len(found) else None
        known |= {look.cluster for look in looks}


def _fault_of(name: str, loader: object) -> str:
    if hasattr(loader, "__next__"):
        return f"{name}: a {type(loader).__name__} given, which can be gone through only once; pass {_REPEATABLE}"
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset | LoaderPart):
        return f"{name}: a {type(loader).__name__} given, which yields single examples; wrap it in a DataLoader"
    if isinstance(loader, str | bytes | Tensor) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        return f"{name}: a {type(loader).__name__} given; an iterable of batches is needed: {_REPEATABLE}"
    return ""


class _Scan(NamedTuple):
    steps: int
    labels: Labels
    is_labelled: bool
    hashes: tuple[str, ...]
    thumbnails: tuple[bytes, ...]
    shape: tuple[int, ...]
    targets: str


class LoaderPart(LabelledImages):
    """A user's loader as a part of a dataset; a `fixed` one must yield the same inputs in the same order each time."""

    in_parallel, prepared = False, True

    def __init__(
        self,
        loader: Iterable[object],
        task: Task,
        name: str = "data",
        *,
        fixed: bool = False,
        classes: tuple[str, ...] = (),
    ) -> None:
        if fault := _fault_of(name, loader):
            raise DataError(fault)
        self.loader, self.task, self.name, self.fixed = loader, task, name, fixed
        self._names = classes

    def __iter__(self) -> Iterator[ReadBatch]:
        place, digest = 0, hashlib.sha256()
        for batch in self.loader:
            read = self.task.inputs_and_targets(batch)
            if self.fixed:
                known = self.hashes[place : place + len(read.inputs)]
                if tuple(image_hash(each) for each in read.inputs) != known:
                    raise DataError(
                        f"{self.name}: the loader yields other examples than before (from {place} on); {_THE_SAME}"
                    )
                _add(digest, read.targets)
            place += len(read.inputs)
            yield read
        if self.fixed and place != len(self):
            raise DataError(f"{self.name}: the loader yields {place} examples now, and {len(self)} before; {_THE_SAME}")
        if self.fixed and digest.hexdigest() != self._scan.targets:
            raise DataError(f"{self.name}: the loader yields other targets than before; {_THE_SAME}")

    def __len__(self) -> int:
        return len(self._scan.labels)

    @property
    def steps(self) -> int:
        return self._scan.steps

    @property
    def hashes(self) -> tuple[str, ...]:
        return self._scan.hashes

    @property
    def targets_hash(self) -> str:
        return self._scan.targets if self.fixed else ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._scan.shape

    @property
    def labels(self) -> Labels:  # type: ignore[override]
        return self._scan.labels

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self._names or numbered_classes(self.labels, self.name)) if self._scan.is_labelled else ()

    def _look(self, index: int) -> Look:
        return Look(self.hashes[index] if self.fixed else "", thumbnail=self._scan.thumbnails[index])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = 0
        for inputs, _ in self:
            if index < place + len(inputs):
                return inputs[index - place], int(self.labels[index])
            place += len(inputs)
        raise IndexError(index)

    @cached_property
    def _scan(self) -> _Scan:
        steps, hashes, thumbnails = 0, [], []
        labels, is_labelled = [np.zeros(0, dtype=np.int64)], False
        shape: tuple[int, ...] = ()
        digest = hashlib.sha256()
        with random_numbers_kept():
            for batch in self.loader:
                inputs, targets = self.task.inputs_and_targets(batch)
                shape = shape or tuple(inputs.shape[1:])
                classes, count = self.task.class_numbers(targets, len(inputs), self.name), len(inputs)
                is_labelled = classes is not None
                labels.append(as_labels(np.zeros(count, np.int64) if classes is None else classes, count, self.name))
                hashes += [image_hash(each) for each in inputs]
                thumbnails += [thumbnail(each) for each in inputs]
                _add(digest, targets)
                steps += 1
        known = read_only(np.concatenate(labels))
        return _Scan(steps, known, is_labelled, tuple(hashes), tuple(thumbnails), shape, digest.hexdigest())


def _add(digest: hashlib._Hash, targets: object) -> None:
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, str | int | float):
            digest.update(repr(leaf).encode())


def own_part(data: object, task: Task, batch_size: int, *, shuffle: bool = False) -> LoaderPart | None:
    """Return the data as a part of the user's own batches; None for labelled images, which are prepared here."""
    if isinstance(data, LoaderPart):
        return data
    if isinstance(data, LabelledImages) or (task.has_classes and _is_of_images(data)):
        return None
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size, shuffle=shuffle)
    return LoaderPart(data, task)  # type: ignore[arg-type]  # which checks it


def _is_of_images(data: object) -> bool:
    if isinstance(data, Dataset | DataLoader):
        return True
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or len(data) == 0:
        return False
    try:
        first = data[0]
    except Exception:  # a mapping, or something else that is checked where it is read
        return True
    match first:
        case (Tensor() as inputs, Tensor() as labels, *_):
            return labels.ndim != 1 or len(labels) != len(inputs)
    return True
