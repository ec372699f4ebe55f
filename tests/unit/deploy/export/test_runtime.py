"""Laws of exported files of others: whatever they ask for, they get bounded memory and time, and end with the asker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from basisprune.deploy.export import runtime
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.export.runtime import FileModel, Sandbox
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.errors import ModelError
from basisprune.runs.finished import load_any

Nodes = list[onnx.NodeProto]


def constant(name: str, *values: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values, dtype=np.int64)))


def filled(*shape: int) -> Nodes:
    """A tensor of ones of that shape, and the sum of it."""
    one = numpy_helper.from_array(np.ones(1, dtype=np.float32))
    fill = helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=one)
    return [constant("shape", *shape), fill, helper.make_node("ReduceSum", ["ones"], ["bomb"], keepdims=0)]


def expanded() -> Nodes:
    """The image, as often as it takes for 8 GB."""
    size = helper.make_node("Expand", ["more", "shape"], ["large"])
    more = helper.make_node("ReduceMax", ["images"], ["more"], keepdims=0)
    return [constant("shape", 1 << 31), more, size, helper.make_node("ReduceSum", ["large"], ["bomb"], keepdims=0)]


def endless(initial: str = "") -> Nodes:
    """A loop whose condition always holds; with the name of a tensor, only where its sum is not 0."""
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("before", "after")]
    number = helper.make_tensor_value_info("number", TensorProto.INT64, [])
    was, goes_on = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("was", "goes_on"))
    steps = [helper.make_node("Identity", ["was"], ["goes_on"]), helper.make_node("Cos", ["before"], ["after"])]
    body = helper.make_graph(steps, "body", [number, was, state[0]], [goes_on, state[1]])
    start = helper.make_node("ReduceSum", [initial or "images"], ["start"], keepdims=0)
    holds = helper.make_node("Cast", ["start" if initial else "one"], ["holds"], to=TensorProto.BOOL)
    one = helper.make_node("Constant", [], ["one"], value_float=1.0)
    return [start, one, holds, helper.make_node("Loop", ["", "holds", "start"], ["bomb"], body=body)]


def hostile(source: Path, target: Path, nodes: Nodes) -> Path:
    """A file of ours, to whose scores something is added that takes long or much."""
    proto = onnx.load(source)
    last = next(node for node in proto.graph.node if "scores" in node.output)
    last.output[list(last.output).index("scores")] = "sound"
    proto.graph.node.extend([*nodes, helper.make_node("Add", ["sound", "bomb"], ["scores"])])
    onnx.save(proto, target)
    return target


def memory_while(work: Callable[[], object]) -> int:
    """The most bytes that this process and its children hold while the work is done, seen every few milliseconds."""
    code = (
        "import psutil, sys, time\n"
        f"asker, most = psutil.Process({os.getpid()}), 0\n"
        "while True:\n"
        "    for each in asker.children(recursive=True):\n"
        "        try: most = max(most, each.memory_info().rss)\n"
        "        except psutil.Error: pass\n"
        "    print(most, flush=True); time.sleep(0.02)\n"
    )
    watch = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        work()
    finally:
        watch.terminate()
        lines = watch.communicate()[0].splitlines()
    return int(lines[-1] or 0)


@pytest.mark.parametrize(
    "nodes",
    [filled(1 << 31), filled(1 << 20, 1 << 13), filled(1 << 40), filled(1 << 62), expanded()],
    ids=["8 GB", "8 GB in two dimensions", "4 TB", "overflow", "expanded"],
)
def test_memory_that_a_graph_asks_for_is_bounded(nodes, tiny, tmp_path):
    path = hostile(tiny[1][False], tmp_path / "hostile.onnx", nodes)

    def used() -> None:
        with pytest.raises(ModelError, match=r"hostile\.onnx: .*at most 4\.0 GB"):
            load_any(path)

    assert memory_while(used) < 5 << 30


def test_a_graph_that_never_ends_is_ended(tiny, tmp_path, monkeypatch):
    path = hostile(tiny[1][False], tmp_path / "hostile.onnx", endless())
    for name in ("_START", "_LEAST"):
        monkeypatch.setattr(runtime, name, 8)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"hostile\.onnx: it takes ONNX Runtime more than 8 seconds"):
        load_any(path)
    assert time.monotonic() - started < 60
    assert not psutil.Process().children(recursive=True)


def test_so_is_one_that_never_ends_for_some_images(tiny, tmp_path, monkeypatch):
    path = hostile(tiny[1][False], tmp_path / "hostile.onnx", endless("images"))
    loaded = load_any(path)
    monkeypatch.setattr(runtime, "_LEAST", 3)
    monkeypatch.setattr(runtime, "_TIMES_SLOWEST", 1)
    assert loaded.model(torch.zeros(20, *loaded.spec.shape)).shape == (20, 3)
    with pytest.raises(ModelError, match=r"more than [0-9]+ seconds for 16 images"):
        loaded.model(torch.ones(20, *loaded.spec.shape))
    with pytest.raises(ModelError, match=r"hostile\.onnx"):  # and nothing is waited for
        loaded.model(torch.zeros(1, *loaded.spec.shape))


def test_many_images_give_what_single_ones_give(tiny):
    model, paths = tiny
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (model.input_spec.mean, model.input_spec.std))
    for kind in (True, False):  # with the normalisation in the file, and without
        given = (images * 255).round() / 255
        expected = torch.cat([model(image[None]) for image in (given - mean) / std]).detach()
        file = load_any(paths[kind]).model
        assert torch.allclose(file(given if kind else (given - mean) / std), expected, atol=1e-4)


def test_files_of_data_run_in_a_process_of_their_own_unless_they_are_trusted(tiny):
    assert [name for name, each in RUNTIMES.items() if each.is_data] == ["onnx", "openvino"]
    assert isinstance(FileModel(tiny[1][False], ONNX, 1).run, Sandbox)
    assert not isinstance(FileModel(tiny[1][False], ONNX, 1, trusted=True).run, Sandbox)


def test_what_runs_a_file_ends_when_nobody_asks_any_more(tiny):
    file = Sandbox(tiny[1][False], ONNX, 1)
    process = file._process
    del file
    assert process.poll() is not None
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom basisprune.deploy.export.runtime import Sandbox\n"
        "from basisprune.deploy.export.onnx import ONNX\n"
        f"file = Sandbox(Path({str(tiny[1][False])!r}), ONNX, 1)\n"
        "print(file._process.pid, flush=True); time.sleep(60)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    number = int(asker.stdout.readline())
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    asker.stdout.close()
    until = time.monotonic() + 30
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.1)
