"""Datasets -> batches, in an order that repeats exactly."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from basisprune.data.arguments import LARGEST_SEED, check, image_size, whole
from basisprune.data.datasets import Item, LabelledImages
from basisprune.data.own_loaders import LoaderPart
from basisprune.data.wrapped import WrappedDataset
from basisprune.errors import DataError

_MOST_IMAGES = 1 << 40
_MMAP_THRESHOLD, _LARGE = -3, 1 << 14  # a setting of glibc's malloc, and bytes


def make_loader(
    dataset: Dataset[object] | DataLoader[object],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    workers: int = 0,
    size: tuple[int, int] | None = None,
) -> DataLoader[object]:
    """A loader of (images, labels): tensors (N, C, H, W) and int64 (N,). A DataLoader, or a
    user's own batches, are returned unchanged.

    The order is a function of (seed, epoch) alone and no global random state is touched. PIL images of somebody else's
    dataset are resized to `size` (height, width) if that is given. Batch normalisation
    cannot train on one image, so a shuffled loader leaves out the last image where it would be a batch by
    itself, unless it is the only one.

    >>> from basisprune.data import ArrayImages
    >>> images = ArrayImages(np.zeros((9, 4, 4), dtype=np.uint8), [0, 1, 2] * 3)
    >>> [len(labels) for _, labels in make_loader(images, 4)]
    [4, 4, 1]
    >>> [len(labels) for _, labels in make_loader(images, 4, shuffle=True)]
    [4, 4]
    """
    if isinstance(dataset, DataLoader):
        return dataset
    if isinstance(dataset, LoaderPart):
        return cast("DataLoader[object]", dataset)  # which yields batches too
    faults = (
        whole("batch_size", batch_size, 1, _MOST_IMAGES),
        whole("seed", seed, 0, LARGEST_SEED),
        whole("epoch", epoch, 0, _MOST_IMAGES),
        whole("workers", workers, 0, 1024),
        image_size("size", size),
    )
    check("make_loader", faults)
    images = dataset if isinstance(dataset, LabelledImages) else WrappedDataset(dataset, size=size)
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
        worker_init_fn=_prepare_worker,
        pin_memory=torch.cuda.is_available(),
        # Workers draw their random numbers from it, other ones in each epoch.
        generator=torch.Generator().manual_seed(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])),
    )


def _prepare_worker(_worker: int) -> None:
    """Keeps the memory of a worker flat, however many images it reads."""
    gc.freeze()  # a collection would write to all objects that it was forked with, and so copy them
    if platform.libc_ver()[0] == "glibc":
        # Its heap would grow by half of every image, in pieces that fit nothing; so large blocks go back at once.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def collate(items: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """The items as one batch: images (N, C, H, W) and labels int64 (N,)."""
    images, labels = zip(*items, strict=True)
    kinds = {(image.dtype, image.shape) for image in images}
    if len(kinds) > 1:
        found = sorted(f"{dtype} {tuple(shape)}" for dtype, shape in kinds)
        raise DataError(
            f"images of different kinds in one batch ({', '.join(found)}); "
            "all must have one type and shape: pass size=(height, width) to have them resized"
        )
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)
