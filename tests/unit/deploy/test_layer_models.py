"""Laws of the folder that a device is profiled with, and of profiling it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from basisprune.deploy import device
from basisprune.deploy.timing import SCRIPT, Wanted, channel_axes, write_layer_models
from basisprune.errors import ConfigError
from basisprune.joint_plan.times import LayerShape, TimeTable

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
    assert not table.missing({"conv": CONV})
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
