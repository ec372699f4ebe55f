"""Loaders of the user's own: any iterable of batches, again and again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from basisprune.data import ArrayImages, LoaderPart, Loaders, PreparedBatches, make_loader, own_part
from basisprune.data.reading import Reading
from basisprune.data.roles import manifest_of
from basisprune.errors import ConfigError, DataError
from basisprune.tasks import CLASSIFICATION, regression, segmentation
from basisprune.types import InputSpec

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
    with pytest.raises(DataError, match="val: the loader yields other examples than before, or in another order"):
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
