"""Laws of the settings of a training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.training.config import TrainConfig, learning_rate, weights_ramp

WRONG = [
    ({"epochs": 0}, "epochs: 0 given, at least 1 is needed"),
    ({"batch_size": -1}, "batch_size: -1 given"),
    ({"lr": 0}, "lr: 0 given, it must be positive"),
    ({"lr": math.nan}, "lr: nan given"),
    ({"lr": math.inf}, "lr: inf given"),
    ({"min_lr": 0.2}, r"min_lr: 0.2 given, allowed is 0 to lr \(0.1\)"),
    ({"warmup": 1.0}, "warmup: 1.0 given, allowed is 0 <= value < 1"),
    ({"momentum": -0.1}, "momentum: -0.1 given"),
    ({"label_smoothing": 1.5}, "label_smoothing: 1.5 given"),
    ({"distill": -0.1}, "distill: -0.1 given, allowed is 0 to 1"),
    ({"distill": 1.1}, "distill: 1.1 given, allowed is 0 to 1"),
    ({"distill_temperature": 0}, "distill_temperature: 0 given, it must be positive"),
    ({"distill_temperature": math.nan}, "distill_temperature: nan given"),
    ({"weight_decay": -1.0}, "weight_decay: -1.0 given"),
    ({"workers": -2}, "workers: -2 given"),
    ({"optimizer": "adam"}, "optimizer: 'adam' given, allowed are 'sgd', 'adamw'"),
    ({"norm_statistics": "frozen"}, "norm_statistics: 'frozen' given, allowed are 'batch', 'fixed'"),
    ({"mixed_precision": "fp8"}, "mixed_precision: 'fp8' given"),
    ({"tracker": "comet"}, "tracker: 'comet' given, allowed are None, 'tensorboard', 'mlflow', 'wandb'"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_wrong_setting_is_named_with_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=f"^TrainConfig: {message}"):
        TrainConfig(**settings)


def test_all_faults_are_listed_at_once():
    with pytest.raises(ConfigError, match="4 faults"):
        TrainConfig(epochs=0, lr=-1, optimizer="adam", warmup=2)


def test_all_faults_of_the_settings_are_listed_at_once():
    wrong = {"epochs": 0, "train": "some", "weight_lr": 0.0, "head_first": 1.0, "clip_norm": -1.0, "optimizer": "adam"}
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**wrong)
    assert all(f"\n  - {name}: {value!r} given" in str(caught.value) for name, value in wrong.items())
    assert "6 faults" in str(caught.value)


def test_patience_is_a_positive_number():
    with pytest.raises(ConfigError, match="patience: 0 given, at least 1 is needed"):
        TrainConfig(patience=0)


@pytest.mark.parametrize("name", ["lr", "weight_lr", "clip_norm", "distill_temperature"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_that_must_be_positive_is_named(name, value):
    with pytest.raises(ConfigError, match=rf"TrainConfig: {name}: .* given, it must be positive"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize("warmup", [0.0, 1e-5, 0.2])
def test_the_learning_rate_warms_up_and_then_falls_along_half_a_cosine(warmup):
    config = TrainConfig(lr=0.1, min_lr=1e-3, warmup=warmup)
    rates = [learning_rate(config, step / 1000) for step in range(1001)]
    top = int(warmup * 1000)
    assert max(rates) == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(1e-3)
    assert all(earlier >= later for earlier, later in zip(rates[top:], rates[top + 1 :], strict=False))
    assert learning_rate(config, (1 + warmup) / 2) == pytest.approx((0.1 + 1e-3) / 2)
    if warmup == 0.2:
        assert learning_rate(config, 0.1) == pytest.approx(0.05)
        assert 0 < rates[0] < rates[2]


@given(head_first=st.floats(0, 0.9), warmup=st.floats(0, 0.9), done=st.floats(0, 1), later=st.floats(0, 1))
def test_weights_wait_for_the_classifier_and_then_rise_to_their_whole_rate(head_first, warmup, done, later):
    config = TrainConfig(train="all", head_first=head_first, warmup=warmup)
    ramp = weights_ramp(config, done)
    assert (ramp == 0) == (done < head_first)
    assert ramp <= weights_ramp(config, max(done, later)) <= 1
    if done >= head_first + warmup + 1e-3:
        assert ramp == 1
