"""A task says what is wrong with it as soon as it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.tasks import Task
from basisprune.torchkit.running import ReadBatch

INPUTS, TARGETS = torch.ones(4, 3), torch.zeros(4, 2)


def task(**changes) -> Task:
    known = {"loss": F.mse_loss, "outcome": lambda said, true: -(said - true).abs().mean(1)}
    return Task("mine", **{**known, **changes})


def test_a_task_lists_all_that_is_wrong_with_it():
    with pytest.raises(ConfigError) as caught:
        Task("", loss=None, outcome=3, metric="f1")
    said = str(caught.value)
    assert "4 faults" in said
    assert "name: ''" in said
    assert "outcome: 3 given; a function is needed" in said
    assert "metric: 'f1' given" in said
    assert "loss, model_loss: exactly one" in said


def test_a_task_is_frozen_and_equal_to_one_of_the_same_functions():
    outcome = F.mse_loss
    assert Task("a", F.mse_loss, outcome) == Task("a", F.mse_loss, outcome)
    with pytest.raises(AttributeError):
        task().name = "other"


def test_a_batch_is_a_pair_or_what_read_makes_of_it():
    assert task().inputs_and_targets([INPUTS, TARGETS]).inputs is INPUTS
    named = task(read=lambda batch: (batch["x"], batch["y"]))
    assert named.inputs_and_targets({"x": INPUTS, "y": TARGETS}).targets is TARGETS
    known = ReadBatch(INPUTS, TARGETS)
    assert named.inputs_and_targets(known) is known  # which was read before


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": INPUTS}, r"a dict given as batch, \(inputs, targets\) is needed"),
        ((INPUTS.long(), TARGETS), r"torch.int64 tensor of shape \(4, 3\) read as inputs"),
        (([1.0], TARGETS), "a list of 1 read as inputs"),
    ],
)
def test_a_batch_that_cannot_be_read_is_refused(batch, said):
    with pytest.raises(DataError, match=said):
        task().inputs_and_targets(batch)


def test_a_read_that_fails_or_returns_something_else_is_named():
    with pytest.raises(DataError, match="read cannot take a batch that is a list"):
        task(read=lambda batch: (batch["x"], batch["y"])).inputs_and_targets([INPUTS, TARGETS])
    with pytest.raises(DataError, match=r"read returned a float|read returned a torch"):
        task(read=lambda batch: batch[0]).inputs_and_targets([INPUTS, TARGETS])


def test_a_loss_must_be_one_number_with_a_gradient():
    model = nn.Linear(3, 2)
    value = task().mean_loss(model, INPUTS, TARGETS)
    assert value.shape == ()
    assert value.requires_grad
    each = task(loss=lambda said, true: F.mse_loss(said, true, reduction="none"))
    with pytest.raises(ConfigError, match=r"the loss is a torch.float32 tensor of shape \(4, 2\); one number"):
        each.mean_loss(model, INPUTS, TARGETS)
    number = task(loss=lambda said, true: F.mse_loss(said, true).item())
    with pytest.raises(ConfigError, match="the loss is a float; one number"):
        number.mean_loss(model, INPUTS, TARGETS)
    cut = task(loss=lambda said, true: F.mse_loss(said.detach(), true))
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        cut.mean_loss(model, INPUTS, TARGETS)
    with torch.no_grad():
        assert cut.mean_loss(model, INPUTS, TARGETS) >= 0  # nobody asks for one


def test_a_network_may_compute_its_loss_itself():
    model = nn.Linear(3, 2)
    own = task(loss=None, model_loss=lambda net, inputs, targets: F.l1_loss(net(inputs), targets))
    assert torch.equal(own.mean_loss(model, INPUTS, TARGETS), F.l1_loss(model(INPUTS), TARGETS))


def test_a_loss_that_changes_the_mode_of_the_network_leaves_it_as_it_was():
    def switching(model, inputs, targets):
        return F.l1_loss(model.train()(inputs), targets)

    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval()
    task(loss=None, model_loss=switching).mean_loss(model, INPUTS, TARGETS)
    assert not any(module.training for module in model.modules())


def test_what_counts_of_an_output_is_said_by_output():
    class Named(nn.Module):
        def forward(self, inputs):
            return {"out": inputs[:, :2]}

    found = task(output=lambda raw: raw["out"], loss=lambda said, true: said.sum() * torch.ones((), requires_grad=True))
    assert found.mean_loss(Named(), INPUTS, TARGETS) == 8


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (lambda said, true: (said - true).abs().mean(), r"outcome returned a torch.float32 tensor of shape \(\)"),
        (lambda said, true: (said - true)[:2], r"shape \(2, 2\) for 4 examples; a tensor \(4, k\)"),
        (lambda said, true: said - true, "outcome returned 2 numbers for each example; without a metric"),
        (lambda said, true: [1, 2, 3, 4], "outcome returned a list of 4"),
    ],
)
def test_rows_must_be_one_for_each_example(outcome, said):
    with pytest.raises(ConfigError, match=said):
        task(outcome=outcome).rows(INPUTS[:, :2], TARGETS, 4)


def test_rows_that_are_not_finite_are_refused():
    with pytest.raises(TrainingError, match="not finite"):
        task().rows(INPUTS[:, :2] / 0, TARGETS, 4)


@pytest.mark.parametrize("bad", [float("nan"), None, "high", [1.0, 2.0]])
def test_a_metric_must_return_a_finite_number(bad):
    with pytest.raises(ConfigError, match=r"the metric score returned .* for 3 examples; it must return a finite"):
        task(metric=lambda rows: bad).value(np.zeros((3, 2)))


def test_without_a_metric_it_is_the_mean_and_the_test_is_said():
    assert task().value(np.array([[1.0], [2.0]])) == 1.5
    assert task().test_name == "Gaffke's test of the examples"
    assert "jackknife" in task(metric=np.mean).test_name


def test_a_loss_in_training_mode_leaves_the_statistics_of_the_network_unless_it_is_trained():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    mine = task(loss=None, model_loss=lambda model, inputs, targets: F.mse_loss(model.train()(inputs), targets))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    mine.mean_loss(network, torch.randn(4, 3), TARGETS).backward()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    mine.mean_loss(network.train(), torch.randn(4, 3), TARGETS)
    assert not torch.equal(network[1].running_mean, before["1.running_mean"])


def test_the_old_name_of_format_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="use Task.format"):
        assert task().shown(0.25) == task().format(0.25) == "0.25"
