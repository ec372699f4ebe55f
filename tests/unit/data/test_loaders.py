from __future__ import annotations

import functools
import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from basisprune.data import ArrayImages, FolderImages, WrappedDataset, make_loader, take
from basisprune.errors import ConfigError, DataError


def alone(test):
    """The test in a process of its own: forking one with the threads of many libraries may end it."""

    @functools.wraps(test)
    def run(*args, **fixtures):
        if "BASISPRUNE_ALONE" in os.environ:
            test(*args, **fixtures)
            return
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"{__file__}::{test.__name__}"],
            env={**environment, "BASISPRUNE_ALONE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def numbered(count: int) -> ArrayImages:
    """Images whose pixels and labels are their index."""
    return ArrayImages(np.arange(count, dtype=np.uint8)[:, None, None].repeat(4, 1), np.arange(count))


def order(loader) -> list[int]:
    return [label for _, labels in loader for label in labels.tolist()]


def test_batches_are_images_and_int64_labels_that_belong_together():
    for images, labels in make_loader(take(numbered(20), range(3, 17)), 4, shuffle=True):
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (1, 4, 1)
        assert labels.dtype == torch.int64
        assert torch.equal(images[:, 0, 0, 0].long(), labels)


def test_without_shuffling_the_order_is_that_of_the_dataset():
    assert order(make_loader(numbered(9), 4, seed=3, epoch=2)) == list(range(9))


@given(count=st.integers(1, 40), batch_size=st.integers(1, 12), seed=st.integers(0, 5), epoch=st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_a_shuffled_epoch_shows_every_image_once_and_no_lonely_one(count, batch_size, seed, epoch):
    loader = make_loader(numbered(count), batch_size, shuffle=True, seed=seed, epoch=epoch)
    sizes = [len(labels) for _, labels in loader]
    seen = order(loader)
    assert len(sizes) == len(loader)
    assert len(set(seen)) == len(seen) == sum(sizes)
    lonely = count % batch_size == 1 and count > 1
    assert count - len(seen) == (1 if lonely else 0)
    assert 1 not in sizes or batch_size == 1 or count == 1


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    def shuffled(seed: int, epoch: int) -> list[int]:
        return order(make_loader(numbered(30), 7, shuffle=True, seed=seed, epoch=epoch))

    first = shuffled(1, 2)
    torch.manual_seed(99)
    assert shuffled(1, 2) == first
    assert len({tuple(shuffled(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_loader_repeats_itself_and_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    loader = make_loader(numbered(30), 7, shuffle=True)
    assert order(loader) == order(loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_existing_loader_is_returned_unchanged():
    loader = DataLoader(numbered(4), 2)
    assert make_loader(loader, 3, shuffle=True) is loader


def test_any_pytorch_dataset_can_be_loaded():
    images, labels = next(iter(make_loader(TensorDataset(torch.rand(3, 3, 4, 4), torch.tensor([0, 1, 1])), 3)))
    assert images.shape == (3, 3, 4, 4)
    assert labels.tolist() == [0, 1, 1]


@alone
def test_workers_yield_the_same_batches_and_pass_errors_on(tmp_path):
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"")
    files = [(tmp_path / "good.png", 0), (tmp_path / "good.png", 1), (tmp_path / "bad.png", 0)]
    batches = iter(make_loader(FolderImages(files, ("a", "b"), (4, 4)), 2, workers=1))
    images, labels = next(batches)
    assert images[:, :, 0, 0].tolist() == [[1, 2, 3]] * 2
    assert labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"bad\.png"):
        next(batches)


class Draws(Dataset):
    """Each item is what is drawn for it from Python, NumPy and PyTorch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        return torch.tensor([[[random.random(), np.random.rand(), torch.rand(()).item()]]]), index


@alone
def test_workers_draw_other_random_numbers_in_each_epoch_and_the_same_in_another_run():
    def drawn(epoch: int) -> torch.Tensor:
        loader = make_loader(WrappedDataset(Draws(), ("0", "1", "2", "3")), 1, seed=5, epoch=epoch, workers=2)
        return torch.cat([images.flatten(1) for images, _ in loader])

    first, second = drawn(0), drawn(1)
    for source in range(3):  # no number twice: in an epoch, between workers or between epochs
        assert len(set(torch.cat([first, second])[:, source].tolist())) == 8
    assert torch.equal(drawn(1), second)


@pytest.mark.parametrize("second", [torch.zeros(3, 5, 5), torch.zeros(3, 4, 4, dtype=torch.uint8)])
def test_images_that_do_not_stack_are_refused_with_the_way_out(second):
    items = [(torch.zeros(3, 4, 4), 0), (second, 1)]
    with pytest.raises(DataError, match=r"torch.float32 \(3, 4, 4\).*pass size="):
        next(iter(make_loader(WrappedDataset(items), 2)))  # type: ignore[arg-type]


def test_all_wrong_arguments_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        make_loader(numbered(3), 0, seed=-1, epoch=-1, workers=-1)
    assert all(name in str(caught.value) for name in ("batch_size: 0", "seed: -1", "epoch: -1", "workers: -1"))


class Frozen(Dataset):
    """Says by its labels whether the garbage collector of its process leaves older objects alone."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(3, 4, 4), int(gc.get_freeze_count() > 1000)


@alone
def test_workers_leave_the_memory_alone_that_they_share():
    frozen = WrappedDataset(Frozen(), classes=("no", "yes"))
    assert next(iter(make_loader(frozen, 2, workers=1)))[1].tolist() == [1, 1]
