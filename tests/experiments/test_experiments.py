"""Laws of the experiments: the paper's numbers as data, tables and figures from made-up results, the peers."""

from __future__ import annotations

import copy
import doctest
import json
from argparse import Namespace
from dataclasses import asdict
from functools import cache
from xml.etree import ElementTree as ET

import cells
import figures
import numpy as np
import page
import pytest
import run
import sections
import studies
import summarise
import timm
import torch
from cells import DATASETS, MODELS, PAPER, Cell
from peers import RIVALS, RivalPipeline, singular_values, torch_pruned
from protocol import FRAMEWORKS, INSIDE, PEERS, PROTOCOLS, ROWS, START, VARIANTS
from tiny import CLASSES, differing, tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.costs import measure
from basisprune.data import load_data
from basisprune.method.states import NOT_AT_ALL, State
from basisprune.recipes import DENSE
from basisprune.torchkit.surgery import find_layers
from basisprune.transfer.model import transfer_model

BLOCKS = ("settings", "efforts", "verdicts", "longer", "tables", "candidates", "ablations", "scales", "table4")


# The paper's numbers


@pytest.mark.parametrize("field", ["parameters", "flops"])
def test_the_papers_ratios_follow_from_its_sizes(field):
    def bounds(size: float) -> tuple[float, float]:  # all that is printed as this
        return size - 0.005, size + 0.005

    for table in PAPER["tables"].values():
        for block in table.values():
            least, most = bounds(block["baseline"][field])
            for row in block.values():
                low, high = bounds(row[field])
                assert 100 * (1 - high / least) - 0.05 <= row[f"{field}_pr"] <= 100 * (1 - low / most) + 0.05


def test_the_papers_tables_are_complete_and_hold_its_largest_ratios():
    assert PAPER["tables"].keys() == DATASETS.keys()
    for table in PAPER["tables"].values():
        assert table.keys() == MODELS.keys()
        assert all(tuple(block) == FRAMEWORKS for block in table.values())
    largest = {
        dataset: max(row["parameters_pr"] for block in table.values() for row in block.values())
        for dataset, table in PAPER["tables"].items()
    }
    assert largest["cifar10"] == 74.6  # section 4.4 names these
    assert largest["fashion_mnist"] == 93.9
    assert largest["mnist"] == 98.9


# Tables


def fake(framework: str, parameters: int, *, dataset: str = "mnist", seed: int = 0, **changes) -> dict:
    """A result file as `run.py` writes it, of a network that keeps so many of 1,000,000 parameters."""
    score = {"val_accuracy": 0.95, "test_accuracy": 0.94, "test_interval": [0.93, 0.95]}
    baseline = score | {"parameters": 1_000_000, "macs": 2_000_000_000}
    record = {"model": "resnet50", "dataset": dataset, "framework": framework, "variant": "default", "seed": str(seed)}
    record |= {"config": PROTOCOLS["mini"].describe(dataset), "versions": {"torch": "2"}, "device": "cpu"}
    record |= {"baseline": baseline, "seconds": 1.0, "preset": "mini"}
    if framework != "baseline":
        tried = {"parameters": 1_000_000, "drop": 0.0, "passed": True, "history": []}
        smaller = tried | {"parameters": parameters, "drop": 0.005, "history": [{"epoch": 1}] * 2}
        if framework != START:
            record["candidates"] = [
                tried,
                smaller,
                smaller | {"parameters": parameters // 2, "drop": 0.5, "passed": False},
            ]
        record["result"] = baseline | {"val_accuracy": 0.945, "test_accuracy": 0.92, "test_drop": 0.02}
        record["result"] |= {"test_drop_interval": [-0.01, 0.05], "undecided": True}
        record["result"] |= {"basis_ratio": 0.0, "filter_ratio": 0.5 if parameters < 1_000_000 else 0.0}
        record["result"] |= {"parameters": parameters, "macs": 2 * parameters, "deployed_parameters": parameters}
    if framework == "basis":
        layers = {f"conv{number}": {"scales": [1.0, 0.9, 0.0], "taylor": [1.0, 0.1, 0.0]} for number in range(53)}
        record["scales"] = layers
    return record | changes


def read(folder, *records: dict) -> tuple[Cell, ...]:
    studies.write(folder / "mini.jsonl", {f"{number:03d}": record for number, record in enumerate(records)})
    return cells.read_cells(folder / "mini.jsonl")


def row(table: str, *starts: str) -> list[str]:
    """The cells of the only row that holds these one after another."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    (found,) = [line for line in lines if line[: len(starts)] == list(starts)]
    return found


def resnet_rows(found: tuple[Cell, ...]) -> str:
    """The part of MNIST's table that is about ResNet-50."""
    return sections.dataset_table(found, "mnist").split("**VGG-16**")[0]


FILTERS = ("l1", "taylor", "hrank", "torch-pruning magnitude", "torch-pruning taylor")


def test_a_bar_holds_up_to_its_limit_and_fails_beyond(tmp_path):
    filters = [fake(name, 500_000 + number) for number, name in enumerate(FILTERS)]
    others = [fake("basis+taylor", 300_000), fake("basis", 299_999), fake("truncated svd", 299_999)]
    verdicts = sections.verdicts(read(tmp_path, *filters, *others))
    best = row(verdicts, "MNIST", "0", "2", "Basis + Taylor-FO over the best filter pruning")
    assert best[4:7] == ["0.30M", "0.50M (L1)", "0.60"]
    assert best[-3:] == ["2.0 / 2.0", "≤ 0.6", "pass"]
    assert row(verdicts, "MNIST", "0", "2", "Basis + Taylor-FO over Basis")[-1] == "**fail**"
    assert row(verdicts, "MNIST", "0", "2", "Basis over truncated svd")[-1] == "**fail**"  # as good is not better
    assert "1 hold, 2 do not, 6 cannot be decided yet. In 1 of those that hold, ours lost more on the test" in verdicts


def test_a_rival_that_could_not_be_pruned_is_not_named_as_the_best(tmp_path):
    found = read(tmp_path, fake("basis", 300_000), fake("truncated svd", 1_000_000))
    assert row(sections.verdicts(found), "MNIST", "0", "2", "Basis over truncated svd")[5] == "1.00M (nothing passed)"
    assert row(resnet_rows(found), "truncated svd")[1:5] == ["nothing passed", "", "", ""]
    assert "In 1 of 2 searches nothing passed. Of the other 1 networks, 1 are undecided" in sections.efforts(found)


def test_twice_the_passes_are_judged_where_they_were_run(tmp_path):
    recipe = VARIANTS["longer"](PROTOCOLS["mini"].recipe("mnist"))
    records = [fake(name, 300_000 - number) for number, name in enumerate(("truncated svd", "basis"))]
    for record in records:
        record |= {"variant": "longer", "config": record["config"] | {"recipe": asdict(recipe)}}
    verdicts = sections.verdicts(read(tmp_path, *records))
    assert row(verdicts, "MNIST", "0", "4", "Basis over truncated svd")[-1] == "pass"
    assert "Of 12 comparisons" in verdicts


def test_a_bar_is_not_judged_before_all_rivals_were_run(tmp_path):
    verdicts = sections.verdicts(read(tmp_path, fake("basis+taylor", 1), fake("l1", 500_000)))
    assert row(verdicts, "MNIST", "0", "2", "Basis + Taylor-FO over Basis")[-1] == "not run: Basis"
    assert "hold, 0 do not, 9 cannot" in verdicts


def test_each_seed_is_judged_by_itself(tmp_path):
    records = [fake("basis", size, seed=seed) for seed, size in enumerate((100, 300))]
    records += [fake("truncated svd", 200, seed=seed) for seed in (0, 1)]
    verdicts = sections.verdicts(read(tmp_path, *records))
    assert row(verdicts, "MNIST", "0", "2", "Basis over truncated svd")[-1] == "pass"
    assert row(verdicts, "MNIST", "1", "2", "Basis over truncated svd")[-1] == "**fail**"


def test_tables_show_ours_beside_the_papers_and_name_what_is_missing(tmp_path):
    found = read(tmp_path, fake("baseline", 0), fake("basis", 250_000), fake("l1", 500_000))
    table = resnet_rows(found)
    assert row(table, "**ResNet-50**")[1:6] == ["94.0% [93.0, 95.0]", "", "1.00M (0.0%)", "2.000G (0.0%)", "99.4%"]
    basis = row(table, "Basis")
    assert basis[1:4] == ["92.0% [93.0, 95.0]", "0.5 / 2.0 [-1.0, 5.0]", "**0.25M (75.0%)**"]
    assert basis[5:] == ["99.1%", "0.55M (97.7%)", "0.05G (95.1%)"]
    assert row(table, "L1")[3] == "0.50M (50.0%)"
    assert row(table, "HRank")[1:6] == ["not run", "", "", "", "99.3%"]
    assert row(table, "Basis + Taylor-FO")[6] == "**0.48M (98.0%)**"
    assert row(table, "truncated svd")[1] == "not run"


def test_several_seeds_give_their_mean_and_range(tmp_path):
    found = read(tmp_path, *(fake("basis", size, seed=seed) for seed, size in enumerate((200_000, 300_000))))
    both = row(sections.dataset_table(found, "mnist"), "Basis", "92.0%")
    assert both[3] == "**0.25M (75.0%); 0.20M to 0.30M**"


def test_only_seeds_that_both_have_are_compared(tmp_path):
    records = [fake("hrank", 400_000), fake("hrank", 100_000, seed=1), fake("l1", 300_000)]
    found = read(tmp_path, *records, fake("hrank", 200_000, variant="longer"))
    assert (
        row(resnet_rows(found), "L1")[3] == "**0.30M (70.0%)**"
    )  # the mean of HRank is smaller, its first seed is not
    assert row(sections.longer(found), "MNIST", "HRank")[2] == "0.40M (60.0%)"


def test_the_decomposed_network_is_shown_but_is_no_result(tmp_path):
    found = read(tmp_path, fake(START, 1_200_000), fake("basis", 200_000))
    assert row(resnet_rows(found), "Decomposed, unpruned")[3] == "1.20M (-20.0%)"
    assert "Decomposed" not in sections.efforts(found)


def test_twice_the_passes_stand_beside_the_usual_ones(tmp_path):
    records = [fake("hrank", 900_000), fake("hrank", 300_000, variant="longer"), fake("l1", 500_000)]
    table = sections.longer(read(tmp_path, *records))
    assert row(table, "MNIST", "HRank")[2::2] == ["0.90M (10.0%)", "0.30M (70.0%)"]
    assert "L1" not in table


def test_ablations_compare_variants_on_each_dataset(tmp_path):
    records = [fake("basis", 200_000), fake("basis", 100_000, variant="paper")]
    for record in records:
        record["result"] |= {"untuned_val_accuracy": 0.5, "ratio": 0.8}
    table = sections.ablations(read(tmp_path, *records))
    assert row(table, "80.0%", "default")[2:] == ["not run", "50.0% → 94.5%, 92.0%; 0.20M, 0.000G", "not run"]
    assert row(table, "80.0%", "paper")[3].endswith("; 0.10M, 0.000G")
    assert "distill" not in table


def test_a_page_made_twice_is_the_same_and_its_pictures_are_xml(tmp_path):
    records = [fake(name, 300_000 - 10_000 * number) for number, name in enumerate(ROWS[1:])]
    read(tmp_path, fake("baseline", 0), *records)
    variant = fake("basis", 1, dataset="cifar10", variant="paper")
    variant["result"] |= {"untuned_val_accuracy": 0.123, "ratio": 0.5}
    studies.write(tmp_path / "mini-0.5.jsonl", {"0": variant})
    (tmp_path / "counts.json").write_text(json.dumps({name: {"total": 1, "trainable": 2} for name in MODELS}))
    path = tmp_path / "story.md"
    path.write_text("Story\n" + "".join(f"<!-- {name}:begin -->outdated<!-- {name}:end -->\n" for name in BLOCKS))
    made = []
    for _ in range(2):
        page.write_page(tmp_path, "mini", path)
        pictures = {picture.name: picture.read_text() for picture in (tmp_path / "story").iterdir()}
        made.append((path.read_text(), pictures))
    assert made[0] == made[1]
    assert set(pictures) == {"candidates-resnet50-mnist.svg", "scales-resnet50.svg"}
    assert made[0][0].startswith("Story\n")
    assert "outdated" not in made[0][0]
    assert "12.3% →" in made[0][0]
    for name, picture in pictures.items():
        ET.fromstring(picture)
        assert f"(story/{name})" in made[0][0]


def test_a_page_without_a_marker_is_refused_by_the_markers_name():
    with pytest.raises(SystemExit, match="<!-- a:end -->"):
        page.fill("<!-- a:begin -->", {"a": "text"})


def test_another_preset_does_not_overwrite_the_page_of_mini(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["summarise.py", "--preset", "full"])
    with pytest.raises(SystemExit):
        summarise.main()
    assert "--page is needed" in capsys.readouterr().err


def test_a_study_without_results_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no results there"):
        cells.read_cells(tmp_path / "mini.jsonl")


@pytest.mark.parametrize("module", [cells, sections, figures, page])
def test_the_examples_in_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


# Protocols and peers


@pytest.mark.parametrize("preset", PROTOCOLS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_settings_are_json_and_come_back_the_same(preset, dataset):
    described = PROTOCOLS[preset].describe(dataset)
    back = json.loads(json.dumps(described))
    assert back["side"] == described["side"]
    assert back["recipe"]["train"]["epochs"] == PROTOCOLS[preset].recipe(dataset).train.epochs


def test_every_variant_but_the_default_changes_the_recipe():
    recipe = PROTOCOLS["mini"].recipe("mnist")
    assert [name for name, variant in VARIANTS.items() if variant(recipe) == recipe] == ["default"]


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A folder of assets with tiny datasets, random weights for all networks, and no way to download any."""
    (tmp_path / "data").mkdir()
    labels = np.arange(30) % 10
    for dataset in DATASETS:
        shape = (30, 8, 8, 3) if dataset == "cifar10" else (30, 8, 8)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)  # no image is a copy of another
        arrays = {"x_train": images, "y_train": labels, "x_test": 255 - images, "y_test": labels}
        np.savez(tmp_path / "data" / f"{dataset}.npz", **arrays)
    create = cache(timm.create_model)
    asked = set()

    def random_weights(path):
        if "resnet50" in path.name:
            return create("resnet50").state_dict()
        return create("vgg16", num_classes=0, global_pool="").features.state_dict()

    def without_download(name, pretrained=False, **options):
        asked.update({name} if pretrained else {})
        return copy.deepcopy(create(name, **options))

    monkeypatch.setattr("backbones.load_file", random_weights)
    monkeypatch.setattr(timm, "create_model", without_download)
    monkeypatch.setattr(RivalPipeline, "dense", lambda self: State((DENSE,), self.model))
    return tmp_path, asked


@pytest.mark.parametrize("model", PROTOCOLS["full"].models)
def test_the_papers_protocol_can_be_set_up_for_each_dataset_and_framework(model, assets):
    folder, asked = assets
    for dataset in DATASETS:
        options = Namespace(preset="full", assets=folder, runs=folder / "runs", ratio=None)
        bench = run.Bench(model, dataset, "default", 0, options)
        side = 128 if dataset == "cifar10" else 112
        assert bench.pipeline.spec.shape == (3, side, side)
        assert bench.pipeline.settings.train.epochs == 100
        for framework in (*FRAMEWORKS[1:], *INSIDE, *PEERS):
            search = bench.search(framework)
            assert [move.axis for move in search.framework.moves] == expected_axes(framework)
            assert not search.config.warm_start
            assert search.goal.min_accuracy == (0.99 if dataset == "mnist" else None)
        recipes = {name: bench.config(name)["recipe"] for name in ROWS}
        assert recipes["truncated svd"]["finetune"]["train_scales"] is False
        assert recipes["truncated svd"]["compensate"] == "none"
        assert recipes["basis"] == recipes["baseline"] == asdict(bench.pipeline.settings)
    assert asked == ({"densenet121.tv_in1k"} if model == "densenet121" else set())


def expected_axes(framework: str) -> list[str]:
    if framework in INSIDE:
        return ["filters"]
    if framework == "truncated svd":
        return ["basis"]
    return (["basis"] if framework.startswith("basis") else []) + ["filters"] * (framework != "basis")


def test_densenet_takes_weights_from_the_assets_where_there_are_any(tmp_path, monkeypatch):
    path = tmp_path / "weights" / "densenet121.safetensors"
    path.parent.mkdir()
    path.touch()
    given = []
    monkeypatch.setattr("backbones.transfer_model", lambda name, classes, **options: given.append((name, options)))
    run.build("densenet121", tmp_path, num_classes=10, input_size=64)
    assert given == [("densenet121", {"weights": path, "input_size": 64})]


def test_the_scores_of_truncated_svd_are_the_singular_values():
    model = tiny_model().double()
    scores = singular_values(decompose(model, basis="weights", scale_init=1.0))
    convs = dict(find_layers(model, nn.Conv2d))
    assert scores.layers.keys() == convs.keys()
    for name, conv in convs.items():
        expected = np.linalg.svd(conv.weight.detach().flatten(1).numpy(), compute_uv=False)
        np.testing.assert_allclose(scores.layers[name].values, expected, rtol=1e-9)


@pytest.mark.parametrize("method", ["l1", "taylor", "hrank"])
def test_filters_that_a_skip_connection_ties_are_left_alone_inside_blocks(method):
    torch.manual_seed(0)
    model = transfer_model("resnet18", CLASSES, input_size=16)
    pipeline = RivalPipeline(model, load_data(tiny_images(40), val_fraction=0.5), tiny_recipe(tiny_training(epochs=1)))
    (move,) = RIVALS[f"{method} inside blocks"].moves
    pruned = pipeline.prune(State((DENSE,), model), move, 0.5, NOT_AT_ALL).model
    before, after = (dict(find_layers(each, nn.Conv2d)) for each in (model, pruned))
    inside = {name for name in before if name.endswith("conv1") and "layer" in name}  # the first of two in a block
    assert len(inside) == 8
    assert {name for name in before if after[name].out_channels < before[name].out_channels} <= inside
    widths = [sum(convs[name].out_channels for name in inside) for convs in (before, after)]
    assert widths[1] == widths[0] / 2


@pytest.mark.parametrize("method", ["magnitude", "taylor"])
def test_torch_pruning_removes_what_is_asked_and_leaves_the_input_as_it_was(method):
    model = tiny_model()
    before = copy.deepcopy(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    batches = [(torch.randn(6, 3, 16, 16), torch.arange(6) % CLASSES)]
    pruned = torch_pruned(model, method, 0.5, batches)
    filters = [sum(conv.out_channels for _, conv in find_layers(each, nn.Conv2d)) for each in (model, pruned)]
    assert filters == [20, 10]
    assert pruned(batches[0][0]).shape == (6, CLASSES)
    assert measure(pruned, 16).parameters < measure(model, 16).parameters
    assert not differing(model, before)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for each in (model, pruned) for parameter in each.parameters())
    assert not any(p.requires_grad for _, conv in find_layers(pruned, nn.Conv2d) for p in conv.parameters())
