"""Laws of the field: frontiers, verdicts and the page from made-up results, and what its methods prune."""

from __future__ import annotations

import copy
import doctest
from dataclasses import asdict
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import field
import field_figures
import field_points
import field_summary
import parts
import parts_table
import pytest
import rivals
import studies
import torch
from field import Cell, best_rate, sweep
from field_methods import METHODS, Worth
from field_points import Mean, cost_at, frontier, mean_points
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from basisprune import measure, transfer_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [field_points, field_figures, field_summary, parts_table])
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0


def made_up(
    method="ours", kind="ours", accuracy=0.8, parameters=1e6, dataset="cifar10", size=(0.5,), model="efficientnet_lite0"
) -> Mean:
    interval = (accuracy - 0.01, accuracy + 0.01)
    costs = (parameters, 10 * parameters, parameters / 1e6)
    return Mean(model, dataset, method, kind, size, (0,), accuracy, interval, *costs, 4, None)


points = st.lists(
    st.builds(made_up, accuracy=st.floats(0.1, 0.99), parameters=st.floats(1e5, 1e7)), min_size=1, max_size=8
)


@given(points)
def test_on_a_frontier_accuracy_rises_with_the_cost_and_nothing_left_out_is_better(made):
    kept = frontier(made, "parameters")
    assert [p.accuracy for p in kept] == sorted({p.accuracy for p in kept})
    assert [p.parameters for p in kept] == sorted(p.parameters for p in kept)
    for point in made:
        assert any(best.accuracy >= point.accuracy and best.parameters <= point.parameters for best in kept)


@given(points)
def test_a_point_on_the_frontier_needs_its_own_cost(made):
    for point in frontier(made, "parameters"):
        assert cost_at(made, point.accuracy, "parameters") == pytest.approx(point.parameters)


@given(points, st.floats(0, 1), st.floats(0, 1))
def test_more_accuracy_never_costs_less(made, one, other):
    low, high = (cost_at(made, accuracy, "parameters") for accuracy in sorted((one, other)))
    assert high is None or (low is not None and low <= high * (1 + 1e-9))


def test_no_cost_is_made_up_for_what_is_never_reached():
    assert cost_at([made_up(accuracy=0.8)], 0.81, "parameters") is None


def test_a_bar_holds_only_where_ours_is_as_good_and_small_enough():
    rival = made_up("l1", "rival", 0.8, 2e6)
    small, large, worse = made_up(parameters=1.1e6), made_up(parameters=1.3e6), made_up(accuracy=0.7, parameters=1e5)
    for ours, holds in ((small, True), (large, False), (worse, False)):
        found = [v for v in field_summary.verdicts([rival, ours]) if v.axis == "parameters"]
        assert [verdict.holds for verdict in found] == [holds]


# Cells


def record(cell: Cell, accuracy: float, kind: str = "ours") -> dict[str, object]:
    point = {"test_accuracy": accuracy, "interval": [accuracy - 0.01, accuracy + 0.01], "val_accuracy": accuracy}
    point |= {"parameters": 1_000_000, "macs": 10_000_000, "ms": 1.0, "clock_ms": 2.0}
    return {
        **asdict(cell),
        "kind": kind,
        "config": field.config() | {"tuning": asdict(METHODS[cell.method].tuning)},
        "point": point,
        "untuned_val_accuracy": 0.5,
        "passes": 4,
        "pruning_seconds": 2.0,
        "versions": {"torch": "2"},
        "device": "here",
        "seconds": 1.0,
        "processor_seconds": 1.0,
    }


def test_every_cell_has_a_file_of_its_own():
    cells = {
        Cell("efficientnet_lite0", dataset, method.name, size, rate, seed)
        for dataset in field.DATASETS
        for method in METHODS.values()
        for size in method.sizes
        for rate in (None, *method.swept)
        for seed in (0, 1)
    }
    assert len({cell.name for cell in cells}) == len(cells)


def test_the_best_rate_is_that_of_the_best_on_validation_images(tmp_path):
    cells = sweep(METHODS["l1"])
    study = tmp_path / "field.jsonl"
    for cell, accuracy in zip(cells, (0.7, 0.8, 0.75), strict=True):
        studies.add(study, cell.name, record(cell, accuracy))
    assert best_rate(cells, study) == cells[1].rate
    assert best_rate([], study) is None


def test_a_rate_is_best_on_all_datasets_that_were_swept_together(tmp_path):
    cells = sweep(METHODS["unpruned"])
    for cell, accuracy in zip(cells, (0.7, 0.8, 0.6, 0.55, 0.9, 0.86), strict=True):
        studies.add(tmp_path / "field.jsonl", cell.name, record(cell, accuracy))
    assert [cell.rate for cell in cells[:2]] == [0.3, 1.0]
    assert best_rate(cells[2:], tmp_path / "field.jsonl") == 0.3
    assert best_rate(cells, tmp_path / "field.jsonl") == 1.0


def test_rates_that_not_all_places_have_are_not_compared():
    def at(dataset: str, rate: float, accuracy: float) -> field_points.Record:
        return record(Cell("efficientnet_lite0", dataset, "ours", (0.5, 0.5), rate, 0), accuracy)

    records = [at("cifar10", 0.3, 0.7), at("cifar10", 1.0, 0.8), at("cifar10", 3.0, 0.9)]
    records += [at("mnist", 0.3, 0.9), at("mnist", 1.0, 0.7)]
    assert field_points.swept_rates(records) == {("efficientnet_lite0", "ours"): {0.3: 0.8, 1.0: 0.75}}
    assert field_points.best_rates([records[0], records[4]]) == {("efficientnet_lite0", "ours"): 0.3}


def test_points_are_at_the_chosen_rate_and_means_over_seeds():
    cells = sweep(METHODS["l1"])
    records = [record(cell, accuracy) for cell, accuracy in zip(cells, (0.7, 0.8, 0.75), strict=True)]
    other = Cell("efficientnet_lite0", "cifar10", "l1", cells[0].size, cells[1].rate, 1)
    (point,) = mean_points([*records, record(other, 0.9)])
    assert (point.seeds, point.accuracy) == ((0, 1), pytest.approx(0.85))


def at_seed(method: str, kind: str, seed: int, accuracy: float) -> field_points.Record:
    return record(Cell("efficientnet_lite0", "mnist", method, (0.5,), None, seed), accuracy, kind)


def test_networks_are_compared_in_the_mean_over_the_same_seeds():
    records = [
        at_seed("ours", "ours", 0, 0.9),
        at_seed("ours", "ours", 1, 0.7),
        at_seed("ours, by time", "ours", 0, 0.99),
    ]
    records += [at_seed("hrank", "rival", 0, 0.88), at_seed("hrank", "rival", 1, 0.76)]
    compared = {
        (v.theirs.seeds, round(v.theirs.accuracy, 6), v.ours) for v in field_summary.same_seeds(records, "mnist")
    }
    assert compared == {((0, 1), 0.82, None)}


def test_a_rival_that_another_beats_on_the_seeds_of_both_is_left_out():
    records = [at_seed("ours", "ours", seed, 0.9) for seed in (0, 1)]
    records += [at_seed("hrank", "rival", 0, 0.84), at_seed("hrank", "rival", 1, 0.95), at_seed("l1", "rival", 0, 0.85)]
    assert {v.theirs.method for v in field_summary.same_seeds(records, "mnist")} == {"l1"}


def test_the_page_is_filled_and_its_figures_are_xml(tmp_path):
    results, folder, page = tmp_path / "field.jsonl", tmp_path / "parts.jsonl", tmp_path / "field.md"
    page.write_text((ROOT / "docs" / "field.md").read_text())
    for name, kind in (("ours", "ours"), ("quick", "quick"), ("l1", "rival"), ("smaller images", "small")):
        cell = Cell("efficientnet_lite0", "mnist", name, METHODS[name].sizes[0], None, 0)
        studies.add(results, cell.name, record(cell, 0.9, kind))
    half = [("ours", 0.5, 0.8), ("basis", 0.5, 0.78), ("scores", 0.5, 0.75)]
    for name, share, accuracy in (*half, ("ours", 0.75, 0.6), ("basis", 0.75, 0.5)):
        place = {"model": "resnet50", "dataset": "mnist", "seed": 0, "part": name, "ours": "one", "instead": "another"}
        values = {"accuracy": accuracy, "untuned": 0.5, "parameters": 1000, "config": {"size": [share, share]}}
        studies.add(folder, f"{name}-{share}", place | values)
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    field_summary.write_pages(results, folder, page, readme)
    text = page.read_text()
    assert "3 of 6 comparisons hold." in text
    rows = ("### 50% of the filters", "| scores | one | another | -5.0 |", "| basis | one | another | -2.0 |")
    rows += ("### 75% of the filters", "| basis | one | another | -10.0 |")
    assert [text.index(row) for row in rows] == sorted(text.index(row) for row in rows)
    ET.parse(page.with_suffix("") / "mnist.svg")


def test_the_readme_shows_ours_beside_the_two_best_rivals_that_were_run_everywhere():
    found = {"ours": (0.9, "ours"), "unpruned": (0.91, "unpruned"), "quick": (0.85, "quick")}
    found |= {"l1": (0.8, "rival"), "hrank": (0.89, "rival"), "taylor": (0.7, "rival")}
    points = [
        made_up(name, kind, value, dataset=each) for name, (value, kind) in found.items() for each in field.DATASETS
    ]
    points += [made_up("hrank", "rival", 0.88, dataset=dataset, size=(0.3,)) for dataset in field.DATASETS]
    points.append(made_up("svd", "rival", 0.95, dataset="mnist"))
    _, _, *rows = field_summary.overview(points).splitlines()
    assert [row.split(" | ")[0] for row in rows] == [
        f"| {name}, \u221250%" for name in ("unpruned", "HRank", "L1", "ours")
    ]
    assert rows[-1] == "| ours, \u221250% | 90.0% | 90.0% | 90.0% | 1.00M | 10.0M | 1.00 |"


# Rivals


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return transfer_model(nn.Sequential(*layers), 3, input_size=16)


def batches(model):
    torch.manual_seed(0)
    return [(torch.randn(4, *model.input_spec.shape), torch.randint(3, (4,)))]


@pytest.mark.parametrize("method", ["magnitude", "taylor", "group norm", "l1", "hrank", "svd"])
def test_a_rival_makes_a_smaller_network_and_leaves_its_own_alone(method):
    model = network()
    before = copy.deepcopy(model.state_dict())
    if method == "group norm":
        sparse = rivals.GroupNorm(model, 0.5)
        sparse.step(*batches(model)[0])
        small = sparse.pruned()
    else:
        ways = {
            "magnitude": lambda: rivals.by_magnitude(model, 0.5),
            "taylor": lambda: rivals.by_taylor(model, 0.5, batches(model)),
            "svd": lambda: rivals.by_singular_values(model, 0.5),
        }
        small = ways.get(method, lambda: rivals.by_filters(model, method, 0.5, batches(model)))()
    assert measure(small).parameters < measure(model).parameters
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Parts


class StubBench:
    """What pruning asks of a bench, for a small network that counts as trained."""

    def __init__(self) -> None:
        self.pretrained = network()

    def trained(self, model, _config, passes, **_options):
        return model, passes

    def batches(self, _limit):
        return batches(self.pretrained)

    def val_batches(self, _size, limit):
        return batches(self.pretrained)


@pytest.mark.parametrize("name", [name for name, part in parts.PARTS.items() if isinstance(part.prune, Worth)])
def test_whatever_replaces_a_part_of_the_pruning_makes_another_smaller_network(name):
    bench, worth = StubBench(), parts.PARTS[name].prune
    ours, small = (parts.pruned(bench, each)(batches(bench.pretrained)[0][0]) for each in (parts.OURS, worth))
    assert measure(parts.pruned(bench, worth)).parameters < measure(bench.pretrained).parameters
    assert torch.equal(ours, small) == (worth == parts.OURS)


def test_every_part_has_a_file_of_its_own():
    ways = product(parts.PARTS, (0, 1), (parts.HALF, 0.75))
    cells = [parts.Cell("resnet50", "mnist", name, seed, share) for name, seed, share in ways]
    assert len({cell.name for cell in cells}) == len(cells)


def test_without_any_points_nothing_is_as_good():
    assert cost_at([], 0.5, "parameters") is None


def test_networks_from_two_backbones_are_not_interpolated():
    small = made_up(model="efficientnet_lite0", accuracy=0.8, parameters=1e6)
    large = made_up(model="resnet50", accuracy=0.9, parameters=9e6)
    assert cost_at([small, large], 0.85, "parameters") == 9e6
    assert cost_at([small, large], 0.75, "parameters") == 1e6
