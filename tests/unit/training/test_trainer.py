"""Laws of the Accelerator that a training gets."""

from __future__ import annotations

import importlib
import sys

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType
from tiny import tiny_decomposed, tiny_images, tiny_model, tiny_training, with_idle_norm

import basisprune.training.trainer
from basisprune.errors import ConfigError, MissingExtraError
from basisprune.torchkit.imports import only_code
from basisprune.torchkit.processes import Processes
from basisprune.training.config import TrainConfig
from basisprune.training.lessons import has_idle_parameters, wrapped
from basisprune.training.loop import fit
from basisprune.training.trainer import make_accelerator, require_tracker


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch):
    def lacking(**_settings):
        raise ValueError("fp16 mixed precision requires another device")

    monkeypatch.setattr(basisprune.training.trainer, "Accelerator", lacking)
    with pytest.raises(ConfigError, match=r"mixed_precision: 'fp16' given; .* requires another device"):
        fit(tiny_decomposed(), tiny_images(), None, tiny_training(mixed_precision="fp16"))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tracker, monkeypatch):
    monkeypatch.setattr(basisprune.training.trainer, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"basisprune\[{tracker}\]"):
        make_accelerator(TrainConfig(tracker=tracker))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_tracker_that_a_file_names_is_not_started(tracker, monkeypatch):
    monkeypatch.setattr(basisprune.training.trainer, "find_spec", lambda name: object())
    with only_code([]), pytest.raises(ConfigError, match=f"'{tracker}' was read from a file.*--trust-code"):
        require_tracker(TrainConfig(tracker=tracker))
    with only_code([]):
        require_tracker(TrainConfig(tracker="tensorboard"))
    require_tracker(TrainConfig(tracker=tracker))


def test_only_a_network_with_parameters_that_take_no_part_has_idle_ones():
    assert has_idle_parameters(with_idle_norm())
    assert not has_idle_parameters(tiny_model())


def test_all_processes_look_for_idle_parameters_if_one_of_them_has_some(monkeypatch):
    class Shared:
        num_processes, ddp_handler = 2, None

        def prepare_model(self, model):
            return model

    shared, others = Shared(), [0]
    monkeypatch.setattr(Processes, "here", lambda: Processes(0, 2))
    monkeypatch.setattr(Processes, "total", lambda _, own: own + others[0])
    wrapped(tiny_model(), shared)
    assert shared.ddp_handler is None
    others[0] = 1
    wrapped(tiny_model(), shared)
    assert shared.ddp_handler.find_unused_parameters


_MLFLOW = """
from types import SimpleNamespace
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
made, params, metrics, ended = [], {}, [], []
def search_experiments(filter_string): return []
def create_experiment(name, artifact_location, tags): made.append(name); return "1"
def start_run(**given): return SimpleNamespace(**given)
def log_params(values): params.update(values)
def log_metrics(values, step): metrics.append((step, values))
def end_run(): ended.append(True)
"""


def test_mlflow_gets_settings_and_the_numbers_of_each_epoch(tmp_path, monkeypatch):
    """With a stand-in that has what Accelerate calls: the package itself is too large for these tests."""
    (tmp_path / "mlflow.py").write_text(_MLFLOW)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.MLFLOW])  # it looks when imported
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    fit(tiny_decomposed(), tiny_images(), tiny_images(9), tiny_training(epochs=2, tracker="mlflow"))
    mlflow = importlib.import_module("mlflow")
    assert mlflow.made == ["basisprune"]
    assert mlflow.params["epochs"] == 2
    assert [step for step, _ in mlflow.metrics] == [1, 2]
    assert all({"train_loss", "val_accuracy"} <= numbers.keys() for _, numbers in mlflow.metrics)
    assert mlflow.ended
    monkeypatch.delitem(sys.modules, "mlflow")
