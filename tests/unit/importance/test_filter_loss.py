"""Laws of what a filter is worth to the loss."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.basis.decompose import decompose
from basisprune.coupling import trace_coupling, unit_inputs, unit_outputs
from basisprune.errors import DataError
from basisprune.importance import filter_loss, filter_statistics, score_filters
from basisprune.importance.loss import Reading, refit_worth
from basisprune.planning import PlanConfig, plan_filters
from basisprune.pruning import prune_filters
from basisprune.types import Coupling, FilterPlan, GroupPlan

Batches = list[tuple[Tensor, Tensor]]


def images_for(network: str, count: int = 20) -> tuple[nn.Module, Coupling, Batches]:
    model, x = NETWORKS[network]()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, *x.shape[1:], generator=generator, dtype=x.dtype)
    labels = torch.randint(4, (count,), generator=generator)
    return model, trace_coupling(model, x), list(zip(images.split(8), labels.split(8), strict=True))


def by_hand(model: nn.Module, name: str, batches: Batches) -> Tensor:
    """var(x) times the squared gradients through this layer alone, image by image."""
    layer = model.get_submodule(name)
    axis = -1 if isinstance(layer, nn.Linear) else 1
    seen: list[Tensor] = []
    squares: list[Tensor] = []

    def note(_layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        own = args[0] * 1
        seen.append(own.detach().movedim(axis, -1).flatten(0, -2))
        own.register_hook(lambda gradient: squares.append(gradient.movedim(axis, -1).flatten(0, -2).square().sum(0)))
        return (own,)

    handle = layer.register_forward_pre_hook(note)
    images = 0
    for batch, labels in batches:
        for image, label in zip(batch, labels, strict=True):
            F.cross_entropy(model(image[None].clone().requires_grad_(True)), label[None]).backward()
            images += 1
    handle.remove()
    model.zero_grad()
    return torch.cat(seen).var(0, correction=0) * torch.stack(squares).sum(0) / images


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_filter_is_worth_variance_times_squared_gradient_where_its_channel_is_read(network, split):
    model, coupling, batches = images_for(network)
    if split:
        model = decompose(model, scale_init=0.8)
        coupling = trace_coupling(model, batches[0][0])
    before = copy.deepcopy(model.state_dict())
    found = filter_loss(model, coupling, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert set(found.scores.layers) == set(coupling.layers)
    readers = unit_inputs(model, coupling)
    channels = {name: by_hand(model, name, batches) for name in readers}
    for group in coupling.groups:
        worth = sum(
            channels[name][torch.from_numpy(parts[group.name])].sum(1)
            for name, parts in readers.items()
            if group.name in parts
        )
        for name in group.layers:
            values = torch.tensor(found.scores.layers[name].values, dtype=torch.float64)
            for filters in torch.from_numpy(unit_outputs(model, group, name)).T:
                torch.testing.assert_close(values[filters], worth)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_statistics_beside_the_scores_are_those_without_labels(network):
    model, coupling, batches = images_for(network)
    alone = filter_statistics(model, coupling, [images for images, _ in batches])
    for name, found in filter_loss(model, coupling, batches).statistics.items():
        torch.testing.assert_close(found.mean, alone[name].mean)
        torch.testing.assert_close(found.covariance, alone[name].covariance)


def test_the_method_of_that_name_gives_the_same_scores():
    model, coupling, batches = images_for("depthwise")
    assert score_filters(model, "loss", coupling.layers, batches) == filter_loss(model, coupling, batches).scores


def test_a_unit_that_no_layer_reads_stays_longest():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(5, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(torch.relu(self.two(x))).mean((2, 3)) + self.one(x).mean((1, 2, 3))[:, None]

    model, x = Fixed(), torch.randn(6, 3, 4, 4)
    coupling = trace_coupling(model, x)
    if "one" not in coupling.layers:
        pytest.skip("the coupling does not cut what no layer reads")
    scores = filter_loss(model, coupling, [(x, torch.tensor([0, 1] * 3))]).scores.layers
    assert min(scores["one"].values) == max(scores["two"].values)


def saturated() -> tuple[nn.Module, Batches]:
    """A network of which filter 2 outputs the ceiling of its activation, and matters by that; filter 3 is dead."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 8, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        model[1].bias[2], model[1].bias[3] = 50.0, -50.0
        model[3].weight[:, 2] *= 3
    return model, [(torch.randn(32, 3, 5, 5, dtype=torch.float64), torch.arange(32) % 4) for _ in range(3)]


def test_a_channel_at_the_ceiling_matters_to_a_gate_behind_the_activation_only():
    model, batches = saturated()
    before = score_filters(model, "taylor", ["0"], batches).layers["0"].values
    behind = score_filters(model, "taylor_behind", ["0"], batches).layers["0"].values
    assert before[2] == before[3] == behind[3] == 0
    assert behind[2] > max(before)


def test_a_channel_at_the_ceiling_goes_free_where_its_mean_stays():
    model, batches = saturated()
    coupling = trace_coupling(model, batches[0][0])
    found = filter_loss(model, coupling, batches)
    assert found.scores.layers["0"].values[2] == found.scores.layers["0"].values[3] == 0
    keep = GroupPlan((0, 1, 4, 5), 6)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if value.dim()}
    plan = FilterPlan({"0": keep}, coupling, {"0.weight": shapes["0.weight"]}, 14, 0.1)
    x = batches[0][0]
    small = prune_filters(model, plan, compensate="mean", statistics=found.statistics)
    torch.testing.assert_close(small(x), model(x))
    assert not torch.allclose(prune_filters(model, plan)(x), model(x))


def test_the_gate_behind_is_the_squared_effect_of_all_readers_together():
    model, coupling, batches = images_for("residual")
    group = next(group for group in coupling.groups if "stem.0" in group.layers)
    readers = {name: parts[group.name] for name, parts in unit_inputs(model, coupling).items() if group.name in parts}
    assert len(readers) > 1
    total = torch.zeros(group.size, dtype=torch.float64)
    for images, labels in batches:
        products: list[Tensor] = []

        def note(_layer: nn.Module, args: tuple[Tensor], products: list[Tensor] = products) -> tuple[Tensor]:
            own = args[0] * 1
            own.register_hook(lambda gradient: products.append((gradient * own.detach()).sum((0, 2, 3))))
            return (own,)

        handles = [model.get_submodule(name).register_forward_pre_hook(note) for name in readers]
        F.cross_entropy(model(images.clone().requires_grad_(True)), labels).backward()
        for handle in handles:
            handle.remove()
        total += torch.stack(products).sum(0).square() / len(batches)
    values = score_filters(model, "taylor_behind", ["stem.0"], batches).layers["stem.0"].values
    np.testing.assert_allclose(values, total[np.argsort(unit_outputs(model, group, "stem.0").ravel())], rtol=1e-9)


def test_scores_predict_what_the_loss_does_when_a_filter_goes():
    torch.manual_seed(0)
    patterns, labels = torch.randn(4, 3, 8, 8), torch.arange(256) % 4
    images = patterns[labels] + 1.5 * torch.randn(256, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU6(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU6(),
        nn.Conv2d(16, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model = model.eval().double()
    batches = [(images.double(), labels)]
    coupling = trace_coupling(model, batches[0][0])
    found = filter_loss(model, coupling, batches)

    @torch.no_grad()
    def loss_of(network: nn.Module) -> float:
        return float(F.cross_entropy(network(batches[0][0]), labels))

    expected, measured = [], []
    whole = plan_filters(model, found.scores, 0.0, coupling=coupling)
    for group in coupling.groups:
        values = found.scores.layers[group.layers[0]].values
        for gone in range(group.size):
            keep = tuple(unit for unit in range(group.size) if unit != gone)
            groups = {**whole.groups, group.name: GroupPlan(keep, group.size)}
            plan = FilterPlan(groups, coupling, whole.shapes, whole.total, 0.0)
            small = prune_filters(model, plan, compensate="mean", statistics=found.statistics)
            expected.append(values[gone])
            measured.append(loss_of(small) - loss_of(model))
    ranks = [np.argsort(np.argsort(values)) for values in (expected, measured)]
    assert np.corrcoef(*ranks)[0, 1] > 0.7

    left = {}
    plan = plan_filters(model, found.scores, 0.4, PlanConfig(min_share=0.0), coupling=coupling)
    for how in ("none", "mean", "refit"):
        statistics = None if how == "none" else found.statistics
        left[how] = loss_of(prune_filters(model, plan, compensate=how, statistics=statistics))
    assert left["refit"] < min(left["mean"], left["none"])


def test_labels_are_needed():
    model, coupling, batches = images_for("plain")
    with pytest.raises(DataError, match=r"\(images, labels\) are needed"):
        filter_loss(model, coupling, [images for images, _ in batches])
    with pytest.raises(DataError, match="no batch came"):
        filter_loss(model, coupling, [])


def reading(seed: int, units: int, rank: int | None = None) -> Reading:
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(units, rank or units))
    return Reading(factors @ factors.T, rng.uniform(0.1, 2.0, units))


def lost(readings: list[Reading], keep: list[int]) -> float:
    """What least squares cannot predict of the units that go from those that stay."""
    total = 0.0
    for each in readings:
        gone = [unit for unit in range(len(each.metric)) if unit not in keep]
        inner = each.covariance[np.ix_(gone, gone)]
        if keep:
            cross = each.covariance[np.ix_(gone, keep)]
            inner = inner - cross @ np.linalg.pinv(each.covariance[np.ix_(keep, keep)]) @ cross.T
        total += float(np.diag(inner) @ each.metric[gone])
    return total


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(1, 3))
def test_keeping_the_worthiest_loses_at_most_what_the_others_are_worth(seed, units, layers):
    readings = [reading(seed + place, units) for place in range(layers)]
    worth = refit_worth(readings, np.zeros(units))
    order = np.argsort(-worth, kind="stable")
    for count in range(1, units):
        keep = sorted(order[:count].tolist())
        if len(set(np.round(worth, 12))) == units:
            assert lost(readings, keep) <= worth[order[count:]].sum() * (1 + 1e-6) + 1e-9


def test_units_that_have_nothing_in_common_are_worth_their_variance():
    variances, metric = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 4.0])
    worth = refit_worth([Reading(np.diag(variances), metric)], np.array([0.0, 0.5, 0.0]))
    assert worth == pytest.approx(variances * metric + [0.0, 0.5, 0.0])


def test_what_others_tell_completely_is_worth_nothing():
    found = reading(0, 6, rank=2)
    worth = np.sort(refit_worth([found], np.zeros(6)))
    assert worth[:4] == pytest.approx(0.0, abs=1e-9)
    assert worth.sum() == pytest.approx(float(np.diag(found.covariance) @ found.metric))
