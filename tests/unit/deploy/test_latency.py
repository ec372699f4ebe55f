"""Laws of latencies: all take turns; how long they take is not asserted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from basisprune.deploy import latency
from basisprune.deploy.export.exportable import GraphInput
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.latency import (
    LatencyReport,
    LayerTimer,
    file_latencies,
    interleaved,
    measure_latency,
    onnx_layer_seconds,
    onnx_session,
    random_images,
    speedup,
)
from basisprune.errors import ConfigError, MissingExtraError
from basisprune.transfer.model import transfer_model
from basisprune.types import InputSpec

SHAPE = (3, 8, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return net().eval()


@pytest.fixture(scope="module")
def session(model: nn.Module) -> Any:
    return onnx_session(model, SHAPE, threads=1)


def test_every_model_is_measured_in_every_setting(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "onnx_session", lambda *_: session)
    models = {"original": net(), "pruned": net()}
    report = measure_latency(models, SHAPE, batch_sizes=(1, 3), backends=("eager", "onnxruntime"), repeats=3)
    settings = [(row.model, row.backend, row.batch_size) for row in report.rows]
    assert len(settings) == len(set(settings)) == 8
    assert all(row.seconds > 0 and row.spread >= 0 for row in report.rows)
    assert report.row("original", "onnxruntime", 3).speedup == 1.0
    assert (report.threads, report.repeats, report.input_shape) == (1, 3, SHAPE)
    assert LatencyReport.from_json(report.to_json()) == report


def test_a_setting_that_was_not_measured_is_a_key_error() -> None:
    report = measure_latency({"a": net()}, SHAPE, batch_sizes=(1,), backends=("eager",), repeats=2)
    with pytest.raises(KeyError):
        report.row("a", "eager", 2)


def test_models_and_threads_are_left_as_they_were() -> None:
    model = net().train()
    before = torch.get_num_threads()
    measure_latency({"a": model}, SHAPE, batch_sizes=(1,), backends=("eager",), threads=2, repeats=2)
    assert model.training
    assert torch.get_num_threads() == before
    weight: Any = model[0].weight  # type: ignore[index]
    assert weight.is_contiguous()


def test_the_session_computes_what_the_model_does_for_any_batch(model: nn.Module, session: Any) -> None:
    for batch in (1, 5):
        images = torch.randn(batch, *SHAPE)
        (given,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        torch.testing.assert_close(torch.from_numpy(given), model(images))


def test_a_missing_onnxruntime_is_met_by_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[onnx\]"):
        measure_latency({"a": net()}, SHAPE)


def test_all_wrong_settings_are_listed() -> None:
    with pytest.raises(ConfigError) as error:
        measure_latency({}, SHAPE, batch_sizes=(0,), backends=("tpu",), threads=0, repeats=1)  # type: ignore[arg-type]
    for setting in ("models", "batch_sizes", "backends: 'tpu'", "threads", "repeats"):
        assert setting in str(error.value)


def test_runs_take_turns() -> None:
    order: list[str] = []
    seconds = interleaved({name: lambda n=name: order.append(n) for name in "ab"}, repeats=2, warmup=1)  # type: ignore[misc]
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_a_turn_may_begin_with_runs_that_are_not_timed() -> None:
    order: list[str] = []
    seconds = interleaved({name: lambda n=name: order.append(n) for name in "ab"}, repeats=1, warmup=0, settle=2)  # type: ignore[misc]
    assert order == ["a"] * 3 + ["b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 1, "b": 1}


def test_the_input_is_by_default_what_the_first_model_wants() -> None:
    model = transfer_model("test_resnet", 3, input_size=32)
    assert measure_latency({"a": model}, batch_sizes=(1,), backends=("eager",), repeats=2).input_shape == (3, 32, 32)
    with pytest.raises(ConfigError, match="input_shape: Sequential does not know it"):
        measure_latency({"a": net()}, backends=("eager",))


def test_every_form_of_every_layer_is_timed_in_onnxruntime() -> None:
    pair = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 4, 1))
    forms = {"a": [nn.Conv2d(3, 4, 3).double(), pair], "b": [nn.ConvTranspose2d(4, 3, 3, stride=2)]}
    seconds = onnx_layer_seconds(forms, {"a": (1, *SHAPE), "b": (2, 4, 5, 5)}, repeats=3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 1}
    assert min(value for values in seconds.values() for value in values) > 0
    assert next(forms["a"][0].parameters()).dtype == torch.float64


def test_a_speedup_is_the_median_of_the_rounds() -> None:
    assert speedup({"a": [2.0, 9.0, 4.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == 4.0


def test_a_layer_that_is_called_twice_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(latency, "stopwatch", lambda: lambda: float(next(ticks)))
    layer = nn.ReLU()
    timer = LayerTimer(nn.Sequential(layer, layer), ["0"])
    timer.run(torch.zeros(1))
    assert timer.seconds("0") == 2.0


@pytest.mark.parametrize(("threads", "clock"), [(1, "cpu"), (2, "wall")])
def test_only_one_thread_is_timed_by_its_cpu_time(threads: int, clock: str) -> None:
    report = measure_latency({"a": net()}, SHAPE, backends=("eager",), threads=threads, repeats=2)
    assert report.clock == clock


@pytest.mark.parametrize(
    ("layout", "shape", "kind"),
    [
        ("NHWC", (2, 4, 6, 3), torch.uint8),
        ("NCHW", (2, 3, 4, 6), torch.uint8),
        (None, (2, 3, 4, 6), torch.float32),
    ],
)
def test_noise_is_what_the_file_takes(layout, shape, kind):
    spec = InputSpec(size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = random_images(GraphInput(spec, layout), 2)
    assert (images.shape, images.dtype) == (shape, kind)


def test_every_file_and_pytorch_are_timed_at_each_batch_size(tiny):
    model, paths = tiny
    files = {str(kind): (ONNX, path) for kind, path in paths.items()}
    rows = file_latencies(files, model, batch_sizes=(1, 4), repeats=3)
    assert [(row.model, row.backend, row.batch_size) for row in rows] == [
        (name, "eager" if name == "PyTorch" else "onnxruntime", size)
        for size in (1, 4)
        for name in ("False", "True", "NCHW", "PyTorch")
    ]
    assert all(row.seconds > 0 and row.spread >= 0 for row in rows)
    assert [row.speedup for row in rows if row.model == "False"] == [1, 1]
