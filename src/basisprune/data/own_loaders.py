"""Loaders of the user's own, any iterable of batches, as parts of a dataset like others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from basisprune.data.arrays import Labels, as_labels, read_only
from basisprune.data.datasets import LabelledImages, as_groups, numbered
from basisprune.data.groups import units_of
from basisprune.data.kin import thumbnail
from basisprune.data.looks import Look, image_hash, random_numbers_kept
from basisprune.data.opening import look_at, looks_of, note_kin
from basisprune.data.reading import Reading
from basisprune.data.split import Splits
from basisprune.errors import ConfigError, DataError
from basisprune.tasks.base import Task
from basisprune.torchkit.running import ReadBatch

_THE_SAME = "networks are compared example by example, so pass one with shuffle=False and without random changes"
_REPEATABLE = "a list, a DataLoader or an object whose __iter__ starts anew each time"


@dataclass(frozen=True, eq=False)
class Loaders:
    """Your own loaders in place of a folder of images: anything that yields batches, again and again.

    A batch is what the task reads: by default a pair of prepared inputs, a float tensor (N, ...), and targets. `train`
    may come in any order; the others must yield the same examples in the same order each time, because networks are
    compared example by example. `val` is what candidates are judged on, `confirm` are examples that nothing looks at
    before the budget is certified on them, and `test` is used once, at the end. Without `confirm`, a budget is
    estimated and not certified. `classes` are names for a classifier's classes, and `groups` names for each part what
    its examples belong to, a patient or a scene: those of one group count as one.

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

    def __post_init__(self) -> None:
        faults = [f"groups: {name!r} given, which is no part" for name in self.groups if name not in self.given]
        faults += [fault for name, loader in self.given.items() if (fault := _fault_of(name, loader))]
        if "train" not in self.given:
            faults.append("train: None given; a loader is needed")
        if faults:
            raise ConfigError.of("Loaders", faults)

    @property
    def given(self) -> dict[str, Iterable[object]]:
        """The loaders that there are, by the name of their part."""
        named = {"train": self.train, "val": self.val, "confirm": self.confirm, "test": self.test}
        return {name: loader for name, loader in named.items() if loader is not None}

    def splits(self, task: Task, reading: Reading | None = None) -> Splits:
        """The same as parts of a dataset, gone through once each; raises DataError for what the task cannot read.

        Examples to confirm that are near copies of others are reported, and count as one all together.
        """
        parts = {
            name: LoaderPart(loader, task, name, fixed=name != "train", classes=tuple(self.classes))
            for name, loader in self.given.items()
        }
        for name, part in parts.items():
            if len(part) == 0:
                raise DataError(f"Loaders: {name} yields no batches; if it is a generator, pass {_REPEATABLE}")
            if name in self.groups:
                part.groups = as_groups(self.groups[name], len(part), f"Loaders: {name}")
        self._refuse_seen(parts)
        train = parts["train"]
        classes = train.classes if task.has_classes else ()
        splits = Splits(train, parts.get("val"), parts.get("test"), classes, parts.get("confirm"))
        _note_units(splits, parts, reading or Reading())
        return splits

    def _refuse_seen(self, parts: Mapping[str, LoaderPart]) -> None:
        """Raises DataError if examples that nothing may have looked at are those that train or judge networks."""
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
                known = set(theirs)
                both = sum(each in known for each in mine)
                if both:
                    raise DataError(
                        f"Loaders: {both} of {len(parts[name])} examples of {name} are also in {other}, or of the same "
                        f"{what}, so that {name} would promise too much; pass one of other {what}"
                    )


def _note_units(splits: Splits, parts: Mapping[str, LoaderPart], reading: Reading) -> None:
    """Notes in the parts that judge which examples belong together; near copies of what was seen do all together."""
    look_at(parts.values())
    note_kin(splits)
    known: set[str] = set()
    for name in ("train", "val", "confirm"):
        looks = looks_of(parts[name]) if name in parts else []
        seen = [bool(look.kin) and look.kin in known and name == "confirm" for look in looks]
        if any(seen):
            said = f"Loaders: {sum(seen)} of {len(looks)} examples of confirm are near copies of others"
            reading.report(f"{said}, and count as one", [f"confirm[{place}]" for place in np.flatnonzero(seen)])
        if name != "train" and looks:
            groups = parts[name].groups or ("",) * len(looks)
            rows = zip(looks, groups, seen, strict=True)
            found = units_of([(look.sha256, group, look.kin, "seen" * leaked) for look, group, leaked in rows])
            parts[name].units = found if len(np.unique(found)) < len(found) else None
        known |= {look.kin for look in looks}


def _fault_of(name: str, loader: object) -> str:
    """Why this cannot be a loader; empty if it can."""
    if hasattr(loader, "__next__"):
        return f"{name}: a {type(loader).__name__} given, which can be gone through only once; pass {_REPEATABLE}"
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset | LoaderPart):
        return f"{name}: a {type(loader).__name__} given, which yields single examples; wrap it in a DataLoader"
    if isinstance(loader, str | bytes | Tensor) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        return f"{name}: a {type(loader).__name__} given; an iterable of batches is needed: {_REPEATABLE}"
    return ""


class _Scan(NamedTuple):
    """What going through a loader once shows: batches, labels, hashes of inputs, thumbnails, and all targets' hash."""

    steps: int
    labels: Labels
    hashes: tuple[str, ...]
    thumbnails: tuple[bytes, ...]
    shape: tuple[int, ...]
    targets: str


class LoaderPart(LabelledImages):
    """Somebody's loader as a part of a dataset: iterating yields its batches as the task reads them.

    A part that is `fixed` yields the same inputs in the same order each time; raises DataError as soon as it does not.
    """

    in_parallel = False

    def __init__(
        self,
        loader: Iterable[object],
        task: Task,
        name: str = "data",
        *,
        fixed: bool = False,
        classes: tuple[str, ...] = (),
    ) -> None:
        fault = _fault_of(name, loader)
        if fault:
            raise DataError(fault)
        self.loader, self.task, self.name, self.fixed = loader, task, name, fixed
        self._names = classes

    def __iter__(self) -> Iterator[ReadBatch]:
        place, digest = 0, hashlib.sha256()
        for batch in self.loader:
            read = self.task.inputs_and_targets(batch)
            if self.fixed:
                self._compare(read.inputs, place)
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
        """The number of batches."""
        return self._scan.steps

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hash of each input, in the order of the first pass."""
        return self._scan.hashes

    @property
    def targets_hash(self) -> str:
        """The hash of all targets, however they are divided into batches; empty where the order is not fixed."""
        return self._scan.targets if self.fixed else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, that of the first."""
        return self._scan.shape

    @property
    def labels(self) -> Labels:  # type: ignore[override]
        """The class of each example; zeros where the task has no classes."""
        return self._scan.labels

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names that were given, or numbers up to the largest label; none where the task has no classes."""
        return (self._names or numbered(self.labels, self.name)) if self.task.has_classes else ()

    def look(self, index: int) -> Look:
        """What an input shows; its hash only where the order is fixed."""
        return Look(self._scan.hashes[index] if self.fixed else "", thumbnail=self._scan.thumbnails[index])

    def content_hash(self, index: int) -> str:
        """The same hash."""
        return self.look(index).sha256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The input of an example, found by going through the batches."""
        place = 0
        for inputs, _ in self:
            if index < place + len(inputs):
                return inputs[index - place], int(self.labels[index])
            place += len(inputs)
        raise IndexError(index)

    @cached_property
    def _scan(self) -> _Scan:
        steps, labels, hashes, thumbnails = 0, [], [], []
        shape: tuple[int, ...] = ()
        digest = hashlib.sha256()
        with random_numbers_kept():
            for batch in self.loader:
                inputs, targets = self.task.inputs_and_targets(batch)
                shape = shape or tuple(inputs.shape[1:])
                labels.append(_labels(targets, len(inputs), self.name) if self.task.has_classes else _none(inputs))
                hashes += [image_hash(each) for each in inputs]
                thumbnails += [thumbnail(each) for each in inputs]
                _add(digest, targets)
                steps += 1
        found = np.concatenate(labels) if labels else np.zeros(0, dtype=np.int64)
        return _Scan(steps, read_only(found), tuple(hashes), tuple(thumbnails), shape, digest.hexdigest())

    def _compare(self, inputs: Tensor, place: int) -> None:
        known = self._scan.hashes[place : place + len(inputs)]
        if tuple(image_hash(each) for each in inputs) != known:
            raise DataError(
                f"{self.name}: the loader yields other examples than before, or in another order (example {place} on); "
                f"{_THE_SAME}"
            )


def _labels(targets: object, count: int, name: str) -> Labels:
    if isinstance(targets, Tensor) and targets.shape == (count,) and not targets.is_floating_point():
        return as_labels(targets.cpu().numpy(), count, name)
    given = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
    raise DataError(
        f"{name}: targets {given} given for {count} examples; a classifier needs a class number for each. For other "
        "targets pass task=..."
    )


def _add(digest: hashlib._Hash, targets: object) -> None:
    """Adds the numbers and texts among the targets; other objects have no content that could be compared."""
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, str | int | float):
            digest.update(repr(leaf).encode())


def _none(inputs: Tensor) -> Labels:
    return np.zeros(len(inputs), dtype=np.int64)


def own_part(data: object, task: Task, batch_size: int, *, shuffle: bool = False) -> LoaderPart | None:
    """The data as a part of somebody's own batches; None for images that are read and prepared here.

    Those are datasets of ours, and with classification all datasets and DataLoaders, and whatever else has single
    images with their labels. A map-style dataset of any other task is put into batches as PyTorch does it; if they are
    shuffled, by PyTorch's own random numbers, which a training sets anew for each epoch.
    """
    if isinstance(data, LoaderPart):
        return data
    if isinstance(data, LabelledImages) or (task.has_classes and _is_of_images(data)):
        return None
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size, shuffle=shuffle)
    return LoaderPart(data, task)  # type: ignore[arg-type]  # which is looked at there


def _is_of_images(data: object) -> bool:
    """Whether it is a dataset or DataLoader, or like one: with a length, and items that are no batches."""
    if isinstance(data, Dataset | DataLoader):
        return True
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or len(data) == 0:
        return False
    try:
        first = data[0]
    except Exception:  # a mapping, or something else that is looked at where it is read
        return True
    match first:
        case (Tensor() as inputs, Tensor() as labels, *_):
            return labels.ndim != 1 or len(labels) != len(inputs)
    return True
