"""Laws of the file of a sweep: every combination once, and all faults told at once with their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from basisprune.errors import ConfigError
from basisprune.recipes import PAPER_DATASETS
from basisprune.runs.settings import configure
from basisprune.sweeps.running import Resources, Running
from basisprune.sweeps.sweep import Sweep, read_sweep, run_sweep
from basisprune.torchkit.processes import Processes

ROOT = Path(__file__).parents[3]


def read(tmp_path: Path, text: str):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path, tmp_path / "out")


def faults(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_every_combination_is_one_run_with_a_folder_of_its_own(tmp_path):
    sweep = read(
        tmp_path,
        "models: [resnet18, resnet50]\ndatasets: [torchvision:MNIST, torchvision:CIFAR10]\n"
        "frameworks: [baseline, basis, l1]\nseeds: [0, 1]\n",
    )
    assert len(sweep.cells) == 24
    assert len({run.folder for run in sweep.cells.values()}) == 24
    kinds = {cell.framework: run.kind for cell, run in sweep.cells.items()}
    assert kinds == {"baseline": "train", "basis": "compress", "l1": "compress"}
    seeds = {run.options["seed"] for run in sweep.cells.values()}
    assert seeds == {0, 1}


def test_options_of_a_dataset_go_before_those_of_a_model_and_those_before_the_shared(tmp_path):
    sweep = read(
        tmp_path,
        "models: [{name: a, model: resnet18, options: {size: 96, epochs: 3}}]\n"
        "datasets: [{name: d, data: 'torchvision:MNIST', options: {size: 64, target_params: 1.5M}}]\n"
        "options: {max_drop: 1%, epochs: 1, limit: 10}\n",
    )
    (run,) = sweep.cells.values()
    assert run.options == {"epochs": 3, "limit": 10, "size": 64, "target_params": 1_500_000, "seed": 0}


def test_resources_are_read_with_units(tmp_path):
    text = "models: [resnet18]\ndatasets: [x]\nresources: {cpus: 2, gpus: 0.5, memory: 8G}\nretries: 5\n"
    sweep = read(tmp_path, text)
    assert (sweep.running.resources, sweep.running.retries) == (Resources(2, 0.5, 8_000_000_000), 5)


def test_all_faults_are_told_at_once_with_their_places(tmp_path):
    said = faults(
        tmp_path,
        "models: [resnet18, {name: b, model: resnet18, options: {max_drp: 1%}}]\n"
        "datasets: [{data: x, options: {max_drop: much, seed: 3}}]\n"
        "seeds: [0, 0]\nretries: -1\nresources: {cpus: 0}\n",
    )
    for part in (
        "models[1].options.max_drp: no such setting. Did you mean 'max_drop'?",
        "datasets[0].options.max_drop: 'much' given; expected a percentage",
        "datasets[0].options.seed: is varied by the sweep; put it under seeds",
        "seeds: [0, 0] given; a list of different values is needed",
        "retries: -1 given",
        "resources.cpus: 0 given, at least 1 is needed",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: resnet18\ndatasets: [x]\n", "model: no such setting. Did you mean 'models'?"),
        ("models: resnet18\ndatasets: [x]\n", "models: 'resnet18' given; a list is needed"),
        ("models: []\ndatasets: [x]\n", "models: none given"),
        ("models: [a]\ndatasets: [{data: x, model: y}]\n", "datasets[0].data: "),
        ("models: [a]\ndatasets: [b/x, c/x]\n", "datasets: 'x' is there twice"),
        ("models: [a]\ndatasets: [x]\nframeworks: [taylr]\n", "'taylr' given; allowed are baseline, l1"),
        ("models: [a]\ndatasets: [x]\noptions: {max_drop: 0.01, target_params: 5}\n", "pass one budget"),
        ("models: [auto]\ndatasets: [x]\nframeworks: [baseline]\n", "needs one model, and 'auto' given"),
        ("models: [!!python/object/apply:os.system [ls]]\ndatasets: [x]\n", "is not valid YAML"),
        ("models: [a]\nmodels: [b]\ndatasets: [x]\n", "given twice"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, said):
    assert said in faults(tmp_path, text)


def test_a_file_without_an_output_asks_for_one(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("models: [resnet18]\ndatasets: [x]\n")
    with pytest.raises(ConfigError, match="output: not given"):
        read_sweep(path)
    path.write_text("models: [resnet18]\ndatasets: [x]\noutput: there\n")
    assert read_sweep(path).output.name == "there"


def test_the_papers_63_cells_are_a_file_that_follows_its_protocol():
    from protocol import FRAMEWORKS, PROTOCOLS

    sweep = read_sweep(ROOT / "experiments" / "paper63.yaml", "unused")
    assert len(sweep.cells) == 63
    full = PROTOCOLS["full"]
    assert {cell.model for cell in sweep.cells} == set(full.models)
    assert {cell.framework for cell in sweep.cells} == set(FRAMEWORKS)
    for cell, run in sweep.cells.items():
        config = configure(run.options)
        assert config.size == PAPER_DATASETS[cell.dataset][0]
        assert (config.recipe, config.goal) == (full.recipe(cell.dataset), full.budget(cell.dataset))
        assert (config.val_fraction, config.confirm_fraction) == (0.1, 0.0)
        if run.kind == "compress":
            assert config.method.name == cell.framework
            assert vars(config.search) | {"framework": None} == vars(full.search)


def test_two_cells_never_share_a_folder(tmp_path):
    models = "models: [{name: a, model: resnet18}, {name: a-b, model: resnet50}]\n"
    said = faults(tmp_path, models + "datasets: [{name: b-c, data: x}, {name: c, data: y}]\n")
    assert "a-b-c-0: 2 cells have this name" in said


def test_a_launcher_of_several_processes_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("basisprune.sweeps.running.Processes.joined", lambda: Processes(0, 2))
    sweep = Sweep({}, Running(), tmp_path / "out")
    with pytest.raises(ConfigError, match="started in several processes; start one, without a launcher"):
        run_sweep(sweep)
    assert not (tmp_path / "out").exists()
