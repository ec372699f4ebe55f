"""What a run keeps in its folder, and what it refuses."""

from __future__ import annotations

import pytest

from basisprune.errors import CheckpointError
from basisprune.plan import plan_basis
from basisprune.stage_store import RunFolder
from basisprune.types import BasisPlan, LayerScores, Scores


def plan(ratio: float = 0.5, values: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)) -> BasisPlan:
    return plan_basis(Scores("taylor", {"conv": LayerScores(values)}), ratio)


def test_keys_of_any_length_have_names_of_their_own(tmp_path):
    folder = RunFolder(tmp_path)
    long = "decomposed" + ", basis 0.5" * 40
    names = {folder.path(key, ".pt").name for key in ("decomposed", long, long + ", polished", "x" * 300)}
    assert len(names) == 4
    assert max(map(len, names)) < 255


def test_a_number_is_found_once(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.number("dense, latency", lambda: 1.5) == 1.5
    assert folder.number("dense, latency", lambda: 2.5) == 1.5
    assert folder.number("other, latency", lambda: 2.5) == 2.5


def test_a_plan_is_made_once(tmp_path):
    folder, first = RunFolder(tmp_path), plan()
    assert folder.plan("basis 0.5", first) == first
    assert folder.plan("basis 0.5", plan(values=(4.0, 3.0, 2.0, 1.0))) == first


def test_a_plan_for_another_ratio_or_that_cannot_be_read_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    folder.plan("basis", plan())
    with pytest.raises(CheckpointError, match=r"was made for ratio 0\.5"):
        folder.plan("basis", plan(0.25))
    folder.path("basis", ".plan.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be read.*delete it to plan anew"):
        folder.plan("basis", plan())


def test_a_folder_belongs_to_one_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.claim({"basis": "outputs"})
    folder.claim({"basis": "outputs"})
    with pytest.raises(CheckpointError, match="was made with other settings"):
        folder.claim({"basis": "weights"})


def test_without_a_root_nothing_is_kept():
    folder = RunFolder(None)
    folder.claim({"basis": "outputs"})
    assert folder.path("dense", ".pt") is None
    assert [folder.number("latency", lambda n=n: n) for n in (1.0, 2.0)] == [1.0, 2.0]
    assert folder.plan("basis", plan(0.25)) == plan(0.25)
