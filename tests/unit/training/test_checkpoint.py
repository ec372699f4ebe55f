"""Laws of a training's state on disk."""

from __future__ import annotations

import copy
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from basisprune.data import Augment
from basisprune.errors import CheckpointError
from basisprune.files import checked, read_checked
from basisprune.training.checkpoint import (
    EpochRecord,
    Past,
    best_epoch,
    load_checkpoint,
    out_of_patience,
    save_checkpoint,
)
from basisprune.training.config import TrainConfig

CONFIG = TrainConfig(epochs=3, lr=0.05, augmentation=Augment(shift=0.1))
PAST = Past((EpochRecord(0, 0.05, 0.1 + 0.2, 0.5, None, None),))


def network(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "run" / "state.pt"
    save_checkpoint(path, *network(), CONFIG, PAST)
    return path


def store(content: object, path: Path) -> None:
    """Writes the content with its checksum, as a checkpoint is."""
    with checked(path) as file:
        torch.save(content, file)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    momenta = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    return {**copy.deepcopy(model.state_dict()), **{f"momentum{i}": m.clone() for i, m in enumerate(momenta)}}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def refused(path: Path, message: str, *, config: TrainConfig = CONFIG, width: int = 4) -> None:
    """Loading is refused for this reason, and changes nothing."""
    model, optimizer = network(width, seed=1)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, model, optimizer, config)
    assert str(path) in str(caught.value)
    assert same(state_of(model, optimizer), before)


def test_what_is_loaded_is_what_was_saved(saved):
    model, optimizer = network(seed=1)
    assert load_checkpoint(saved, model, optimizer, CONFIG) == PAST
    assert same(state_of(model, optimizer), state_of(*network()))


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_steps_by_its_own_kernel_whatever_the_saved_one_had(tmp_path, fused):
    path, model = tmp_path / "state.pt", network()[0]
    before, after = (torch.optim.AdamW(model.parameters(), lr=0.1, fused=kernel) for kernel in (not fused, fused))
    before.step()
    save_checkpoint(path, model, before, CONFIG, PAST)
    load_checkpoint(path, model, after, CONFIG)
    assert [group["fused"] for group in after.param_groups] == [fused]
    assert [int(state["step"]) for state in after.state.values()] == [1] * len(list(model.parameters()))
    after.step()


def test_the_scale_of_the_loss_goes_on_where_it_was(tmp_path, saved):
    path = tmp_path / "half.pt"
    save_checkpoint(path, *network(), CONFIG, PAST, torch.amp.GradScaler("cpu", init_scale=128.0))
    scaler = torch.amp.GradScaler("cpu")
    load_checkpoint(path, *network(), CONFIG, scaler)
    assert scaler.get_scale() == 128.0
    load_checkpoint(saved, *network(), CONFIG, scaler)  # one that has none
    assert scaler.get_scale() == 128.0


def test_the_best_weights_so_far_are_kept_with_the_last_ones(tmp_path):
    best, (model, optimizer) = network(seed=2)[0].state_dict(), network(seed=1)
    past = Past(PAST.history, best)
    save_checkpoint(tmp_path / "best.pt", *network(), CONFIG, past)
    found = load_checkpoint(tmp_path / "best.pt", model, optimizer, CONFIG)
    assert found.history == past.history
    assert found.best is not None
    assert same(dict(found.best), best)
    assert same(state_of(model, optimizer), state_of(*network()))


def test_a_checkpoint_from_before_a_setting_existed_has_its_default(saved):
    state = torch.load(io.BytesIO(read_checked(saved)), weights_only=True)
    config = json.loads(state["config"])
    for name in ("train", "weight_lr", "head_first", "clip_norm", "patience"):
        del config[name]
    config["augmentation"] = {"shift": 0.1, "flip": False, "rotation": 0.0}
    del state["best"]
    store({**state, "config": json.dumps(config)}, saved)
    assert load_checkpoint(saved, *network(seed=1), CONFIG) == PAST
    refused(saved, "train: 'method' there, 'all' now", config=replace(CONFIG, train="all"))


def test_best_weights_of_another_network_are_refused(tmp_path):
    path = tmp_path / "best.pt"
    save_checkpoint(path, *network(), CONFIG, Past(PAST.history, network(5)[0].state_dict()))
    refused(path, "belongs to another network")


def test_settings_that_do_not_change_the_outcome_may_differ(saved):
    free = TrainConfig(epochs=3, lr=0.05, augmentation=Augment(shift=0.1), workers=2, tracker="tensorboard")
    assert load_checkpoint(saved, *network(seed=1), free) == PAST


def test_a_checkpoint_of_another_configuration_is_refused_with_every_difference(saved):
    refused(saved, "lr: 0.05 there, 0.1 now", config=TrainConfig(epochs=3, augmentation=Augment(shift=0.1)))
    refused(saved, "augmentation.shift: 0.1 there, 0.2 now", config=TrainConfig(
        epochs=3, lr=0.05, augmentation=Augment(shift=0.2)))  # fmt: skip
    refused(saved, r"(?s)epochs: 3 there, 9 now.*seed: 0 there, 5 now", config=TrainConfig(
        epochs=9, lr=0.05, seed=5, augmentation=Augment(shift=0.1)))  # fmt: skip


def test_a_checkpoint_of_another_network_is_refused(saved):
    refused(saved, r"belongs to another network \(6 tensors differ, first 0.bias\)", width=5)


def test_a_damaged_file_is_refused_wherever_it_was_cut(saved):
    whole = saved.read_bytes()
    for length in [0, 1, 10, *range(50, len(whole) - 1, len(whole) // 20), len(whole) - 1]:
        saved.write_bytes(whole[:length])
        refused(saved, "is damaged")


def test_one_flipped_bit_anywhere_is_noticed(saved):
    whole = saved.read_bytes()
    for place in range(0, len(whole), len(whole) // 50):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        saved.write_bytes(changed)
        refused(saved, "its checksum is wrong|has no checksum")


@pytest.mark.parametrize("junk", [b"garbage", b"\x80\x02}q\x00.", os.urandom(2000), b"PK\x03\x04" + bytes(500), b"{}"])
def test_garbage_is_refused(saved, junk):
    saved.write_bytes(junk)
    refused(saved, "is damaged")


def test_a_folder_is_refused(tmp_path):
    refused(tmp_path, "cannot be read as a checkpoint")


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_a_file_that_is_packed_is_refused_before_it_is_made(tmp_path):
    inner = tmp_path / "inner.pt"
    torch.save({"weights": torch.zeros(1 << 20)}, inner)
    content = io.BytesIO()
    with zipfile.ZipFile(inner) as read, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in read.infolist():
            packed.writestr(part.filename, read.read(part))
    with checked(tmp_path / "state.pt") as file:
        file.write(content.getvalue())
    refused(tmp_path / "state.pt", "compressed")


def test_a_file_that_holds_an_object_is_refused_and_not_unpickled(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    store({"format": 1, "config": Payload()}, saved)
    refused(saved, "cannot be read as a checkpoint")
    assert not Path("unpickled").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "format list found, 1 is needed"),
        ({"model": {}}, "format None found"),
        ({"format": 99}, "format 99 found, 1 is needed"),
        ({"format": 1}, "parts are missing"),
        ({"format": 1, "config": "no json", "history": "[]", "model": {}, "optimizer": {}}, "parts are missing"),
        ({"format": 1, "config": "{}", "history": "[]", "model": 3, "optimizer": {}}, "parts are missing"),
        ({"format": 1, "config": "[]", "history": "[]", "model": {}, "optimizer": {}}, "parts are missing"),
        ({"format": 1, "config": "{}", "history": "[{}]", "model": {}, "optimizer": {}}, "parts are missing"),
        ({"format": 1, "config": "{}", "history": "[]", "model": {}, "optimizer": {}, "best": 3}, "parts are missing"),
        (
            {"format": 1, "config": '{"augmentation": 3}', "history": "[]", "model": {}, "optimizer": {}},
            "parts are missing",
        ),
    ],
)
def test_other_content_is_refused(saved, content, message):
    store(content, saved)
    refused(saved, message)


@pytest.mark.parametrize("optimizer", [{}, None, {"state": {}, "param_groups": []}])
def test_an_optimizer_that_does_not_fit_is_refused(saved, optimizer):
    state = torch.load(io.BytesIO(read_checked(saved)), weights_only=True)
    store({**state, "optimizer": optimizer}, saved)
    refused(saved, "its optimizer does not fit")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(_state, file):
        file.write(b"half a file")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save_checkpoint(saved, *network(), CONFIG, Past())
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


accuracies = st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=8)


def records(values, losses=None):
    losses = losses or [1.0] * len(values)
    pairs = zip(values, losses, strict=True)
    return [EpochRecord(place, 0.1, 1.0, 0.5, loss, value) for place, (value, loss) in enumerate(pairs)]


@given(accuracies)
def test_the_best_epoch_is_the_first_of_the_highest_accuracy(values):
    assert best_epoch(records(values)) == (values.index(max(values)) if values else None)


@given(accuracies.filter(bool), st.randoms())
def test_of_equal_accuracies_the_smaller_loss_is_better(values, random):
    losses = [random.random() for _ in values]
    best = best_epoch(records(values, losses))
    equals = [place for place, value in enumerate(values) if value == max(values)]
    assert best == min(equals, key=lambda place: losses[place])


@given(accuracies, st.integers(1, 9))
def test_patience_ends_when_so_many_epochs_brought_nothing_better(values, patience):
    ended = out_of_patience(records(values), patience)
    assert ended == (len(values) > patience and max(values[:-patience]) >= max(values[-patience:]))
    assert not out_of_patience(records(values), None)


def test_what_was_not_validated_has_no_best_epoch():
    history = [EpochRecord(0, 0.1, 1.0, 0.5, None, None)] * 5
    assert best_epoch(history) is None
    assert not out_of_patience(history, 1)
