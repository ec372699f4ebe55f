"""Any data -> batches that a network reads, again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from basisprune.data.arguments import check, of_type, whole
from basisprune.data.loaders import make_loader
from basisprune.data.own_loaders import LoaderPart
from basisprune.data.prepare import prepare
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import ReadBatch
from basisprune.types import InputSpec


class PreparedBatches:
    """Batches of prepared images and their labels, in a fixed order; can be gone through many times.

    `limit` stops after the first batches that hold that many images; `shuffle` draws them from all of the
    data by `seed`, so that a limit sees every class. With `shared`, each process of a distributed run goes through
    some of the same batches; a loader that was given is not divided. `copies` is how many processes go through each.
    """

    def __init__(
        self,
        data: Dataset[object] | DataLoader[object],
        spec: InputSpec,
        *,
        batch_size: int = 128,
        limit: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        prepared: bool = False,
        shared: bool = False,
    ) -> None:
        faults = (
            of_type("spec", spec, InputSpec, "an InputSpec"),
            None if limit is None else whole("limit", limit, 1, 1 << 40),
        )
        check("PreparedBatches", faults)
        size = None if isinstance(data, LoaderPart) else spec.image_size
        self.loader = make_loader(data, batch_size, shuffle=shuffle, seed=seed, size=size)
        self.spec, self.prepared = spec, prepared
        self.limit = math.inf if limit is None else limit
        self._spans: list[range] | None = None
        self.copies = Processes.here().count
        if shared and self.loader is not data:
            self._divide(batch_size)

    def _divide(self, batch_size: int) -> None:
        """Leaves this process its share of the batches, whole ones, because some scores depend on their size."""
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
        """What all processes found for their batches (a number or row for each image), in the order of all images."""
        if self._spans is None:
            return torch.cat(list(found))
        whole = torch.zeros(self._images, *found[0].shape[1:], dtype=found[0].dtype)
        for span, part in zip(self._spans, found, strict=True):
            whole[span.start : span.stop] = part
        return Processes.here().sum(whole)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        own = isinstance(self.loader, LoaderPart)  # whose inputs are what the network reads
        for images, labels in self.loader:
            ready = images if own else prepare(images, self.spec, prepared=self.prepared)
            yield cast("tuple[Tensor, Tensor]", ReadBatch(ready, labels))  # the targets of a task may be anything
            seen += len(images)
            if seen >= self.limit:
                return
