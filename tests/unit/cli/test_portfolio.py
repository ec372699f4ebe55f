"""Laws of `basisprune compress` with several models; tests/pipeline/test_portfolio.py runs it."""

from __future__ import annotations

import json

import pytest
from commands import invoke

from basisprune.sweeps.backbones import PORTFOLIO


def words(*more: object) -> tuple[object, ...]:
    return ("compress", "--data", "x", "--output", "x", *more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "a model is needed"),
        (("--model", "resnet18", "--models", "resnet50"), "--model resnet18 given too"),
        (("--models", ","), "expected names such as resnet18,resnet50"),
        (("--model", "resnet18", "--jobs", 2), "it is for --model auto, or for several --models"),
        (("--model", "resnet18", "--weights-folder", "x"), "--weights-folder: given with one model"),
    ],
)
def test_one_model_or_several_are_needed(more, said):
    done = invoke(*words(*more))
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_a_dry_run_lists_the_backbones_and_the_rounds():
    plan = json.loads(invoke(*words("--model", "auto", "--dry-run", "--json")).stdout)
    assert tuple(plan["backbones"]) == PORTFOLIO
    assert plan["rungs"] == [[1, 5], [2, 3]]
    said = invoke(*words("--models", "resnet18, resnet50", "--keep", 1, "--dry-run")).stdout
    assert "after 1 epoch: 1 continue" in said


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_unknown_backbones_are_told_before_anything_is_done(more, tmp_path):
    words = ("compress", "--data", tmp_path, "--output", tmp_path / "out", "--models", "resnet18,resnet5000")
    done = invoke(*words, *more)
    assert done.exit_code == 1
    assert "timm has no model 'resnet5000'" in done.stderr
    assert not (tmp_path / "out").exists()
