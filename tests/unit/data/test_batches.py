"""Laws of the batches that scores and statistics are made from."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_images
from torch.utils.data import DataLoader, TensorDataset

from basisprune.data import PreparedBatches
from basisprune.torchkit.processes import Processes
from basisprune.types import InputSpec

SPEC = InputSpec((8, 8), (0.5,) * 3, (0.5,) * 3)


def sizes(batches: PreparedBatches) -> list[int]:
    return [len(labels) for _, labels in batches]


def test_batches_are_prepared_and_can_be_gone_through_again():
    batches = PreparedBatches(tiny_images(10), SPEC, batch_size=4)
    first, second = list(batches), list(batches)
    assert sizes(batches) == [4, 4, 2]
    for (images, labels), (again, same) in zip(first, second, strict=True):
        assert images.shape[1:] == SPEC.shape
        assert images.dtype == torch.float32
        assert torch.equal(images, again)
        assert torch.equal(labels, same)


@pytest.mark.parametrize(("limit", "expected"), [(1, [4]), (4, [4]), (5, [4, 4]), (9, [4, 4, 2]), (99, [4, 4, 2])])
def test_a_limit_stops_after_the_first_batches_that_hold_so_many(limit, expected):
    assert sizes(PreparedBatches(tiny_images(10), SPEC, batch_size=4, limit=limit)) == expected


def test_a_limit_counts_images_whatever_the_batches_of_a_loader_are():
    images = TensorDataset(torch.rand(30, 3, 8, 8), torch.zeros(30, dtype=torch.int64))
    assert sizes(PreparedBatches(DataLoader(images, batch_size=5), SPEC, limit=12)) == [5, 5, 5]


def test_shuffled_batches_see_all_classes_in_an_order_that_repeats():
    def labels(**settings) -> list[int]:
        ordered = tiny_images(30)
        order = sorted(range(30), key=lambda index: int(ordered.labels[index]))
        images = torch.utils.data.Subset(ordered, order)
        batches = PreparedBatches(images, SPEC, batch_size=12, limit=12, **settings)
        return [int(label) for _, batch in batches for label in batch]

    assert set(labels()) == {0, 1}
    assert set(labels(shuffle=True)) == {0, 1, 2}
    assert labels(shuffle=True) == labels(shuffle=True)
    assert labels(shuffle=True) != labels(shuffle=True, seed=1)


def test_images_that_are_prepared_already_are_taken_as_they_are():
    images = torch.randn(6, *SPEC.shape)
    batches = PreparedBatches(TensorDataset(images, torch.zeros(6).long()), SPEC, prepared=True)
    ((found, _),) = list(batches)
    assert torch.equal(found, images)


@pytest.mark.parametrize("limit", [None, 10])
def test_processes_share_the_batches_of_one(monkeypatch, limit):
    options = {"batch_size": 4, "limit": limit, "shuffle": True}
    whole = [images.sum().item() for images, _ in PreparedBatches(tiny_images(23), SPEC, **options)]
    shares = []
    for rank in range(2):
        monkeypatch.setattr(Processes, "here", lambda rank=rank: Processes(rank, 2))
        mine = PreparedBatches(tiny_images(23), SPEC, shared=True, **options)
        shares.append([images.sum().item() for images, _ in mine])
    assert shares == [whole[0::2], whole[1::2]]


def test_batches_that_are_too_few_to_be_divided_are_known_to_be_copies(monkeypatch):
    monkeypatch.setattr(Processes, "here", lambda: Processes(0, 3))
    divided, whole, alone = (
        PreparedBatches(tiny_images(10), SPEC, batch_size=size, shared=shared)
        for size, shared in ((4, True), (5, True), (4, False))
    )
    assert (divided.copies, whole.copies, alone.copies) == (1, 3, 3)
