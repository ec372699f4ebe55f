"""Laws of the training loop."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import timm
import torch
from networks import NETWORKS
from tiny import differing, tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import basisprune.training.loop
from basisprune.basis.layers import basis_pairs
from basisprune.basis.split import decompose
from basisprune.data import ArrayImages, Augment
from basisprune.errors import ConfigError, DataError, MissingExtraError, ModelError, TrainingError
from basisprune.training.config import TrainConfig, learning_rate
from basisprune.training.loop import classes_of, evaluate, fit, make_accelerator, project_scales, set_trainable
from basisprune.training.progress import TrainingProgress
from basisprune.types import InputSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model: nn.Module | None = None, **settings) -> nn.Module:
    return fit(model or tiny_decomposed(), tiny_images(), None, tiny_training(**settings)).model


# What is trained


def test_norms_scales_and_classifier_are_trained_and_nothing_else():
    model = tiny_decomposed()
    chosen = set_trainable(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {
        *(f"backbone.{i}.scaling.scale" for i in (0, 3)),
        *(f"backbone.{i}.{part}" for i in (1, 4) for part in ("weight", "bias")),
        "classifier.weight",
        "classifier.bias",
    }
    assert {id(parameter) for parameter in chosen} == {id(model.get_parameter(name)) for name in names}
    statistics = {f"backbone.{i}.{s}" for i in (1, 4) for s in ("running_mean", "running_var", "num_batches_tracked")}
    assert differing(trained(model), model) == names | statistics


def test_frozen_scales_stay_as_they_are_and_all_else_is_trained():
    model = tiny_decomposed()
    next(iter(basis_pairs(model).values())).scaling.scale.data[0] = -0.1  # nor are they projected
    changed = differing(trained(model, train_scales=False), model)
    assert not any("scale" in name for name in changed)
    assert {"backbone.1.weight", "classifier.weight"} <= changed


def test_a_classifier_that_is_a_pair_has_frozen_scales_too():
    model = decompose(NETWORKS["plain"]()[0], linear=True)
    every, rest = set_trainable(model), set_trainable(model, scales=False)
    scales = [pair.scaling.scale for pair in basis_pairs(model).values()]
    assert len(every) == len(rest) + len(scales)
    assert not any(scale.requires_grad for scale in scales)
    assert model[-1].basis.weight.requires_grad


def test_fixed_statistics_stay_as_they_are():
    model = tiny_decomposed()
    changed = differing(trained(model, norm_statistics="fixed"), model)
    assert "backbone.1.weight" in changed
    assert not any("running" in name or "tracked" in name for name in changed)


@pytest.mark.parametrize("network", [name for name, table in NETWORKS.items() if len(table.shape) == 4])
def test_in_a_bare_network_the_last_linear_layer_is_the_classifier(network):
    model, _ = NETWORKS[network]()
    for linear in (False, True):
        decomposed = decompose(model, linear=linear)
        set_trainable(decomposed)
        assert classes_of(decomposed) == 4
        last = list(decomposed.named_parameters())[-1]
        assert last[1].requires_grad


def test_timms_classifier_is_found_and_a_network_without_one_is_refused():
    model = timm.create_model("resnet10t", num_classes=7)
    set_trainable(model)
    assert classes_of(model) == 7
    assert model.fc.weight.requires_grad
    assert not model.layer1[0].conv1.weight.requires_grad
    with pytest.raises(ModelError, match="has no linear classifier"):
        classes_of(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_a_classifier_of_several_layers_gives_the_classes_of_its_last():
    model = nn.Module()
    model.classifier = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5))
    assert classes_of(model) == 5


def test_scales_never_become_negative():
    model = tiny_decomposed()
    for pair in basis_pairs(model).values():
        nn.init.constant_(pair.scaling.scale, 1e-3)
    result = trained(model, lr=0.5)
    scales = torch.cat([pair.scaling.scale for pair in basis_pairs(result).values()])
    assert scales.min() == 0
    assert scales.max() > 0


def test_projection_sets_negative_scales_to_zero_and_leaves_the_others():
    model = tiny_decomposed()
    scale = basis_pairs(model)["backbone.0"].scaling.scale
    scale.data[:3] = torch.tensor([-1.0, -1e-9, 2.0])
    project_scales(model)
    assert scale[:4].tolist() == pytest.approx([0, 0, 2, 0.8])
    project_scales(nn.ReLU())


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
    loader = DataLoader(TensorDataset(images, labels), batch_size=5, shuffle=True)
    config = tiny_training(prepared=True)
    results = [fit(tiny_decomposed(), loader, loader, config) for _ in range(2)]
    assert not differing(results[0].model, results[1].model)
    assert results[0].history == results[1].history
    assert evaluate(results[0].model, loader, prepared=True).count == 20


def test_bfloat16_trains_and_leaves_an_ordinary_model():
    plain = trained()
    result = trained(mixed_precision="bf16")
    assert differing(result, plain)
    assert {value.dtype for value in result.parameters()} == {torch.float32}
    assert "forward" not in vars(result)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(copy.deepcopy(result)(x), result(x))
    assert not differing(trained(), plain)  # and the next run is in full precision again


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch):
    def lacking(**_settings):
        raise ValueError("fp16 mixed precision requires another device")

    monkeypatch.setattr(basisprune.training.loop, "Accelerator", lacking)
    with pytest.raises(ConfigError, match=r"mixed_precision: 'fp16' given; .* requires another device"):
        trained(mixed_precision="fp16")


def test_evaluate_counts_every_image_once_and_changes_nothing():
    model = tiny_decomposed().train()
    before = copy.deepcopy(model)
    images = tiny_images(50)
    results = [evaluate(model, images, batch_size=size) for size in (1, 7, 16, 50, 64)]
    assert {result.count for result in results} == {50}
    assert len({result.accuracy for result in results}) == 1
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 5, rel=1e-5)
    assert not differing(model, before)
    assert all(module.training for module in model.modules())


def test_the_accuracy_is_the_fraction_that_is_right():
    model = tiny_model()
    nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([0.0, 1.0, 0.0])
    result = evaluate(model, tiny_images(48))
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.loss == pytest.approx(math.log(2 + math.e) - 1 / 3, rel=1e-5)


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(TrainingError, match="does not say how its images are prepared"):
        fit(NETWORKS["plain"]()[0], tiny_images(), None, tiny_training())
    empty = DataLoader(TensorDataset(torch.zeros(0, 3, 16, 16), torch.zeros(0).long()))
    with pytest.raises(DataError, match="the training data holds no batch"):
        fit(tiny_decomposed(), empty, None, tiny_training())
    with pytest.raises(DataError, match="the data holds no image"):
        evaluate(tiny_decomposed(), empty)


def test_any_network_with_an_input_spec_can_be_trained():
    model, _ = NETWORKS["residual"](dtype=torch.float32)
    model.input_spec = InputSpec((16, 16), (0.5,) * 3, (0.5,) * 3)
    assert fit(decompose(model), tiny_images(), tiny_images(9), tiny_training(epochs=1)).history[0].val_loss > 0


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
    result = fit(model, tiny_images(), None, tiny_training(**settings), teacher=model)
    assert result.history[-1].train_loss == pytest.approx(0, abs=1e-6)
    changed = differing(result.model, model)
    for key in changed:
        torch.testing.assert_close(result.model.state_dict()[key], model.state_dict()[key], rtol=0, atol=1e-5)


def test_the_loss_is_that_of_the_labels_and_that_of_the_softened_teacher_by_weight():
    model, teacher = without_dropout(), tiny_model(1)
    images = torch.randn(7, 3, 16, 16)
    labels = torch.arange(7) % 3
    config = tiny_training(
        distill=0.3, distill_temperature=4.0, prepared=True, norm_statistics="fixed", epochs=1, label_smoothing=0.1
    )
    history = fit(model, TensorDataset(images, labels), None, config, teacher=teacher).history
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
    student = fit(tiny_decomposed(1), wrong, None, config, teacher=teacher.train()).model
    assert evaluate(student, tiny_images(30, seed=1)).accuracy == 1
    assert not differing(teacher, before)
    assert all(module.training for module in teacher.modules())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_that_has_no_weight_is_not_asked():
    class Silent(nn.Module):
        def forward(self, x):
            raise AssertionError("asked")

    taught = fit(tiny_decomposed(), tiny_images(), None, tiny_training(), teacher=Silent()).model
    assert not differing(taught, trained())


def test_a_run_with_a_teacher_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path):
    config = tiny_training(epochs=4, distill=0.5, augmentation=Augment(shift=0.1, flip=True))
    runs = []
    for name, stops in (("whole", [9]), ("parts", [1, 3, 9])):
        for count in stops:
            result = fit(
                tiny_decomposed(), tiny_images(), tiny_images(9), config, checkpoint=tmp_path / name,
                teacher=tiny_model(1), stop=lambda history, count=count: len(history) >= count,
            )  # fmt: skip
        runs.append(result)
    assert not differing(runs[0].model, runs[1].model)
    assert runs[0].history == runs[1].history
    assert len(runs[0].history) == 4
    assert differing(runs[0].model, trained(epochs=4, augmentation=config.augmentation))


def test_a_teacher_that_is_missing_or_does_not_fit_is_refused():
    def taught_by(teacher):
        return fit(tiny_decomposed(), tiny_images(), None, tiny_training(distill=0.5), teacher=teacher)

    with pytest.raises(ConfigError, match=r"distill: 0\.5 given, but no teacher; pass fit\(\.\.\., teacher=\)"):
        taught_by(None)
    with pytest.raises(ConfigError, match=r"teacher: puts out \(16, 9\) where the model puts out \(16, 3\)"):
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


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tracker, monkeypatch):
    monkeypatch.setattr(basisprune.training.loop, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"basisprune\[{tracker}\]"):
        make_accelerator(TrainConfig(tracker=tracker))


def test_the_progress_bar_shows_loss_accuracy_and_speed(capsys):
    fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=2), progress=True)
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "6/6" in shown
    assert all(word in shown for word in ("loss", "accuracy", "images/s"))


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=1))
    assert capsys.readouterr().err == ""


def test_the_bar_counts_on_from_where_a_run_was_resumed():
    model_loss = basisprune.training.loop.MeanMetric()
    model_loss.update(1.0)
    with TrainingProgress(4, 5, show=True) as bar:
        for epoch in (2, 3):
            for step in range(5):
                bar.step(epoch, 8, model_loss, model_loss)
                assert bar.progress.tasks[0].completed == 5 * epoch + step + 1
    assert np.isclose(bar.progress.tasks[0].percentage, 100)
