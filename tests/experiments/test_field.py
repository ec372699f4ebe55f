"""Laws of the field: frontiers, verdicts and the page from made-up results, and what its methods prune."""

from __future__ import annotations

import copy
import doctest
import json
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree as ET

import field
import field_bench
import field_figures
import field_points
import field_summary
import numpy as np
import parts
import parts_table
import pytest
import rivals
import timm
import torch
from field import Cell
from field_bench import Pace, ShortTunings
from field_methods import METHODS, TUNING
from field_points import Mean, cost_at, frontier, mean_points
from field_results import add_result, key_of, read_results
from hypothesis import given
from hypothesis import strategies as st
from parts import Worth
from torch import nn

from basisprune import measure, transfer_model
from basisprune.data import ArrayImages, Splits

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [field_bench, field_points, field_figures, field_summary, parts_table])
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
        "point": point,
        "untuned_val_accuracy": 0.5,
        "passes": 4,
        "pruning_seconds": 2.0,
        "pass_seconds": 10.0,
        "found": {"lr": 1e-4, "norm_statistics": "fixed", "mixed_precision": "no", "flip": True},
        "seconds": 1.0,
        "processor_seconds": 1.0,
    }


def a_cell(seed: int = 0, method: str = "ours") -> Cell:
    return Cell("efficientnet_lite0", "mnist", method, METHODS[method].sizes[0], seed)


def test_every_cell_has_files_of_its_own():
    methods = [(method.name, size) for method in METHODS.values() for size in method.sizes]
    cells = {
        Cell("efficientnet_lite0", dataset, *way, seed)
        for dataset in field.DATASETS
        for way in methods
        for seed in (0, 1)
    }
    assert len({cell.name for cell in cells}) == len(cells) == 6 * len(methods)


def test_results_come_back_with_their_settings_and_the_last_line_of_a_cell_counts(tmp_path):
    path, settings = tmp_path / "field.jsonl", field.settings()
    assert read_results(path) == []
    for cell, accuracy in ((a_cell(), 0.7), (a_cell(1), 0.8), (a_cell(), 0.9)):
        add_result(path, record(cell, accuracy), settings)
    add_result(path, record(a_cell(2), 0.6), settings | {"device": "another"})
    found = read_results(path)
    assert [each["point"]["test_accuracy"] for each in found] == [0.9, 0.8, 0.6]
    assert [each["settings"]["device"] for each in found] == [settings["device"]] * 2 + ["another"]
    assert key_of(found[0]) == key_of(asdict(a_cell()))


def test_cells_of_another_protocol_are_refused(tmp_path):
    path, settings = tmp_path / "field.jsonl", field.settings()
    add_result(path, record(a_cell(), 0.7), settings)
    with pytest.raises(SystemExit, match="another protocol"):
        add_result(path, record(a_cell(1), 0.7), settings | {"protocol": {"tune_passes": 1}})


def test_a_line_that_was_cut_off_costs_no_other_cell(tmp_path):
    path, settings = tmp_path / "field.jsonl", field.settings()
    add_result(path, record(a_cell(), 0.7), settings)
    path.write_text(path.read_text() + '{"model": "eff')
    add_result(path, record(a_cell(1), 0.8), settings)
    assert [each["seed"] for each in read_results(path)] == [0, 1]


def _add_many(path: Path, seeds: range) -> None:
    for seed in seeds:
        add_result(path, record(a_cell(seed), 0.7), field.settings())


def test_two_processes_write_to_one_file(tmp_path):
    path = tmp_path / "field.jsonl"
    workers = [get_context("fork").Process(target=_add_many, args=(path, range(n, n + 20))) for n in (0, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(each["seed"] for each in read_results(path)) == [*range(20), *range(100, 120)]
    assert len(path.read_text().splitlines()) == 41


def test_points_are_means_over_seeds():
    (point,) = mean_points([record(a_cell(), 0.8), record(a_cell(1), 0.9)])
    assert (point.seeds, point.accuracy) == ((0, 1), pytest.approx(0.85))


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0, 20), st.floats(0, 1000))
def test_what_pruning_takes_is_missing_for_tuning_but_one_pass_is_left(reference, this, budget, spent):
    pace = Pace(reference, this)
    assert 1 <= pace.passes(budget, spent) <= pace.passes(budget)
    assert pace.passes(budget, budget * reference) == 1


def at_seed(method: str, kind: str, seed: int, accuracy: float) -> field_points.Record:
    return record(Cell("efficientnet_lite0", "mnist", method, (0.5,), seed), accuracy, kind)


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
    results, page = tmp_path / "field.jsonl", tmp_path / "field.md"
    page.write_text((ROOT / "docs" / "field.md").read_text())
    for name in ("ours", "ours, by time", "l1", "smaller images", "unpruned"):
        add_result(results, record(a_cell(method=name), 0.9, METHODS[name].kind), field.settings())
    folder = tmp_path / "parts"
    folder.mkdir()
    half = [("ours", 0.5, 0.8), ("basis", 0.5, 0.78), ("scores", 0.5, 0.75)]
    for name, share, accuracy in (*half, ("ours", 0.75, 0.6), ("basis", 0.75, 0.5)):
        place = {"model": "resnet50", "dataset": "mnist", "seed": 0, "part": name, "ours": "one", "instead": "another"}
        values = {"accuracy": accuracy, "untuned": 0.5, "parameters": 1000, "config": {"size": [share, share]}}
        (folder / f"{name}-{share}.json").write_text(json.dumps(place | values))
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    field_summary.write_pages(tmp_path / "none.jsonl", folder, page, readme)
    assert page.read_text().count("Not run yet.") == 6
    assert "<!-- field:begin -->\nNot run yet." in readme.read_text()
    field_summary.write_pages(results, folder, page, readme)
    text = page.read_text()
    assert "3 of 5 bars hold; those that do not: 2 on MNIST." in text
    assert "ours by time 0.5 has 90.0%" in text
    assert "EfficientNet-Lite0 on MNIST: 5 with seed 0. None yet: EfficientNet-Lite0 on Fashion-MNIST," in text
    rows = ("Without 50%", "| scores | one | another | -5.0 |", "| basis | one | another | -2.0 |")
    rows += ("Without 75%", "| basis | one | another | -10.0 |")
    assert [text.index(row) for row in rows] == sorted(text.index(row) for row in rows)
    ET.parse(page.with_suffix("") / "mnist.svg")


def test_the_readme_shows_ours_beside_the_two_best_rivals_that_were_run_everywhere():
    found = {"ours": (0.9, "ours"), "unpruned": (0.91, "unpruned")}
    found |= {"l1": (0.8, "rival"), "hrank": (0.89, "rival"), "taylor": (0.7, "rival")}
    points = [
        made_up(name, kind, value, dataset=each) for name, (value, kind) in found.items() for each in field.DATASETS
    ]
    points += [made_up("hrank", "rival", 0.88, dataset=dataset, size=(0.3,)) for dataset in field.DATASETS]
    points.append(made_up("svd", "rival", 0.95, dataset="mnist"))
    _, _, *rows, _, seeds = field_summary.overview(points).splitlines()
    assert seeds == "Seeds: Fashion-MNIST 1, MNIST 1, CIFAR-10 1."
    assert [row.split(" | ")[0] for row in rows] == ["| unpruned 0.5", "| hrank 0.5", "| l1 0.5", "| ours 0.5"]
    assert rows[-1] == "| ours 0.5 | 90.0% | 90.0% | 90.0% | 1.00M | 10.0M | 1.00 |"


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


def test_pruning_in_steps_tunes_between_them_only():
    model, seen = network(), []
    small = rivals.by_taylor(model, 0.5, batches(model), steps=3, tune=lambda pruned: seen.append(measure(pruned).macs))
    whole = measure(rivals.by_taylor(model, 0.5, batches(model))).macs
    assert measure(model).macs > seen[0] > seen[1] > measure(small).macs == pytest.approx(whole, rel=0.3)


def test_what_fastnas_searches_is_the_same_function_in_plain_layers():
    torch.manual_seed(0)
    backbone = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    model = transfer_model(backbone, 3, input_size=64).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    plain, images = rivals.traceable(model), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(plain(images), model(images), rtol=1e-4, atol=1e-5)
    assert {type(module) for module in plain.modules() if isinstance(module, nn.BatchNorm2d)} == {nn.BatchNorm2d}
    assert {type(module) for module in plain.modules() if isinstance(module, nn.Conv2d)} == {nn.Conv2d}


def test_without_fastnas_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelopt", None)
    model = network()
    with pytest.raises(SystemExit, match="pip install nvidia-modelopt"):
        rivals.by_fastnas(model, 0.4, batches(model), batches(model))


# Methods


class SmallBench(field_bench.Bench):
    """A bench of a small network and made-up images."""

    def __init__(self, folder: Path) -> None:
        self.model, self.dataset, self.seed, self.side, self.clock_side = "small", "mnist", 0, 16, 16
        self.runs = self.folder = folder
        self.tuning_seconds = 0.0
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 255, (120, 16, 16, 3)).astype(np.uint8)
        parts = [ArrayImages(pixels[begin : begin + 40], np.arange(40) % 3) for begin in (0, 40, 80)]
        self.splits = Splits(*parts, parts[0].classes)
        self.pretrained = network()


@pytest.fixture
def bench(tmp_path):
    return SmallBench(tmp_path)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.prune and name != "fastnas"])
def test_every_method_cuts_the_start_within_what_it_counts(bench, name):
    began = time.process_time()
    cell = Cell("small", "mnist", name, (0.5, 0.5) if name == "ours" else (0.5,), 0)
    cut = field.cut(cell, bench)
    assert measure(cut.network).parameters < measure(bench.pretrained).parameters
    assert 0 < cut.seconds < time.process_time() - began
    tunes = METHODS[name].budget < field.TUNE_PASSES
    assert (bench.tuning_seconds > 0) == tunes


def test_half_the_width_is_half_of_every_layer(bench):
    small = METHODS["distilled, half the width"].prune(bench, (0.5,))
    convs = [module.out_channels for module in small.modules() if isinstance(module, nn.Conv2d)]
    assert convs == [16, 32]


def test_short_tunings_find_their_settings_once_and_train_in_place(bench, monkeypatch):
    found = []
    monkeypatch.setattr(field_bench, "choose", lambda *given: found.append(given) or replace(TUNING, choices=None))
    tune, model = ShortTunings(bench, TUNING, budget=3.0, count=2), network()
    before = copy.deepcopy(model.state_dict())
    tune(model)
    once = copy.deepcopy(model.state_dict())
    tune(model)
    assert len(found) == 1
    weight = next(name for name in before if name.endswith("weight"))
    assert len({float(state[weight].sum()) for state in (before, once, model.state_dict())}) == 3


# Parts


class StubBench:
    """What pruning asks of a bench, for a small network that counts as trained."""

    def __init__(self) -> None:
        self.pretrained = network()

    def kept(self, _name, _train):
        return self.pretrained

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
    assert len({cell.file for cell in cells}) == len(cells)


def test_without_any_points_nothing_is_as_good():
    assert cost_at([], 0.5, "parameters") is None


def test_networks_from_two_backbones_are_not_interpolated():
    small = made_up(model="efficientnet_lite0", accuracy=0.8, parameters=1e6)
    large = made_up(model="resnet50", accuracy=0.9, parameters=9e6)
    assert cost_at([small, large], 0.85, "parameters") == 9e6
    assert cost_at([small, large], 0.75, "parameters") == 1e6
