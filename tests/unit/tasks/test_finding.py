"""Tasks by name, and by 'package.module:name'."""

from __future__ import annotations

import sys
import textwrap

import pytest

from basisprune.errors import ConfigError
from basisprune.tasks import CLASSIFICATION, TASKS, Task, find_task


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a user's own."""
    code = """
    from basisprune import Task
    from torch.nn.functional import mse_loss

    task = Task("mine", mse_loss, lambda said, true: -(said - true).abs().mean(1))
    number = 3

    def make():
        return task

    def fails():
        raise RuntimeError("no disk")
    """
    (tmp_path / "own_task_module.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_task_module", None)


def test_every_built_in_task_has_its_metrics():
    for name, known in TASKS.items():
        assert find_task(name).name == name
        assert len({find_task(name, metric).metric_name for metric in known.metrics}) == len(known.metrics)
    assert find_task("classification") is CLASSIFICATION
    with pytest.raises(
        ConfigError, match=r"'dise' given; allowed for segmentation are iou, dice\. Did you mean 'dice'"
    ):
        find_task("segmentation", "dise")


@pytest.mark.usefixtures("own")
def test_a_name_refers_to_a_task_or_a_function_that_makes_one():
    assert find_task("own_task_module:task").name == "mine"
    assert find_task("own_task_module:make") is find_task("own_task_module:task")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("segmentaton", "allowed are classification, segmentation, multilabel, regression, or 'package.module:task'"),
        ("own_task_module:none", "own_task_module has no 'none'"),
        ("own_task_module:number", "is a int; a Task, or a function that returns one"),
        ("own_task_module:fails", "calling it without arguments failed: RuntimeError: no disk"),
        ("no_such_module:task", "cannot import no_such_module"),
        ("own module:task", "is not a task; write 'package.module:name'"),
    ],
)
def test_what_is_no_task_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        find_task(name)


def test_a_task_has_its_own_metric():
    mine = Task("mine", lambda a, b: a, lambda a, b: a)
    assert find_task(mine) is mine
    with pytest.raises(ConfigError, match="the task mine has its own, score; omit it"):
        find_task(mine, "dice")
