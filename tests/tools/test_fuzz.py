"""A short run of the fuzzer: whatever is read from disk gives a value or an error of ours."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SEEDS = 12
WORDS = ("forged graph", "forged structure", "forged network", "what config.json says", "tensors", "plans", "bytes", "latencies", "checkpoints", "summary", "settings")
MORE = (
    "images",
    "npz",
    "metadata",
    "images.json",
    "tests.json",
    "config.yaml",
    "groups",
    "weights",
    "checkpoint folder",
)


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield import_module("fuzz")


@pytest.fixture(scope="module")
def targets(fuzz, tmp_path_factory):
    return {target.name: target for target in fuzz.all_targets(tmp_path_factory.mktemp("sound"))}


@pytest.mark.parametrize("word", [*WORDS, *MORE])
def test_only_errors_of_ours_come_out(word, fuzz, targets, tmp_path):
    target = next(each for name, each in targets.items() if word in name)
    outcomes = [fuzz.tried(target, tmp_path, seed) for seed in range(SEEDS)]
    assert {outcome for outcome in outcomes if outcome not in ("read", "refused")} == set()
    assert "run" in target.name or "refused" in outcomes


def test_every_kind_of_file_is_tried(targets):
    assert len(targets) == len(WORDS) + len(MORE)
