"""Laws of the training loop."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from networks import NETWORKS
from timm.layers import DropPath
from tiny import differing, tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import StochasticDepth

import basisprune.training.trainer
from basisprune.basis.decompose import decompose
from basisprune.data import ArrayImages, Augment, WrappedDataset, blend
from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.tasks import regression
from basisprune.training.config import learning_rate
from basisprune.training.evaluation import Evaluation, evaluate
from basisprune.training.lessons import Session
from basisprune.training.loop import fit
from basisprune.types import InputSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model: nn.Module | None = None, **settings) -> nn.Module:
    return fit(model or tiny_decomposed(), tiny_images(), None, tiny_training(**settings)).model


# The loop


def test_training_learns_the_tiny_task_with_either_optimizer():
    held_out = tiny_images(30, seed=1)
    for settings in ({"optimizer": "sgd"}, {"optimizer": "adamw", "lr": 0.02, "norm_statistics": "fixed"}):
        result = fit(tiny_decomposed(), tiny_images(), held_out, tiny_training(epochs=8, **settings))
        assert result.history[-1].val_accuracy == 1
        assert result.history[-1].train_loss < result.history[0].train_loss
        assert [record.epoch for record in result.history] == list(range(8))
        assert evaluate(result.model, held_out).accuracy == 1


def test_the_input_model_is_untouched_unless_in_place():
    model = tiny_decomposed()
    before = copy.deepcopy(model)
    result = trained(model)
    assert not differing(model, before)
    assert not result.training
    again = fit(model, tiny_images(), None, tiny_training(), inplace=True)
    assert again.model is model
    assert not differing(model, result)


def test_the_same_seed_gives_the_same_weights_and_another_gives_others():
    augmentation = Augment(shift=0.1, flip=True, rotation=5.0)
    torch.manual_seed(1)
    one = trained(augmentation=augmentation)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    two = trained(augmentation=augmentation)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not differing(one, two)
    assert differing(one, trained(augmentation=augmentation, seed=1))


def test_the_rates_of_a_run_are_those_of_the_schedule():
    history = fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=2)).history
    config = tiny_training(epochs=2)
    assert [record.learning_rate for record in history] == [learning_rate(config, s / 6) for s in (2, 5)]


def test_label_smoothing_and_weight_decay_change_the_outcome():
    plain = trained()
    assert differing(plain, trained(label_smoothing=0.1))
    assert differing(plain, trained(weight_decay=0.1))


def test_prepared_images_in_a_loader_of_the_user_can_be_trained_on():
    images, labels = torch.randn(20, 3, 16, 16), torch.arange(20) % 3
    loader = DataLoader(WrappedDataset(TensorDataset(images, labels), prepared=True), batch_size=5, shuffle=True)
    config = tiny_training()
    results = [fit(tiny_decomposed(), loader, loader, config) for _ in range(2)]
    assert not differing(results[0].model, results[1].model)
    assert results[0].history == results[1].history
    assert evaluate(results[0].model, loader).count == 20


def test_bfloat16_trains_and_leaves_an_ordinary_model():
    plain = trained()
    result = trained(mixed_precision="bf16")
    assert differing(result, plain)
    assert {value.dtype for value in result.parameters()} == {torch.float32}
    assert "forward" not in vars(result)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(copy.deepcopy(result)(x), result(x))
    assert not differing(trained(), plain)  # and the next run is in full precision again


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(TrainingError, match="does not say how its images are prepared"):
        fit(NETWORKS["plain"](dtype=torch.float32)[0], tiny_images(), None, tiny_training())
    empty = DataLoader(TensorDataset(torch.zeros(0, 3, 16, 16), torch.zeros(0).long()))
    with pytest.raises(DataError, match="the training data contains no batches"):
        fit(tiny_decomposed(), empty, None, tiny_training())
    with pytest.raises(DataError, match="the data contains no images"):
        evaluate(tiny_decomposed(), empty)


def with_three_kinds_of_dropout(rate: float) -> nn.Module:
    model = tiny_model()
    model.dropout.p = rate
    model.backbone.add_module("depth", nn.Sequential(StochasticDepth(rate, "row"), DropPath(rate)))
    return model


def test_training_without_dropout_drops_nothing_and_leaves_the_rates_as_they_were():
    config, results = tiny_training(dropout=False), []
    for rate in (0.5, 0.0):
        model = with_three_kinds_of_dropout(rate)
        results.append(fit(model, tiny_images(), None, config).model)
        depth, path = results[-1].backbone.depth
        assert (results[-1].dropout.p, depth.p, path.drop_prob) == (rate, rate, rate)
    assert differing(*results) == set()
    with_dropout = fit(with_three_kinds_of_dropout(0.5), tiny_images(), None, tiny_training()).model
    assert differing(with_dropout, results[0])


def test_any_network_with_an_input_spec_can_be_trained():
    model, _ = NETWORKS["residual"](dtype=torch.float32)
    model.input_spec = InputSpec((16, 16), (0.5,) * 3, (0.5,) * 3)
    assert fit(decompose(model), tiny_images(), tiny_images(9), tiny_training(epochs=1)).history[0].val_loss > 0


# All weights


def stopped_after(passes: int, **settings) -> nn.Module:
    config = tiny_training(**settings)
    return fit(
        tiny_decomposed(), tiny_images(), None, config, session=Session(stop=lambda past: len(past) >= passes)
    ).model


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_until_the_weights_join_a_training_is_that_of_the_method(optimizer):
    settings = {"epochs": 4, "optimizer": optimizer, "weight_decay": 0.1}
    expected = stopped_after(2, **settings)
    result = stopped_after(2, train="all", head_first=0.5, **settings)
    assert not differing(result, expected)
    assert all(parameter.requires_grad for parameter in result.parameters())
    assert "backbone.0.basis.weight" in differing(stopped_after(3, train="all", head_first=0.5, **settings), expected)


@pytest.mark.parametrize("train", ["method", "all"])
def test_gradients_are_clipped_to_their_norm(train):
    settings = {"epochs": 1, "batch_size": 48, "lr": 0.5, "weight_lr": 1.0, "train": train, "momentum": 0.0}
    model = without_dropout()
    moved = [
        torch.cat([(new - old).flatten() for new, old in zip(result.parameters(), model.parameters(), strict=True)])
        for result in (trained(model, **settings), trained(model, clip_norm=0.01, **settings))
    ]
    assert moved[0].norm() > 0.5 * 0.01
    assert moved[1].norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)
    torch.testing.assert_close(moved[1], moved[0] * moved[1].norm() / moved[0].norm(), rtol=1e-2, atol=1e-6)


def test_all_weights_learn_the_tiny_task_and_leave_less_loss_than_the_method_alone():
    settings = {"epochs": 6, "optimizer": "adamw", "lr": 0.01, "norm_statistics": "fixed"}
    losses = [
        fit(tiny_decomposed(), tiny_images(), None, tiny_training(train=train, **settings)).history[-1].train_loss
        for train in ("method", "all")
    ]
    assert losses[1] < losses[0]


# Blended images


def test_blended_images_have_the_loss_of_their_shares(monkeypatch):
    model = without_dropout()
    images, labels = torch.randn(7, 3, 16, 16), torch.arange(7) % 3
    seen = []

    def spy(*args, **kwargs):
        seen.append(blend(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(basisprune.training.lessons, "blend", spy)
    augmentation = Augment(mixup=1.0, cutmix=1.0)
    config = tiny_training(epochs=1, norm_statistics="fixed", label_smoothing=0.1, augmentation=augmentation)
    record = fit(model, WrappedDataset(TensorDataset(images, labels), prepared=True), None, config).history[0]
    ((blended, shares),) = seen
    with torch.no_grad():
        said = model.eval()(blended)
    expected = nn.functional.cross_entropy(said, shares, label_smoothing=0.1)
    assert record.train_loss == pytest.approx(expected.item(), rel=1e-5)
    assert record.train_accuracy == pytest.approx((said.argmax(1) == shares.argmax(1)).float().mean().item())


def test_teacher_and_student_see_the_same_augmented_and_blended_images():
    class Seeing(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network, self.classifier, self.input_spec = network, network.classifier, network.input_spec
            self.seen = []

        def forward(self, x):
            self.seen.append(x.clone())
            return self.network(x)

    student, teacher = Seeing(tiny_decomposed()), Seeing(tiny_model(1))
    augmentation = Augment(shift=0.1, flip=True, rotation=9.0, crop=0.5, colour=0.3, policy="trivial", mixup=0.3)
    config = tiny_training(epochs=2, distill=0.5, augmentation=augmentation)
    fit(student, tiny_images(), None, config, session=Session(teacher), inplace=True)
    assert len(student.seen) == len(teacher.seen) == 6
    assert all(torch.equal(one, other) for one, other in zip(student.seen, teacher.seen, strict=True))
    assert not torch.equal(student.seen[0], student.seen[3])


def test_a_student_that_equals_its_teacher_learns_nothing_from_blended_images_either():
    model = without_dropout()
    config = tiny_training(distill=1.0, norm_statistics="fixed", channels_last=False, augmentation=Augment(cutmix=1.0))
    result = fit(model, tiny_images(), None, config, session=Session(model))
    assert result.history[-1].train_loss == pytest.approx(0, abs=1e-6)


# Patience


class Judge:
    """Validation accuracies that were decided beforehand, and the weights that got each."""

    def __init__(self, accuracies, monkeypatch):
        self.accuracies, self.weights = accuracies, []
        monkeypatch.setattr(basisprune.training.trainer, "evaluate", self.judged)

    def judged(self, model, data, **_settings):
        self.weights.append(copy.deepcopy(model))
        return Evaluation(1.0, self.accuracies[len(self.weights) - 1], 9)


@pytest.mark.parametrize(
    ("accuracies", "patience", "epochs", "best"),
    [
        ([0.5, 0.4, 0.4, 0.9], 2, 3, 0),
        ([0.5, 0.4, 0.6, 0.5], 2, 4, 2),
        ([0.5, 0.5, 0.5, 0.5], 1, 2, 0),
        ([0.1, 0.2, 0.3, 0.4], 1, 4, 3),
        ([0.5, 0.4, 0.3, 0.2], 9, 4, 0),
    ],
)
def test_a_training_out_of_patience_ends_and_keeps_its_best_weights(accuracies, patience, epochs, best, monkeypatch):
    judge = Judge(accuracies, monkeypatch)
    config = tiny_training(epochs=4, patience=patience)
    result = fit(tiny_decomposed(), tiny_images(), tiny_images(9), config)
    assert [record.val_accuracy for record in result.history] == accuracies[:epochs]
    assert not differing(result.model, judge.weights[best])
    assert not result.model.training


def test_patience_that_never_ends_changes_nothing_on_the_way(monkeypatch):
    judge = Judge([0.1, 0.2, 0.3], monkeypatch)
    result = fit(tiny_decomposed(), tiny_images(), tiny_images(9), tiny_training(patience=3))
    assert not differing(result.model, trained())
    assert len(judge.weights) == 3


def test_patience_without_validation_images_is_refused():
    with pytest.raises(ConfigError, match="patience: 2 given, but no validation images to judge by"):
        trained(patience=2)


# A teacher


def without_dropout() -> nn.Module:
    model = tiny_decomposed()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it():
    model = without_dropout()
    settings = {"distill": 1.0, "norm_statistics": "fixed", "channels_last": False}
    result = fit(model, tiny_images(), None, tiny_training(**settings), session=Session(model))
    assert result.history[-1].train_loss == pytest.approx(0, abs=1e-6)
    changed = differing(result.model, model)
    for key in changed:
        torch.testing.assert_close(result.model.state_dict()[key], model.state_dict()[key], rtol=0, atol=1e-5)


def test_the_loss_is_that_of_the_labels_and_that_of_the_softened_teacher_by_weight():
    model, teacher = without_dropout(), tiny_model(1)
    images = torch.randn(7, 3, 16, 16)
    labels = torch.arange(7) % 3
    config = tiny_training(distill=0.3, distill_temperature=4.0, norm_statistics="fixed", epochs=1, label_smoothing=0.1)
    data = WrappedDataset(TensorDataset(images, labels), prepared=True)
    history = fit(model, data, None, config, session=Session(teacher)).history
    with torch.no_grad():
        said, taught = model.eval()(images), teacher.eval()(images)
    truth = (taught / 4).softmax(1)
    divergence = (truth * (truth.log() - (said / 4).log_softmax(1))).sum(1).mean()
    expected = 0.7 * nn.functional.cross_entropy(said, labels, label_smoothing=0.1) + 0.3 * 16 * divergence
    assert history[0].train_loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_teacher_without_labels_teaches_its_student_what_it_knows():
    teacher = fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=8)).model
    before = copy.deepcopy(teacher)
    wrong = ArrayImages(tiny_images().images.permute(0, 2, 3, 1), np.zeros(48, dtype=np.int64))
    config = tiny_training(epochs=8, distill=1.0)
    student = fit(tiny_decomposed(1), wrong, None, config, session=Session(teacher.train())).model
    assert evaluate(student, tiny_images(30, seed=1)).accuracy == 1
    assert not differing(teacher, before)
    assert all(module.training for module in teacher.modules())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_that_has_no_weight_is_not_asked():
    class Silent(nn.Module):
        def forward(self, x):
            raise AssertionError("asked")

    taught = fit(tiny_decomposed(), tiny_images(), None, tiny_training(), session=Session(Silent())).model
    assert not differing(taught, trained())


def test_a_run_with_a_teacher_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path):
    config = tiny_training(epochs=4, distill=0.5, augmentation=Augment(shift=0.1, flip=True))
    runs = []
    for name, stops in (("whole", [9]), ("parts", [1, 3, 9])):
        for count in stops:
            result = fit(
                tiny_decomposed(), tiny_images(), tiny_images(9), config, checkpoint=tmp_path / name,
                session=Session(tiny_model(1), lambda history, count=count: len(history) >= count),
            )  # fmt: skip
        runs.append(result)
    assert not differing(runs[0].model, runs[1].model)
    assert runs[0].history == runs[1].history
    assert len(runs[0].history) == 4
    assert differing(runs[0].model, trained(epochs=4, augmentation=config.augmentation))


def test_a_teacher_that_is_missing_or_does_not_fit_is_refused():
    def taught_by(teacher):
        return fit(tiny_decomposed(), tiny_images(), None, tiny_training(distill=0.5), session=Session(teacher))

    with pytest.raises(ConfigError, match=r"distill: 0\.5 given, but no teacher; pass session=Session\(teacher="):
        taught_by(None)
    with pytest.raises(ConfigError, match=r"teacher: outputs \(16, 9\) where the model outputs \(16, 3\)"):
        taught_by(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 9)))
    other = tiny_model()
    other.input_spec = InputSpec((16, 16), (0.1,) * 3, (0.5,) * 3)
    with pytest.raises(ConfigError, match="teacher: it wants images as InputSpec"):
        taught_by(other)


# Trackers and the progress bar


def test_tensorboard_gets_its_files_beside_the_checkpoint(tmp_path):
    config = tiny_training(epochs=2, tracker="tensorboard")
    result = fit(tiny_decomposed(), tiny_images(), tiny_images(9), config, checkpoint=tmp_path / "run.pt")
    assert not differing(result.model, trained(epochs=2))
    assert [file.name for file in tmp_path.rglob("events.out.tfevents*")]


def test_the_progress_bar_shows_loss_accuracy_and_speed(capsys):
    fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=2), progress=True)
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "6/6" in shown
    assert all(word in shown for word in ("loss", "accuracy", "images/s"))


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=1))
    assert capsys.readouterr().err == ""


def test_a_run_on_a_dataset_of_another_task_goes_on_to_the_same_weights(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    network.input_spec = InputSpec.as_it_is((1, 4))
    data = TensorDataset(torch.randn(32, 1, 4), torch.randn(32, 1))
    config, task = tiny_training(epochs=3, train="all", batch_size=4), regression()
    whole = fit(network, data, None, config, session=Session(task=task)).model
    stopped = Session(task=task, stop=lambda history: len(history) == 1)
    fit(network, data, None, config, checkpoint=tmp_path / "state.pt", session=stopped)
    resumed = fit(network, data, None, config, checkpoint=tmp_path / "state.pt", session=Session(task=task)).model
    assert not differing(resumed, whole)
