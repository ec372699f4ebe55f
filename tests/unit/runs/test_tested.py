"""Laws of the record of what was tested on the confirming images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from basisprune.budget.certify import Test
from basisprune.errors import CheckpointError, PlanError
from basisprune.method.states import Stage, State
from basisprune.recipes import DENSE, Step
from basisprune.runs.tested import TESTS, FileTest, Tested, identity, read_tested, write_tested
from basisprune.search.candidates import Candidate, Evaluated, Size
from basisprune.tasks import Predictions

PASSED = Test(1, "half", 0.95, 0.94, 0.009, 0.02, 9, 7, passed=True)
FAILED = replace(PASSED, passed=False, bound=0.02)


def trial(weight: float, ratio: float = 0.5) -> Evaluated:
    said = Predictions.of_hits(np.ones(3, dtype=bool))
    state = State((DENSE, Step("basis", ratio)), nn.Identity(), (Stage("s", 1, 1, 1, 1),), outcomes=said)
    network = nn.Linear(1, 1, bias=False)
    nn.init.constant_(network.weight, weight)
    return Evaluated(Candidate.of(state, state, Size(1, 1)), state, network)


def test_what_was_written_is_read_and_nothing_is_written_without_a_folder(tmp_path):
    tested = (
        Tested("1 %", "a", ("b", "c"), "PyTorch").with_test(PASSED).with_file("model.int8.onnx", FileTest("0", FAILED))
    )
    assert read_tested(tmp_path) is None
    write_tested(tmp_path, tested)
    assert read_tested(tmp_path) == tested
    write_tested(None, tested)
    assert read_tested(None) is None


def test_a_failure_of_a_network_or_of_a_file_is_known():
    tested = Tested("1 %", "a", ("b", "c"), "PyTorch")
    assert not tested.has_failed
    assert not tested.with_test(PASSED).has_failed
    assert tested.with_test(FAILED).has_failed
    assert tested.with_file("model.onnx", FileTest("0", FAILED)).has_failed


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_record_that_is_damaged_is_not_taken_for_none(tmp_path, content):
    write_tested(tmp_path, Tested("1 %", "a", ("b",), "PyTorch"))
    path = tmp_path / TESTS
    path.write_bytes(path.read_bytes().replace(b"PyTorch", b"pytorch") if content is None else content)
    with pytest.raises(CheckpointError, match=r"tests\.json"):
        read_tested(tmp_path)


def test_networks_are_told_apart_by_their_weights_and_by_how_they_came_about():
    names = {identity(each) for each in (trial(1.0), trial(2.0), trial(1.0, 0.25))}
    assert len(names) == 3
    assert identity(trial(1.0)) in names
    assert identity(trial(1.0)).startswith("dense, basis 0.5, sha256 ")


def test_every_test_has_the_checksum_of_what_was_run():
    with pytest.raises(PlanError, match="1 tests have 0 checksums"):
        Tested("1 %", "a", ("b",), "PyTorch", (PASSED,))
