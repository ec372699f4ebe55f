"""Laws of what a run found, as a value: it survives JSON, and JSON that is not one is refused with all faults."""

from __future__ import annotations

import json
import math
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from summaries import sample, summary

from basisprune.budget import Budget, Ratios
from basisprune.errors import CheckpointError
from basisprune.files import unsealed
from basisprune.recipes import Step
from basisprune.results import LayerImportance, Limit, RunSummary

OPTIONAL = {
    "finding",
    *("headline", "interrupted", "kept_to_budget", "latency_by", "importance"),
    *("test", "confusion", "changed", "latency", "files", "certificate", "class_losses", "require_certified"),
    "runtimes",
    "portfolio",
    *("task", "metric", "metric_is_share", "masks", "errors", "not_written"),
}
WHOLE = {each.name for each in fields(RunSummary)}


def test_a_summary_survives_json_and_a_file(tmp_path):
    found = summary()
    assert RunSummary.from_json(found.to_json()) == found
    found.write(tmp_path / "summary.json")
    assert RunSummary.read(tmp_path / "summary.json") == found
    assert unsealed((tmp_path / "summary.json").read_bytes()) == found.as_dict() == json.loads(found.to_json())


@pytest.mark.parametrize("damage", ["a digit", "cut", "utf-8", "no checksum", "missing", "deep"])
def test_a_damaged_summary_is_refused_by_name(damage, tmp_path):
    path = tmp_path / "summary.json"
    summary().write(path)
    whole = path.read_bytes()
    odd = {
        "a digit": re.sub(rb'"seed":(\d)', lambda found: b'"seed":1' + found[1], whole, count=1),
        "cut": whole[: len(whole) // 2],
        "utf-8": whole.replace(b"resnet", b"\xff"),
        "no checksum": summary().to_json().encode(),
        "deep": b"[" * 100_000,
    }
    assert odd.get(damage) != whole
    path.write_bytes(odd[damage]) if damage in odd else path.unlink()
    with pytest.raises(CheckpointError, match=r"summary\.json: cannot be read"):
        RunSummary.read(path)


def test_a_summary_is_of_values_all_the_way_down():
    found = summary()
    assert found.candidates[0].steps == (Step("decomposed"), Step("basis", 0.5))
    assert found.candidates[0].interval == tuple(sample()["candidates"][0]["interval"])
    assert found.test.after.parameters == 2_010_345
    assert found.latency.rows[0].model == "before"
    with pytest.raises(FrozenInstanceError):
        found.seed = 3


@pytest.mark.parametrize("part", sorted(OPTIONAL))
def test_parts_that_a_run_may_lack_may_be_missing(part):
    without = {name: value for name, value in sample().items() if name != part}
    found = RunSummary.from_json(json.dumps(without))
    assert RunSummary.from_json(found.to_json()) == found


@given(st.sets(st.sampled_from(sorted(WHOLE - OPTIONAL)), min_size=1))
def test_all_parts_that_every_run_has_are_named_at_once_where_they_are_missing(missing):
    left = {name: value for name, value in sample(1, 1).items() if name not in missing}
    with pytest.raises(CheckpointError) as error:
        RunSummary.from_json(json.dumps(left))
    assert {fault.partition(":")[0] for fault in error.value.faults} == missing


def test_faults_are_told_by_their_place():
    broken = sample()
    broken["seed"] = "seven"
    broken["candidates"][2]["accuracy"] = "high"
    del broken["reference"]["macs"]
    with pytest.raises(CheckpointError) as error:
        RunSummary.from_json(json.dumps(broken))
    assert error.value.where == "summary"
    assert {fault.partition(":")[0] for fault in error.value.faults} == {
        *("seed", "candidates.2.accuracy", "reference.macs")
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"a text"'])
def test_a_text_that_is_no_summary_is_refused(text):
    with pytest.raises(CheckpointError, match="summary"):
        RunSummary.from_json(text)


def test_numbers_that_are_not_finite_are_none_after_json():
    found = replace(summary(), importance={"conv": LayerImportance((math.inf, 1.0), (math.nan, 2.0))})
    assert json.loads(found.to_json(), parse_constant=pytest.fail) == found.as_dict()
    assert RunSummary.from_json(found.to_json()).importance["conv"] == LayerImportance((None, 1.0), (None, 2.0))


def test_the_chosen_candidate_is_found():
    assert summary().chosen == summary().candidates[3]
    assert summary(candidates=[]).chosen is None


def test_every_candidate_has_one_outcome():
    assert [row.status for row in summary().candidates] == [*["passed"] * 3, "chosen", "undecided", "failed"]
    chosen = replace(summary().candidates[4], chosen=True)
    assert (chosen.undecided, chosen.status) == (True, "chosen")


@pytest.mark.parametrize(
    ("goal", "limit", "quantity", "bound"),
    [
        (Budget(max_drop=0.02), Limit("max_drop", 0.02), "accuracy", 0.88),
        (Budget(max_drop=0.0), Limit("max_drop", 0.0), "accuracy", 0.9),
        (Budget(min_accuracy=0.8), Limit("min_accuracy", 0.8), "accuracy", 0.8),
        (Budget(target_params=500), Limit("target_params", 500), "parameters", 500),
        (Budget(target_macs=1), Limit("target_macs", 1), "macs", 1),
        (Budget(target_latency=0.5), Limit("target_latency", 0.5), "latency_ms", 0.5),
        (Ratios(0.5, 0.1), Limit("fixed"), None, None),
    ],
)
def test_a_limit_is_that_of_the_goal(goal, limit, quantity, bound):
    assert Limit.of(goal) == limit
    assert limit.quantity == quantity
    assert limit.bound(0.9) == (None if bound is None else pytest.approx(bound))
