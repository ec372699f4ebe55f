"""Any data -> batches that a network reads, again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from basisprune.data.arguments import check, of_type, whole
from basisprune.data.loaders import make_loader
from basisprune.data.own_loaders import LoaderPart
from basisprune.data.prepare import prepare
from basisprune.torchkit.running import ReadBatch
from basisprune.types import InputSpec


class PreparedBatches:
    """Batches of prepared images and their labels, in a fixed order; can be gone through many times.

    `limit` stops after the first batches that hold that many images; `shuffle` draws them from all of the
    data by `seed`, so that a limit sees every class.
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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        own = isinstance(self.loader, LoaderPart)  # whose inputs are what the network reads
        for images, labels in self.loader:
            ready = images if own else prepare(images, self.spec, prepared=self.prepared)
            yield cast("tuple[Tensor, Tensor]", ReadBatch(ready, labels))  # the targets of a task may be anything
            seen += len(images)
            if seen >= self.limit:
                return
