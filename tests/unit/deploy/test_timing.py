"""Laws of the times of a network's layers, and of the folder that a device is profiled with."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import NETWORKS
from tables import invented
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import Shift
from basisprune.deploy import device, timing
from basisprune.deploy.fold import fold, merge_shifts
from basisprune.deploy.timing import (
    SCRIPT,
    Wanted,
    cache_folder,
    channel_axes,
    measured_table,
    read_table,
    refuse_other_table,
    table_milliseconds,
    time_network,
    wanted_shapes,
    write_layer_models,
)
from basisprune.errors import ConfigError, PlanError
from basisprune.layer_times import LayerShape, TimeTable
from basisprune.pruning import prune_basis
from basisprune.types import BasisPlan, LayerPlan


@pytest.mark.parametrize("network", ["plain", "residual", "concat", "grouped", "depthwise", "dilated", "used_twice"])
def test_a_table_for_the_network_knows_its_layers_decomposed_or_not(network):
    model, x = NETWORKS[network]()
    shape = tuple(x.shape[1:])
    table = invented(wanted_shapes(model, shape))
    for one in (model, decompose(model, scale_init=1.0)):
        times = time_network(one, shape, table)
        convs = [name for name, layer in one.named_modules() if isinstance(layer, nn.Conv2d)]
        assert set(convs) <= times.layers.keys()
    assert table_milliseconds(model, shape, table) > 0


def test_a_table_for_the_network_knows_what_is_left_of_a_branch_that_went():
    """No norm can take the shift in: it stays as a 1x1 depthwise conv."""
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(1, 3, 6, 6)
    rest = merge_shifts(nn.Sequential(conv, Shift(torch.ones(8))).eval(), (x,))
    assert isinstance(rest[1], nn.Conv2d)
    table = invented(wanted_shapes(nn.Sequential(conv), (3, 6, 6)))
    assert table_milliseconds(rest, (3, 6, 6), table) > table_milliseconds(nn.Sequential(conv), (3, 6, 6), table)


def test_norms_count_only_where_no_conv_takes_them_in():
    model, x = NETWORKS["concat"]()
    shape = tuple(x.shape[1:])
    kinds = {
        name: calls[0].kind
        for name, calls in time_network(model, shape, invented(wanted_shapes(model, shape))).layers.items()
    }
    assert kinds["norm2"] == "norm"
    plain, x = NETWORKS["plain"]()
    shape = tuple(x.shape[1:])
    assert "norm" not in {key.kind for key in wanted_shapes(plain, shape)}


def test_a_table_for_another_size_is_refused_with_all_layers_that_are_missing():
    model, x = NETWORKS["plain"]()
    channels, height, width = x.shape[1:]
    table = invented(wanted_shapes(model, (channels, 2 * height, 2 * width)))
    with pytest.raises(PlanError, match="another network or input size; profile it again") as caught:
        time_network(model, (channels, height, width), table)
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(("penalty", "kind"), [(0.0, nn.Sequential), (1.0, nn.Conv2d)])
def test_the_fold_takes_the_form_that_is_faster_on_the_device(penalty, kind):
    torch.manual_seed(0)
    whole = decompose(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), scale_init=1.0).double().eval()
    model = prune_basis(whole, BasisPlan({"0": LayerPlan((0, 1, 2, 3), 8)}, 0.5))
    x = torch.randn(1, 8, 6, 6, dtype=torch.float64)
    table = invented(wanted_shapes(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), (8, 6, 6)), pair_penalty=penalty)
    folded = fold(model, x, "latency", times=table)
    assert type(folded[0]) is kind
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="for prefer='latency'"):
        fold(model, x, "macs", times=table)


def test_a_measurement_is_kept_and_a_damaged_one_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = NETWORKS["plain"]()
    shapes, made = wanted_shapes(model, tuple(x.shape[1:])), []
    monkeypatch.setattr(timing, "profile_here", lambda shapes, **_: made.append(1) or invented(shapes))
    first = measured_table(shapes)
    assert measured_table(shapes) == first
    assert len(made) == 1
    assert cache_folder() == tmp_path / "basisprune"
    (path,) = cache_folder().glob("times-*.json")
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(bytes(content))
    assert measured_table(shapes) == first
    assert len(made) == 2
    measured_table(shapes, threads=2)
    monkeypatch.setattr(timing.device, "device_name", lambda: "another device")
    measured_table(shapes)
    assert len(made) == 4


def test_a_cache_that_cannot_be_used_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "basisprune").write_text("a file, where the folder should be")
    monkeypatch.setattr(timing, "cache_folder", lambda: tmp_path / "basisprune")
    monkeypatch.setattr(timing, "profile_here", lambda shapes, **_: invented(shapes))
    model, x = NETWORKS["plain"]()
    shapes = wanted_shapes(model, tuple(x.shape[1:]))
    assert measured_table(shapes) == invented(shapes)


def test_a_table_that_does_not_know_the_decomposed_layers_is_refused():
    model, x = NETWORKS["plain"]()
    shape = tuple(x.shape[1:])
    table = invented(wanted_shapes(model, shape))
    refuse_other_table(model, shape, table)
    own = {each for calls in time_network(model, shape, table).layers.values() for each in calls}
    without = replace(table, shapes=tuple(times for times in table.shapes if times.shape in own))
    time_network(model, shape, without)
    with pytest.raises(PlanError, match="another network or input size; profile it again"):
        refuse_other_table(model, shape, without)


def test_device_files_that_are_none_are_refused(tmp_path):
    model, x = NETWORKS["plain"]()
    table = invented(wanted_shapes(model, tuple(x.shape[1:])))
    path = tmp_path / "device.json"
    path.write_text(table.to_json())
    assert read_table(path) == table
    texts = {
        "": "Invalid JSON",
        table.to_json()[:-40]: "Invalid JSON",
        table.to_json().replace("onnxruntime", "tensorrt"): "allowed is onnxruntime",
        table.to_json().replace('"block":4', '"block":"four"'): "block",
        "[]": "not a table of times",
    }
    for text, fault in texts.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=fault):
            read_table(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_table(tmp_path / "none.json")


def test_what_a_network_takes_is_the_sum_of_its_layers():
    model, x = NETWORKS["plain"]()
    shape = tuple(x.shape[1:])
    shapes = wanted_shapes(model, shape)
    table = invented(shapes)
    convs = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    times = time_network(model, shape, table)
    expected = sum(
        float(table.seconds(calls[0], conv.in_channels, conv.out_channels))
        for calls, conv in zip(times.layers.values(), convs, strict=True)
    )
    assert np.isclose(table_milliseconds(model, shape, table), 1000 * expected)
    doubled = [replace(each, seconds=tuple(tuple(2 * s for s in row) for row in each.seconds)) for each in table.shapes]
    slower = replace(table, shapes=tuple(doubled))
    assert np.isclose(table_milliseconds(model, shape, slower), 2000 * expected)
    assert np.isclose(table_milliseconds(model, shape, replace(table, batch=8)), 1000 * expected / 8)


CONV = LayerShape("conv", (3, 3), (2, 2), (8, 8))
SHAPES = {
    CONV: Wanted(3, 20),
    LayerShape("conv", (1, 1), (1, 1), (4, 4)): Wanted(48, 16),
    LayerShape("conv", (3, 3), (1, 1), (4, 4), 2): Wanted(16, 16),
    LayerShape("depthwise", (5, 5), (1, 1), (4, 4)): Wanted(40, 40),
    LayerShape("norm", (1, 1), (1, 1), (4, 4)): Wanted(40, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_layer_models(tmp_path_factory.mktemp("device") / "layers", SHAPES)


def test_the_folder_is_small_and_the_table_has_every_shape(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000
    table = TimeTable.from_json(json.dumps(device.profile(folder, repeats=2)))
    assert [times.shape for times in table.shapes] == list(SHAPES)
    assert [(times.inputs, times.outputs) for times in table.shapes] == [
        channel_axes(shape, wanted) for shape, wanted in SHAPES.items()
    ]
    assert (table.runtime, table.threads, table.batch) == ("onnxruntime", 1, 1)
    assert table.block in (4, 8, 16, 32)
    assert CONV in table
    assert table.seconds(CONV, 3, 16) > 0


def test_the_script_in_the_folder_needs_onnxruntime_and_numpy_alone(folder, tmp_path):
    """Nothing but those, the standard library and what they bring along can be imported."""
    code = f"""
        import importlib.abc, runpy, sys

        class Block(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {{"torch", "timm", "onnx", "onnxscript", "basisprune", "pydantic", "typer"}}:
                    raise ImportError(f"{{name}} is not on the device")

        sys.meta_path.insert(0, Block())
        sys.argv = ["profile_device.py", "--output", {str(tmp_path / "device.json")!r}, "--repeats", "2"]
        runpy.run_path({str(folder / SCRIPT)!r}, run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pass it to compress --device" in done.stderr
    table = TimeTable.from_json((tmp_path / "device.json").read_text())
    assert len(table.shapes) == len(SHAPES)


def test_folders_that_are_damaged_or_of_something_else_are_refused(folder, tmp_path):
    with pytest.raises(device.ProfileError, match="prepare the folder again"):
        device.profile(tmp_path)
    (tmp_path / device.REQUEST).write_text('{"runtime": "another"}')
    with pytest.raises(device.ProfileError, match="prepare the folder again"):
        device.profile(tmp_path)
    (tmp_path / device.REQUEST).write_text((folder / device.REQUEST).read_text())
    with pytest.raises(device.ProfileError, match="is missing; copy the whole folder"):
        device.profile(tmp_path)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / device.CHAIN).write_bytes(b"no model")
    with pytest.raises(device.ProfileError, match="onnxruntime cannot read it"):
        device.profile(tmp_path)
    with pytest.raises(device.ProfileError, match="at least 1 and 2 are needed"):
        device.profile(folder, repeats=1)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(ConfigError, match="holds something else"):
        write_layer_models(tmp_path, SHAPES)
    assert (tmp_path / "letter.txt").read_text() == "dear reader"
