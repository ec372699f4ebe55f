"""Laws of the experiment on the promise: ladders survive their file, rules keep to what they say, the page is made."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import promise_rules
import promise_summary
import pytest
from promise_ladder import Ladder, Rung
from promise_rules import BOUND, CERTIFIED, OLD, UNLABELLED, Setting, clustered, judge, searches

ROOT = Path(__file__).parents[2]
CONFIG = {"side": 32, "images": 10, "pool": 12000, "epochs": 1, "tune_epochs": 1}


def ladder(seed: int = 0, losses=(0.0, 0.004, 0.03), images: int = 12000, dataset: str = "mnist") -> Ladder:
    """Networks that lose so much of 90% accuracy, and win one image in a hundred."""
    random = np.random.default_rng(seed)
    first = random.random(images) < 0.9
    kinds = random.random((len(losses), images))
    rest = [np.where(first, kind >= loss + 0.01, kind < 0.09) for kind, loss in zip(kinds, losses, strict=True)]
    rungs = tuple(Rung(1 / 2**number, 1000 // 2**number, 10) for number in range(len(losses) + 1))
    labels = np.ones(images, dtype=np.uint8)
    return Ladder(dataset, seed, rungs, labels, np.stack([first, *rest]), CONFIG, {"python": "3"}, "cpu", 1.0)


@pytest.mark.parametrize("module", [promise_rules, promise_summary])
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0


def test_a_ladder_survives_its_file_and_is_small(tmp_path):
    made = ladder()
    made.write(tmp_path / "promise.jsonl")
    (read,) = Ladder.read(tmp_path / "promise.jsonl")
    assert (read.answers == made.answers).all()
    assert (read.hits == made.hits).all()
    assert (read.rungs, read.config) == (made.rungs, made.config)
    assert (tmp_path / "promise.jsonl").stat().st_size < 20_000


def test_the_old_rule_breaks_a_budget_at_the_edge_and_certified_networks_do_not():
    edge = [ladder(seed, losses=(0.0, 0.012)) for seed in range(3)]
    results = {each.rule: each for each in judge(edge, draws=10) if each.setting == Setting(2000, 0.01)}
    assert results[OLD].broken.share > 0.1
    assert results[CERTIFIED].broken is None or results[CERTIFIED].broken.share < results[OLD].broken.share / 2
    assert results[OLD].cost == 1.0
    assert results[BOUND].cost >= 1.0


def test_a_few_labels_certify_what_all_labels_certify():
    results = {each.rule: each for each in judge([ladder(seed) for seed in range(3)], draws=10) if each.setting is None}
    few, every = results[UNLABELLED], results[CERTIFIED]
    assert few.delivered >= every.delivered - 0.1
    assert 0 < few.labels[0] <= 0.1 * every.labels[0]


def test_searches_repeat_exactly():
    one, other = (list(searches(ladder(), Setting(2000, 0.02), 3)) for _ in range(2))
    assert one == other


def test_intervals_are_wider_where_clusters_differ():
    even, uneven = clustered([5] * 10, [100] * 10), clustered([50] + [0] * 9, [100] * 10)
    assert even.share == uneven.share == 0.05
    assert even.interval == (0.05, 0.05)
    assert uneven.interval[1] > 0.1


def test_the_page_is_made_from_ladders(tmp_path):
    for seed in range(2):
        ladder(seed).write(tmp_path / "promise.jsonl")
    page = tmp_path / "proof.md"
    page.write_text((ROOT / "docs" / "proof.md").read_text())
    promise_summary.write_page(tmp_path / "promise.jsonl", page, draws=4)
    text = page.read_text()
    assert "| MNIST | 2 |" in text
    assert "promise/rules.svg" in text
    assert ET.parse(tmp_path / "promise" / "rules.svg").getroot().tag.endswith("svg")
    record = json.loads((tmp_path / "promise_rules.json").read_text())
    assert (record["draws"], record["ladders"]) == (4, {"mnist": 2})
    assert len(record["results"]) == 20


def test_without_ladders_it_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match=r"promise\.py"):
        promise_summary.write_page(tmp_path / "promise.jsonl", tmp_path / "x.md", draws=1)
