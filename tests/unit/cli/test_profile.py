"""Laws of `basisprune profile`."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from commands import invoke

from basisprune.deploy import device
from basisprune.deploy.timing import SCRIPT, read_table


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "layers"
    result = invoke("profile", "--model", "tiny:tiny_backbone", "--size", 16, "--prepare", folder)
    assert result.exit_code == 0, result.output
    assert f"python layers/{SCRIPT} --output device.json" in result.stderr
    return folder


def test_a_prepared_folder_is_measured_without_torch(prepared, tmp_path):
    code = """
        import importlib.abc, sys

        class Block(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torch", "timm", "torchvision", "onnx", "safetensors", "PIL"}:
                    raise ImportError(f"{name} is not on the device")

        sys.meta_path.insert(0, Block())
        from basisprune.cli import app

        app()
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        "profile",
        str(prepared),
        "--output",
        str(tmp_path / "d.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = read_table(tmp_path / "d.json")
    assert {times.shape.size for times in table.shapes} >= {(16, 16), (8, 8), (4, 4)}


def test_a_model_can_be_profiled_here_at_once(tmp_path):
    path = tmp_path / "device.json"
    result = invoke("profile", "--model", "tiny:tiny_backbone", "--size", 16, "--output", path)
    assert result.exit_code == 0, result.output
    assert read_table(path).threads == 1


def test_what_does_not_go_together_is_told_at_once(prepared, tmp_path):
    result = invoke("profile", "--runtime", "tensorrt")
    assert result.exit_code == 1
    for fault in ("allowed is onnxruntime", "folder or --model is needed", "--output or --prepare is needed"):
        assert fault in result.stderr
    both = invoke("profile", prepared, "--prepare", tmp_path / "other")
    assert "--prepare: needs --model" in both.stderr
    fixed = invoke("profile", prepared, "--size", 32, "--batch", 8, "--output", tmp_path / "device.json")
    assert fixed.exit_code == 1
    for fault in ("--size: 32 given with a prepared folder", "--batch: 8 given with a prepared folder"):
        assert fault in " ".join(fixed.stderr.split())
    wrong = invoke("profile", tmp_path, "--output", tmp_path / "device.json")
    assert wrong.exit_code == 1
    assert "prepare the folder again" in wrong.stderr


@pytest.mark.parametrize(("options", "threads"), [((), None), (("--threads", 2), 2)])
def test_a_folder_is_measured_with_the_threads_it_was_prepared_for(options, threads, prepared, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(device, "profile", lambda _folder, *, threads, say: asked.append(threads) or {"shapes": []})
    result = invoke("profile", prepared, *options, "--output", tmp_path / "device.json")
    assert result.exit_code == 0, result.output
    assert asked == [threads]
