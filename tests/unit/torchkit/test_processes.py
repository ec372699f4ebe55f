"""Laws of a process that is by itself; tests/pipeline/test_two_processes.py has those of several."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn

from basisprune.errors import ProcessError
from basisprune.torchkit.processes import Processes, answering, is_about_others


def test_one_process_is_the_main_one_and_changes_nothing():
    one, tensor, model = Processes.here(), torch.rand(3), nn.Linear(2, 2)
    assert one == Processes(0, 1) == Processes.joined()
    assert one.is_main
    assert one.sum(tensor) is tensor
    assert one.total(7) == 7
    assert one.agree(model) is model
    assert one.from_main(lambda: b"all") == b"all"
    one.wait()


def test_errors_of_the_main_process_are_its_own():
    with pytest.raises(ZeroDivisionError):
        Processes.here().on_main(lambda: 1 / 0)


def test_every_item_is_somebodys_and_all_have_some():
    for count in (1, 2, 3):
        for items in (list(range(7)), list(range(count))):
            shares = [Processes(rank, count).share(items) for rank in range(count)]
            assert sorted(chain.from_iterable(shares)) == items
    assert [Processes(rank, 3).share([1, 2]) for rank in range(3)] == [[1, 2]] * 3


def test_only_errors_about_others_become_process_errors():
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert is_about_others(gone)
    with pytest.raises(ProcessError, match="start the run again"), answering():
        raise gone
    with pytest.raises(RuntimeError, match="no memory"), answering():
        raise RuntimeError("no memory")
