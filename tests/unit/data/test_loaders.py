"""Laws of the batches that scores and statistics are made from."""

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
from tiny import tiny_images
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from basisprune.data import (
    ArrayImages,
    FolderImages,
    LoaderPart,
    Loaders,
    PreparedBatches,
    WrappedDataset,
    is_prepared,
    load_data,
    make_loader,
    own_part,
    take,
)
from basisprune.data.load import Reading
from basisprune.data.manifest import manifest_of
from basisprune.errors import ConfigError, DataError
from basisprune.tasks import CLASSIFICATION, regression, segmentation
from basisprune.torchkit.processes import Processes
from basisprune.types import InputSpec


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


STARTS = """
import multiprocessing, os
import torch
from basisprune.data import loaders
from basisprune.torchkit import processes

class Folders(torch.utils.data.Dataset):
    classes, start = ("a", "b"), ""
    def __reduce__(self):
        return unpickled, ()
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.tensor([[[float(self.start == here), float(os.getcwd() == here)]]]), index

def unpickled():
    made = Folders()
    made.start = os.getcwd()
    return made

here = os.environ["HERE"]
if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    print(loaders.make_loader(Folders(), 2, workers=1).multiprocessing_context.get_start_method())
    loaders.worker_context = processes.WorkerContext
    print(next(iter(loaders.make_loader(Folders(), 2, workers=1)))[0].flatten().tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere forks may crash")
def test_workers_import_nothing_or_begin_in_another_folder(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS)
    command, environment = [sys.executable, "-P", "starts.py"], {**os.environ, "HERE": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["fork", "[0.0, 1.0, 0.0, 1.0]"], done.stderr


def test_the_process_that_cleans_up_after_workers_begins_in_another_folder(tmp_path):
    (tmp_path / "multiprocessing.py").write_text("open('ran', 'w')")
    code = (
        "import sys; sys.path.pop(0)\n"
        "from basisprune.torchkit.processes import worker_context\n"
        "sys.platform = 'darwin'\n"
        "worker_context().Queue()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()


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


MASKS = segmentation()


def batches(count: int = 3, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.zeros(4, 8, 8).long()) for _ in range(count)]


class Anew:
    """An iterable without a length."""

    def __init__(self, given) -> None:
        self.given = given

    def __iter__(self):
        yield from self.given


def test_loaders_become_parts_that_know_their_size():
    splits = Loaders(train=Anew(batches()), val=batches(1, 1), confirm=batches(2, 2)).splits(MASKS)
    assert {name: len(part) for name, part in splits.parts.items()} == {"train": 12, "val": 4, "confirm": 8}
    assert splits.train.steps == 3
    assert splits.train.shape == (3, 8, 8)
    assert splits.classes == ()
    assert splits.describe().splitlines()[0] == "train: 12 examples"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (iter([1]), "a list_iterator given, which can be gone through only once"),
        ((batch for batch in batches()), "a generator given, which can be gone through only once"),
        (TensorDataset(torch.zeros(2)), "a TensorDataset given, which yields single examples; wrap it in a DataLoader"),
        (3, "a int given; an iterable of batches is needed"),
        ("photos", "a str given; an iterable of batches is needed"),
    ],
)
def test_what_cannot_be_gone_through_again_and_again_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        Loaders(train=batches(), val=given)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(DataError, match="val yields no batches"):
        Loaders(train=batches(), val=[]).splits(MASKS)


def test_what_networks_are_compared_on_must_come_in_the_same_order():
    data = TensorDataset(torch.arange(12.0).view(12, 1, 1).expand(12, 1, 4), torch.zeros(12, 1))
    loaders = Loaders(train=DataLoader(data, 4, shuffle=True), val=DataLoader(data, 4, shuffle=True))
    splits = loaders.splits(regression())
    list(splits.train)  # which may come in any order
    with pytest.raises(DataError, match="val: the loader yields other examples than before"):
        [list(splits.val) for _ in range(4)]


def test_counting_a_loader_draws_no_random_numbers():
    data = TensorDataset(torch.randn(6, 1, 4), torch.zeros(6, 1))
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    len(LoaderPart(DataLoader(data, 2, shuffle=True), regression()))
    assert torch.equal(torch.rand(1), wanted)


def test_a_classifier_needs_class_numbers():
    labelled = [(torch.zeros(3, 3, 8, 8), torch.tensor([0, 2, 1]))]
    splits = Loaders(train=labelled, val=labelled, classes=("a", "b", "c")).splits(CLASSIFICATION)
    assert splits.classes == ("a", "b", "c")
    assert splits.val.labels.tolist() == [0, 2, 1]
    assert Loaders(train=labelled).splits(CLASSIFICATION).classes == ("0", "1", "2")
    with pytest.raises(DataError, match=r"targets torch.int64 \(4, 8, 8\) given for 4 examples; a classifier needs"):
        Loaders(train=batches()).splits(CLASSIFICATION)


def test_the_manifest_knows_what_is_held_out_by_its_content():
    one, same, other = (
        manifest_of(Loaders(train=batches(seed=9), val=batches(seed=seed)).splits(MASKS)).digest for seed in (1, 1, 2)
    )
    assert one == same != other


def test_prepared_batches_leave_inputs_as_they_are_whatever_their_shape():
    part = LoaderPart([(torch.full((2, 1, 5), 7.0), torch.zeros(2, 1))] * 3, regression())
    found = list(PreparedBatches(part, InputSpec.as_it_is((1, 5)), limit=3))
    assert [inputs.shape for inputs, _ in found] == [(2, 1, 5)] * 2
    assert found[0][0].max() == 7.0
    assert make_loader(part, 8) is part


def test_images_that_are_read_here_are_not_taken_for_batches():
    images = ArrayImages(torch.zeros(4, 8, 8, 3, dtype=torch.uint8).numpy(), [0, 1, 0, 1])
    data = TensorDataset(torch.zeros(6, 1, 4), torch.zeros(6, 1))
    assert own_part(images, MASKS, 2) is None
    assert own_part(data, CLASSIFICATION, 2) is None
    assert own_part(DataLoader(data), CLASSIFICATION, 2) is None
    assert own_part(data, regression(), 2).steps == 3  # put into batches
    assert own_part([(torch.zeros(3, 1, 4, 4), torch.arange(3))], CLASSIFICATION, 2).steps == 1
    assert own_part([(torch.zeros(1, 4, 4), 0), (torch.zeros(1, 4, 4), 1)], CLASSIFICATION, 2) is None  # single images


@pytest.mark.parametrize("name", ["confirm", "test"])
def test_examples_that_were_looked_at_promise_nothing(name):
    train, val = batches(seed=9), batches(seed=1)
    with pytest.raises(DataError, match=f"{name} has the examples of train"):
        Loaders(train=train, val=val, **{name: train}).splits(MASKS)
    for copies in (list(train), train[:1], [(inputs.clone(), targets) for inputs, targets in reversed(train)]):
        with pytest.raises(DataError, match=f"examples of {name} are also in train"):
            Loaders(train=train, val=val, **{name: copies}).splits(MASKS)
    with pytest.raises(DataError, match=f"4 of 8 examples of {name} are also in val"):
        Loaders(train=train, val=val, **{name: [val[2], *batches(1, 5)]}).splits(MASKS)


class Fickle:
    """Batches that are others from the second pass on."""

    def __init__(self, *passes: list) -> None:
        self.passes, self.count = passes, 0

    def __iter__(self):
        self.count += 1
        yield from self.passes[min(self.count, len(self.passes)) - 1]


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (lambda given: given[:-1], "yields 8 examples now, and 12 before"),
        (lambda given: [*given, given[0]], "other examples than before"),
        (lambda given: [(inputs, 1 - targets) for inputs, targets in given], "other targets than before"),
        (lambda given: [(inputs + 1e-3, targets) for inputs, targets in given], "other examples than before"),
    ],
)
def test_a_loader_that_changes_is_refused_by_the_end_of_that_pass(later, said):
    given = batches(seed=3)
    splits = Loaders(train=batches(), val=batches(seed=1), confirm=Fickle(given, later(given))).splits(MASKS)
    with pytest.raises(DataError, match=f"confirm: the loader yields {said}" if said[0] == "o" else said):
        list(splits.confirm)


def labelled(count: int, seed: int = 0) -> list:
    random = torch.Generator().manual_seed(seed)
    return [(torch.rand(count, 3, 16, 16, generator=random), torch.arange(count) % 2)]


def test_copies_and_groups_of_what_judges_are_units():
    ((images, labels),) = labelled(6)
    copied = [(torch.cat([images, images + 1e-4]), torch.cat([labels, labels]))]
    parts = Loaders(train=labelled(6, 1), val=copied, confirm=labelled(6, 2), groups={"confirm": [0, 0, 1, 1, 2, 3]})
    splits = parts.splits(CLASSIFICATION)
    assert (splits.val.independent, len(splits.val)) == (6, 12)
    assert splits.confirm.units.tolist() == [0, 0, 2, 2, 4, 5]
    alone = Loaders(train=labelled(6, 1), val=labelled(6)).splits(CLASSIFICATION)
    assert alone.val.units is None


def test_examples_that_nearly_were_seen_count_as_one_and_are_told():
    (images, labels), (others, more) = labelled(6)[0], labelled(4, 5)[0]
    confirm = [(torch.cat([images + 1e-4, others]), torch.cat([labels, more]))]
    loaders = Loaders(train=labelled(6), val=labelled(6, 1), confirm=confirm)
    with pytest.warns(UserWarning, match="6 of 10 examples of confirm are near copies of others"):
        assert loaders.splits(CLASSIFICATION).confirm.independent == 5
    with pytest.raises(DataError, match="near copies"):
        loaders.splits(CLASSIFICATION, Reading(strict=True))


def test_groups_are_those_of_parts_and_not_shared():
    with pytest.raises(ConfigError, match="groups: 'vla' given, which is no part"):
        Loaders(train=labelled(6), groups={"vla": [0] * 6})
    parts = {"train": labelled(6, 1), "val": labelled(6), "confirm": labelled(6, 2)}
    with pytest.raises(DataError, match="or of the same groups"):
        Loaders(**parts, groups={"train": [0] * 6, "confirm": [1, 2, 3, 4, 5, 0]}).splits(CLASSIFICATION)


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
    batches = PreparedBatches(WrappedDataset(TensorDataset(images, torch.zeros(6).long()), prepared=True), SPEC)
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


def test_a_dataset_says_once_that_its_images_are_prepared():
    data = TensorDataset(torch.randn(30, *SPEC.shape), torch.arange(30) % 3)
    splits = load_data(data, val_fraction=0.2, test_fraction=0.2, reading=Reading(prepared=True))
    assert all(part.prepared for part in splits.parts.values())
    ((found, _),) = PreparedBatches(take(splits.val, [0]), SPEC)
    assert found.min() < 0
    assert not is_prepared(DataLoader(data))
    data.prepared = True
    assert is_prepared(DataLoader(Subset(data, [0, 1])))
    assert load_data(data, test_fraction=0).train.prepared
    with pytest.raises(ConfigError) as caught:
        load_data(ArrayImages(torch.zeros(8, 8, 8).byte(), [0, 1] * 4), reading=Reading(prepared=True))
    assert caught.value.where == "load_data"
