"""Laws of what is delivered: one network, in whatever form it is kept or run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import NETWORKS, randomise_norms
from tiny import tiny_images, tiny_model
from torch import Tensor, nn

import basisprune
from basisprune import PlanConfig, decompose, fold, recompose, save_pretrained, transfer_model
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.deploy.bundle import load_bundle, loading, saving
from basisprune.deploy.export import export_onnx
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.export.runtime import FileModel
from basisprune.importance import score_filters
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.types import BasisPlan, FilterPlan, LayerScores, Scores

ROOT = Path(__file__).parents[2]
FACTORIES = {"residual": "networks:Residual", "concat": "networks:Concat", "used_twice": "networks:UsedTwice"}
REAL = {"resnet50": 0.5, "vgg16": 0.5, "densenet121": 0.8, "tf_efficientnet_lite0": 0.5}


def basis_plan(model: nn.Module, ratio: float) -> BasisPlan:
    """A plan by the size of each vector's weights."""
    scores = {}
    for name, pair in basis_pairs(model).items():
        groups = pair.scaling.groups
        scores[name] = LayerScores(tuple(pair.scaling.weight.flatten(1).norm(dim=0).tolist() * groups), groups)
    return plan_basis(Scores("norm", scores), ratio, PlanConfig(normalise="max"))


def filter_plan(model: nn.Module, x: Tensor, ratio: float) -> FilterPlan:
    coupling = trace_coupling(model, x)
    return plan_filters(model, score_filters(model, "l1", coupling.layers), ratio, coupling=coupling)


def close(given: Tensor, expected: Tensor) -> bool:
    return given.shape == expected.shape and bool((given - expected).abs().max() <= 1e-3 * expected.abs().max())


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)


def file_size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in ("model.safetensors", "config.json"))


def allowed_size(model: nn.Module) -> float:
    return 1.02 * 4 * sum(parameter.numel() for parameter in model.parameters()) + 64_000


class Chain:
    """A network whose forms are compared with each other, and with what comes back from a bundle and from ONNX."""

    def __init__(self, folder: Path, x: Tensor, **saving_options) -> None:
        self.folder, self.x, self.options = folder, x, saving_options

    def same(self, *networks: nn.Module) -> None:
        first, *others = (output(network, self.x) for network in networks)
        assert all(close(other, first) for other in others)

    def loaded(self, network: nn.Module, *plans: BasisPlan | FilterPlan) -> nn.Module:
        folder = save_pretrained(network, self.folder / "bundle", plans=plans, **self.options)
        bundle = load_bundle(folder, trust_remote_code=True)  # the tests' own networks
        assert bundle.plans == plans
        assert torch.equal(output(bundle.model, self.x), output(network, self.x))
        return bundle.model

    def delivered(self, pruned: nn.Module, *plans: BasisPlan | FilterPlan) -> None:
        """Pruned = folded = loaded from its bundle = ONNX, and neither file is larger than allowed."""
        folded = fold(pruned, self.x)
        self.same(pruned, folded, self.loaded(folded, *plans))
        assert file_size(self.folder / "bundle") <= allowed_size(folded)
        report = export_onnx(folded, self.folder / "model.onnx", example_inputs=self.x)
        assert report.size <= allowed_size(folded)
        assert close(FileModel(report.path, ONNX, 1, trusted=True).outputs(self.x)[0], output(pruned, self.x))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_form_of_every_small_network_computes_the_same(name: str, tmp_path: Path) -> None:
    model, x = NETWORKS[name](dtype=torch.float32)
    chain = Chain(tmp_path, x, factory=FACTORIES.get(name), input_shape=x.shape[1:])
    split = decompose(model, scale_init=1.0)
    chain.same(model, split, recompose(split), chain.loaded(split))
    first = basis_plan(split, 0.3)
    slim = prune_basis(split, first)
    second = filter_plan(slim, x, 0.2)
    double = prune_filters(slim, second)
    chain.same(slim, chain.loaded(slim, first))
    chain.same(double, chain.loaded(double, first, second))
    chain.delivered(slim, first)
    chain.delivered(double, first, second)


@pytest.fixture
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large architectures are built anew for the first bundle, and copied for the others."""
    kept: dict[str, nn.Module | None] = {}
    build: Callable[..., nn.Module | None] = loading.fresh_network

    def fresh(architecture, spec):
        key = str((architecture, spec))
        if key not in kept:
            kept[key] = build(architecture, spec)
        return copy.deepcopy(kept[key])

    for module in (loading, saving):
        monkeypatch.setattr(module, "fresh_network", fresh)


@pytest.mark.usefixtures("built_once", "one_thread")
@pytest.mark.parametrize("backbone", REAL)
def test_every_form_of_a_real_network_computes_the_same(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transfer_model(backbone, 4, input_size=64)
    randomise_norms(model)
    x = torch.randn(2, 3, 64, 64)
    chain = Chain(tmp_path, x)
    split = decompose(model, scale_init=1.0)
    chain.same(model, split, recompose(split), chain.loaded(split))
    first = basis_plan(split, REAL[backbone])
    slim = prune_basis(split, first)
    chain.same(slim, fold(slim, x))
    second = filter_plan(slim, x, 0.2)
    chain.delivered(prune_filters(slim, second), first, second)


@pytest.mark.usefixtures("one_thread")
def test_the_page_on_deployment_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    monkeypatch.chdir(tmp_path)
    model = decompose(tiny_model())
    names: dict[str, object] = {"model": prune_basis(model, basis_plan(model, 0.3)), "data": tiny_images()}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(block, names)
    files = {"flowers", "flowers-openvino", "flowers.onnx", "flowers.int8.onnx", "flowers.pt2"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_every_link_of_the_page_on_deployment_exists() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    targets = re.findall(r"\]\((?!http)([^)#]+)", page)
    assert targets
    assert all((ROOT / "docs" / target).exists() for target in targets)
    for name in re.findall(r"from basisprune import (.*)", page):
        assert all(hasattr(basisprune, part.strip()) for part in name.split(","))
