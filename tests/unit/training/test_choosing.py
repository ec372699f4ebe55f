"""Laws of what a training finds out by itself, and of what it does when it diverges."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Notes, differing, tiny_images, tiny_model, tiny_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import basisprune.training.choosing as choosing
import basisprune.training.loop as loop
import basisprune.training.trainer as trainer
from basisprune.data import ArrayImages, Augment, WrappedDataset
from basisprune.demo import demo_data
from basisprune.errors import CheckpointError, ConfigError, TrainingError
from basisprune.tasks import regression
from basisprune.training.choosing import Halves, Short, choose, divide, may_be_mirrored
from basisprune.training.config import Choices, TrainConfig
from basisprune.training.evaluation import Evaluation, evaluate
from basisprune.training.loop import FitResult, Session, fit
from basisprune.training.trainer import Images, Trainer
from basisprune.types import InputSpec

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGES = tiny_images(240)


def choosy(**settings) -> TrainConfig:
    defaults = {"epochs": 4, "batch_size": 8, "optimizer": "adamw", "lr": 1e-3, "norm_statistics": "fixed"}
    return tiny_training(
        **{**defaults, "min_lr": 0.0, "train": "all", "relative": False, "choices": Choices(), **settings}
    )


def fitted(config: TrainConfig, *, images=IMAGES, model=None, val=None, **kwargs) -> FitResult:
    return fit(model or tiny_model(), images, val, config, **kwargs)


def settled(config: TrainConfig, *, images=IMAGES, model=None) -> TrainConfig:
    model, session = model or tiny_model(), Session()
    return choose(model, divide(model, Images(images), config, session), config, session)


def constant(monkeypatch, **changes) -> list[TrainConfig]:
    """Have every choice turn out the same; return the list of what was asked for."""
    asked = []

    def chosen(model, halves, config, session):
        asked.append(config)
        return replace(config, choices=None, **changes)

    monkeypatch.setattr(loop, "choose", chosen)
    return asked


# The rate


@pytest.mark.parametrize("lr", [1e-7, 1e6])
def test_a_rate_that_is_far_off_is_left_behind(lr):
    chosen = settled(choosy(lr=lr))
    assert chosen.lr / lr >= 3 if lr < 1 else chosen.lr / lr <= 1 / 2
    assert chosen.choices is None


def test_training_that_chooses_learns_where_the_given_rate_does_not():
    held_out = tiny_images(60, seed=1)
    plain = fitted(choosy(lr=1e-4, choices=None))
    result = fitted(choosy(lr=1e-4))
    assert result.config.lr > 1e-4
    assert evaluate(result.model, held_out).loss < evaluate(plain.model, held_out).loss


def test_the_least_loss_is_taken_between_the_rates_that_were_tried():
    def rate(*losses):
        runs = [Short(10.0**place, "fixed", Evaluation(loss, 0.5, 9)) for place, loss in enumerate(losses)]
        return choosing._least(runs, "fixed")

    assert rate(2.0, 1.0, 2.0) == pytest.approx(10)
    assert 1 < rate(1.1, 1.0, 2.0) < 10 < rate(2.0, 1.0, 1.1) < 100
    assert rate(1.0, 2.0, 3.0) == 1
    assert 1 < rate(1.1, 1.0, float("inf")) < 10


def test_short_runs_cost_at_most_their_share_of_the_training(monkeypatch):
    steps, judged = [], []
    sprint, evaluated = Trainer.sprint, Trainer.evaluated
    monkeypatch.setattr(Trainer, "sprint", lambda self, count: steps.append(count) or sprint(self, count))
    monkeypatch.setattr(Trainer, "evaluated", lambda self, data: judged.append(len(data)) or evaluated(self, data))
    settled(choosy(epochs=9))
    assert len(steps) >= 3
    assert sum(steps) + sum(judged) / 8 / 3 <= 0.25 * 9 * 27


def test_a_training_too_short_to_tell_anything_takes_its_rate_as_it_is(monkeypatch):
    monkeypatch.setattr(Trainer, "sprint", lambda *_: pytest.fail("a short run"))
    chosen = settled(choosy(epochs=1, batch_size=64))
    assert (chosen.lr, chosen.choices) == (1e-3, None)


def test_all_rates_diverging_leaves_one_below_them(monkeypatch):
    monkeypatch.setattr(Trainer, "sprint", lambda self, steps: False)
    assert settled(choosy()).lr < 1e-3


# Statistics


def test_statistics_of_the_batch_are_taken_where_those_of_the_network_are_wrong():
    sound, spoiled = tiny_model(), tiny_model()
    calibrated = fit(sound, IMAGES, None, tiny_training(epochs=2)).model
    for module in spoiled.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.fill_(10.0)
            module.running_var.fill_(0.01)
    assert settled(choosy(epochs=12, lr=1e-2), model=calibrated).norm_statistics == "fixed"
    assert settled(choosy(epochs=12, lr=1e-2), model=spoiled).norm_statistics == "batch"


# What judges


def test_validation_images_choose_nothing():
    alone = fitted(choosy())
    other = ArrayImages(np.zeros((30, 16, 16, 3), dtype=np.uint8), np.zeros(30, dtype=np.int64))
    for val in (tiny_images(30, seed=1), other):
        result = fitted(choosy(), val=val)
        assert result.config == alone.config
        assert not differing(result.model, alone.model)


def test_images_that_judge_are_held_out_of_the_training_and_stay_in_proportion():
    halves = divide(tiny_model(), Images(IMAGES), choosy(), Session())
    rest, part = halves.proper.train, halves.proper.held_out
    assert len(part) == 24
    assert len(rest) == 216
    assert np.bincount(part.labels).tolist() == [8, 8, 8]
    assert not {part.content_hash(i) for i in range(24)} & {rest.content_hash(i) for i in range(216)}


def test_images_of_a_group_are_held_out_together():
    grouped = copy.copy(IMAGES)
    grouped.groups = tuple(str(place // 6) for place in range(240))
    halves = divide(tiny_model(), Images(grouped), choosy(), Session())
    assert not set(halves.proper.train.groups) & set(halves.proper.held_out.groups)


def test_few_images_judge_short_runs_without_being_lost_to_the_training():
    few = tiny_images(60)
    halves = divide(tiny_model(), Images(few), choosy(), Session())
    assert halves.proper == Images(few)
    assert len(halves.short.held_out) == 15
    assert len(halves.short.train) == 45


def test_batches_of_a_loader_judge_as_far_as_they_were_not_learnt_from():
    images = WrappedDataset(TensorDataset(torch.randn(60, 3, 16, 16), torch.arange(60) % 3), prepared=True)
    loader = DataLoader(images, batch_size=6)
    halves = divide(tiny_model(), Images(loader), choosy(), Session())
    assert halves.proper == Images(loader)
    assert [sum(len(labels) for _, labels in part) for part in (halves.short.train, halves.short.held_out)] == [48, 12]


@pytest.mark.parametrize("in_batches", [True, False])
def test_other_tasks_choose_too(in_batches):
    torch.manual_seed(0)
    inputs = torch.randn(240, 1, 4)
    data = TensorDataset(inputs, inputs.sum(2))
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    network.input_spec = InputSpec.as_it_is((1, 4))
    given = DataLoader(data, batch_size=8, shuffle=True) if in_batches else data
    result = fit(network, given, None, choosy(lr=1e-5), session=Session(task=regression()))
    assert result.config.lr > 1e-5
    assert (result.history[-1].held_out_loss is None) == in_batches


class Judge:
    """Accuracies of the images held out that were decided beforehand, and the weights that got each."""

    def __init__(self, accuracies, monkeypatch):
        self.accuracies, self.weights = accuracies, []
        monkeypatch.setattr(trainer, "evaluate", self.judged)

    def judged(self, model, data, **_settings):
        self.weights.append(copy.deepcopy(model))
        return Evaluation(1.0, self.accuracies[len(self.weights) - 1], 400)


@pytest.mark.parametrize(("accuracies", "best"), [([0.5, 0.9, 0.6, 0.7], 1), ([0.5, 0.9, 0.8, 0.89], 3)])
def test_the_weights_are_those_of_the_best_epoch_unless_a_later_one_is_level(accuracies, best, monkeypatch):
    constant(monkeypatch)
    judge = Judge([0.3, *accuracies], monkeypatch)  # the first is that of the network before its training
    result = fitted(choosy())
    assert [record.held_out_accuracy for record in result.history] == accuracies
    assert not differing(result.model, judge.weights[1 + best])


# Divergence


def diverging(monkeypatch, above: float) -> None:
    """Have the loss after an epoch at a higher rate be above that of the start."""
    evaluated = Trainer.evaluated

    def spoiled(self, data):
        found = evaluated(self, data)
        if found is not None and self.trained and self.config.lr > above:
            return replace(found, loss=found.loss + 100, accuracy=0.0)
        return found

    epoch = Trainer.epoch
    monkeypatch.setattr(Trainer, "trained", False, raising=False)
    monkeypatch.setattr(Trainer, "epoch", lambda self, *args: setattr(self, "trained", True) or epoch(self, *args))
    monkeypatch.setattr(Trainer, "evaluated", spoiled)


def test_a_training_that_diverges_starts_again_at_a_third_of_its_rate_and_says_so(monkeypatch):
    constant(monkeypatch, lr=0.9)
    diverging(monkeypatch, above=0.2)
    notes = Notes()
    result = fitted(choosy(epochs=2), session=Session(callback=notes))
    restarts = [line for line in notes.lines if "diverged" in line]
    assert len(restarts) == 2
    assert result.config.lr == pytest.approx(0.1)


def test_a_restart_begins_where_the_training_began(monkeypatch):
    constant(monkeypatch, lr=1.0)
    epoch, failed = Trainer.epoch, []

    def once(self, *args):
        record = epoch(self, *args)
        if not failed:
            failed.append(record)
            raise trainer.DivergedError("epoch 0: bad luck")
        return record

    monkeypatch.setattr(Trainer, "epoch", once)
    result = fitted(choosy(epochs=2))
    constant(monkeypatch, lr=1.0 / 3)
    assert not differing(result.model, fitted(choosy(epochs=2)).model)


def test_a_loss_that_is_never_finite_ends_in_an_error(monkeypatch):
    constant(monkeypatch)
    monkeypatch.setattr(Trainer, "_step", lambda *_: float("nan"))
    with pytest.raises(TrainingError):
        fitted(choosy())


def test_a_training_that_is_slow_to_learn_is_left_alone(monkeypatch):
    constant(monkeypatch, lr=1e-7)
    notes = Notes()
    result = fitted(choosy(epochs=2), session=Session(callback=notes))
    assert result.config.lr == 1e-7
    assert not notes.lines


def test_without_choices_a_training_that_diverges_is_an_error():
    with pytest.raises(TrainingError):
        fitted(choosy(lr=1e30, choices=None))


# Resuming


def test_a_run_that_resumes_takes_what_it_chose_and_ends_in_the_same_weights(tmp_path, monkeypatch):
    whole = fitted(choosy(), checkpoint=tmp_path / "whole.pt")
    fitted(choosy(), checkpoint=tmp_path / "parts.pt", session=Session(stop=lambda history: len(history) == 1))
    monkeypatch.setattr(loop, "choose", lambda *_: pytest.fail("chosen again"))
    resumed = fitted(choosy(), checkpoint=tmp_path / "parts.pt")
    assert resumed.config == whole.config
    assert not differing(resumed.model, whole.model)
    assert resumed.history == whole.history


def test_a_run_that_resumes_after_a_restart_keeps_the_slower_rate(tmp_path, monkeypatch):
    constant(monkeypatch, lr=0.9)
    diverging(monkeypatch, above=0.5)
    stop = Session(stop=lambda history: len(history) == 1)
    first = fitted(choosy(epochs=2), checkpoint=tmp_path / "state.pt", session=stop)
    notes = Notes()
    resumed = fitted(choosy(epochs=2), checkpoint=tmp_path / "state.pt", session=Session(callback=notes))
    assert resumed.config.lr == first.config.lr == pytest.approx(0.3)
    assert not notes.lines


def test_a_choice_made_for_other_settings_is_refused_and_a_damaged_one_made_again(tmp_path):
    fitted(choosy(), checkpoint=tmp_path / "state.pt")
    with pytest.raises(CheckpointError):
        fitted(choosy(batch_size=16), checkpoint=tmp_path / "state.pt")
    (tmp_path / "state.pt").unlink()
    (tmp_path / "state.pt.choice.json").write_bytes(b"{}")
    assert fitted(choosy(), checkpoint=tmp_path / "state.pt").config.choices is None


# Augmentation and precision


@pytest.mark.parametrize(("loss", "epochs", "crop"), [(0.9, 30, 0.6), (1.1, 30, 1.0), (None, 30, 1.0), (0.9, 9, 1.0)])
def test_crops_are_added_to_long_trainings_if_a_short_run_with_them_is_as_good(loss, epochs, crop, monkeypatch):
    def reached(self, config):
        if config.augmentation.crop == 1.0:
            return Evaluation(1.0, 0.5, 24)
        return None if loss is None else Evaluation(loss, 0.5, 24)

    monkeypatch.setattr(choosing._Chooser, "_reached", reached)
    config = choosy(epochs=epochs, choices=Choices(augmentation=True), augmentation=Augment(shift=0.05))
    assert settled(config).augmentation == Augment(shift=0.05, flip=True, crop=crop)
    assert settled(replace(config, choices=Choices())).augmentation == Augment(shift=0.05)


@pytest.mark.parametrize(("seconds", "loss", "taken"), [(0.5, 1.0, "bf16"), (0.5, 1.5, "no"), (0.95, 1.0, "no")])
def test_bfloat16_is_taken_where_it_is_faster_and_as_good(seconds, loss, taken, monkeypatch):
    def is_half(config):
        return config.mixed_precision == "bf16"

    def reached(self, config):
        return Evaluation(loss if is_half(config) else 1.0, 0.5, 24)

    monkeypatch.setattr(choosing, "_has_bfloat16", lambda _: True)
    monkeypatch.setattr(choosing._Chooser, "_reached", reached)
    monkeypatch.setattr(choosing._Chooser, "_seconds", lambda _, config: seconds if is_half(config) else 1.0)
    assert settled(choosy(choices=Choices(precision=True))).mixed_precision == taken
    assert settled(choosy(choices=Choices(precision=False))).mixed_precision == "no"


def test_choices_that_make_no_sense_are_refused_all_at_once():
    with pytest.raises(ConfigError) as error:
        Choices(spread=1.0, cost=0.0, held_out=0.9)
    assert len(error.value.faults) == 3


def test_halves_are_what_they_say():
    halves = divide(tiny_model(), Images(IMAGES, val=IMAGES), choosy(), Session())
    assert isinstance(halves, Halves)
    assert halves.proper.val is IMAGES
    assert halves.short.val is None


SPEC = InputSpec((16, 16), (0.5,) * 3, (0.25,) * 3)


def images(pixels: np.ndarray, labels: np.ndarray) -> ArrayImages:
    return ArrayImages(pixels.clip(0, 255).astype(np.uint8), labels)


def test_colours_may_be_mirrored():
    assert may_be_mirrored(tiny_images(120), SPEC)


def test_digits_stay_upright():
    assert not may_be_mirrored(demo_data().train, InputSpec((32, 32), (0.5,), (0.25,)))


@pytest.mark.parametrize("is_swapped", [True, False])
def test_classes_that_are_mirror_images_of_one_another_stay_as_they_are(is_swapped):
    rng, labels = np.random.default_rng(0), np.arange(120) % 2
    pixels = rng.normal(100, 30, (120, 16, 16, 3))
    pixels[labels == 0, :, :5] += 60
    pixels[labels == 1, :, -5 if is_swapped else 0 :] += 60 if is_swapped else -60
    assert may_be_mirrored(images(pixels, labels), SPEC) is not is_swapped


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(10, 80))
def test_images_that_lie_either_way_as_often_are_hardly_ever_left_upright(seed, classes, count):
    rng, labels = np.random.default_rng(seed), np.arange(count) % classes
    pattern = rng.normal(0, 40, (classes, 16, 16, 3))[labels]
    either = rng.random(count) < 0.5
    pattern[either] = pattern[either][:, :, ::-1]
    pixels = np.concatenate([pattern, pattern[:, :, ::-1]]) + rng.normal(128, 40, (2 * count, 16, 16, 3))
    assert may_be_mirrored(images(pixels, np.concatenate([labels, labels])), SPEC)
