"""A short run of the fuzzer: whatever is read from disk gives a value or an error of ours."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from basisprune.errors import BasisPruneError

FOLDER = Path(__file__).parents[2] / "benchmarks"
SEEDS = 12
WORDS = (
    "forged graph",
    "forged structure",
    "forged network",
    "what config.json says",
    "tensors",
    "plans",
    "bytes",
    "latencies",
    "checkpoints",
    "summary",
    "settings",
)
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


@pytest.fixture(scope="module")
def forged(fuzz, tmp_path_factory):
    """What writes a forged bundle of one kind, and what loads and runs it."""
    found = import_module("fuzz_graphs").forgeries(tmp_path_factory.mktemp("graphs"))
    return [(spoil, read) for _, spoil, read in found]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), kind=st.integers(0, 2))
def test_a_forged_bundle_is_refused_or_does_nothing_but_compute(chance, kind, fuzz, forged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged")
    spoil, read = forged[kind]
    spoil(folder, chance)
    fuzz.WATCH.seen, fuzz.WATCH.is_on = [], True
    try:
        with contextlib.suppress(BasisPruneError):
            read(folder)
    finally:
        fuzz.WATCH.is_on = False
    assert fuzz.WATCH.seen == []


def test_the_watch_sees_code_that_runs(fuzz, tmp_path):
    fuzz.WATCH.seen, fuzz.WATCH.is_on = [], True
    eval("1 + 1")
    (tmp_path / "x").mkdir()
    (tmp_path / "y").write_text("")
    fuzz.WATCH.is_on = False
    assert {seen.split()[0] for seen in fuzz.WATCH.seen} >= {"compile", "exec", "os.mkdir", "open"}
