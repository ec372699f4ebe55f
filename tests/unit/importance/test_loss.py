"""Laws of what a basis vector is worth to the loss."""

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
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.basis.loss_axes import metric_roots, with_ridge
from basisprune.basis.refit import basis_statistics, rebase
from basisprune.coupling import trace_coupling, unit_inputs, unit_outputs
from basisprune.errors import DataError, ModelError, TrainingError
from basisprune.importance import basis_loss, filter_loss, filter_statistics, loss_scores, score_filters, taylor_scores
from basisprune.importance.loss import BasisLoss, Reading, refit_worth, split_by_loss
from basisprune.planning import PlanConfig, plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.torchkit.moments import loss_statistics
from basisprune.torchkit.surgery import find_layers
from basisprune.types import BasisPlan, Coupling, FilterPlan, GroupPlan, LayerPlan, Scores

Batches = list[tuple[Tensor, Tensor]]


def images_for(network: str, count: int = 24) -> tuple[nn.Module, Batches]:
    model, x = NETWORKS[network]()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, *x.shape[1:], generator=generator, dtype=x.dtype)
    labels = torch.randint(4, (count,), generator=generator)
    return model, list(zip(images.split(10), labels.split(10), strict=True))


def by_hand(model: nn.Module, name: str, batches: Batches) -> Tensor:
    """var(z) v^T G v with the gradients of every image by itself."""
    pair = basis_pairs(model)[name]
    axis = 1 if pair.scaling.spatial_dims else -1
    features: list[Tensor] = []
    gradients: list[Tensor] = []

    def rows(tensor: Tensor) -> Tensor:
        return tensor.movedim(axis, -1).flatten(0, -2)

    def note(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        features.append(rows(args[0].detach()))
        output.register_hook(lambda gradient: gradients.append(rows(gradient)))

    handle = pair.scaling.register_forward_hook(note)
    images = 0
    for batch, labels in batches:
        for image, label in zip(batch, labels, strict=True):
            F.cross_entropy(model(image[None].clone().requires_grad_(True)), label[None]).backward()
            images += 1
    handle.remove()
    model.zero_grad()
    groups = pair.scaling.groups
    variances = torch.cat(features).var(0, correction=0)
    columns = pair.scaling.scaled_weight().detach().flatten(1).unflatten(0, (groups, -1))
    parts = torch.cat(gradients).unflatten(1, (groups, -1)).unbind(1)
    metric = with_ridge(torch.stack([part.mT @ part / images for part in parts]))
    return variances * torch.einsum("gor,gop,gpr->gr", columns, metric, columns).flatten()


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_scores_are_variance_times_the_length_of_the_column_in_the_metric(network, linear):
    model, batches = images_for(network)
    model = decompose(model, scale_init=0.8, linear=linear)
    for pair in basis_pairs(model).values():
        nn.init.uniform_(pair.scaling.scale, 0.0, 1.0)
    before = copy.deepcopy(model.state_dict())
    scores = loss_scores(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert scores.method == "loss"
    assert Scores.from_json(scores.to_json()) == scores
    other = taylor_scores(model, batches)
    for name, layer in scores.layers.items():
        expected = by_hand(model, name, batches)
        torch.testing.assert_close(torch.tensor(layer.values).double(), expected, rtol=1e-5, atol=1e-12)
        beside = other.layers[name]
        assert (layer.groups, layer.parameters, layer.macs) == (beside.groups, beside.parameters, beside.macs)
        assert layer.means == pytest.approx(beside.means)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_scores_of_a_fresh_loss_basis_are_its_eigenvalues(network, linear):
    model, batches = images_for(network)
    scores = loss_scores(decompose(model, scale_init=1.0, basis="loss", batches=batches, linear=linear), batches)
    found = loss_statistics(model, list(scores.layers), batches)
    for name, layer in scores.layers.items():
        root, _ = metric_roots(found[name].metric)
        worth = torch.linalg.eigvalsh(root @ found[name].covariance @ root).flip(-1)
        values = torch.tensor(layer.values, dtype=torch.float64).view(layer.groups, -1)
        assert (values.diff(dim=1) <= 1e-9 * values.max()).all()
        torch.testing.assert_close(values, worth[:, : values.shape[1]], rtol=1e-6, atol=1e-9 * float(worth.max()))


def test_turned_to_the_loss_basis_a_network_has_its_scores():
    model, batches = images_for("residual")
    fresh = loss_scores(decompose(model, scale_init=1.0, basis="loss", batches=batches), batches)
    turned = loss_scores(rebase(decompose(model, scale_init=1.0), batches, basis="loss"), batches)
    for name, layer in fresh.layers.items():
        assert turned.layers[name].values == pytest.approx(layer.values, rel=1e-6, abs=1e-9 * layer.values[0])


def test_the_statistics_beside_the_scores_are_those_to_refit_with():
    model, batches = images_for("grouped")
    model = decompose(model, scale_init=0.7)
    both = basis_loss(model, batches)
    assert both.scores == loss_scores(model, batches)
    for name, found in basis_statistics(model, batches).items():
        torch.testing.assert_close(both.statistics[name].mean, found.mean)
        torch.testing.assert_close(both.statistics[name].covariance, found.covariance)
    plan = plan_basis(both.scores, 0.4)
    assert prune_basis(model, plan, compensate="refit", statistics=both.statistics) is not model


def test_a_vector_that_nothing_reads_or_that_never_changes_is_worth_nothing():
    model, batches = images_for("plain")
    model = decompose(model)
    pair = basis_pairs(model)["3"]
    pair.scaling.scale.data[2] = 0
    pair.basis.weight.data[4] = 0
    values = loss_scores(model, batches).layers["3"].values
    assert values[2] == 0
    assert values[4] == pytest.approx(0, abs=1e-15)
    assert min(value for place, value in enumerate(values) if place not in (2, 4)) > 0


def test_twice_the_loss_makes_four_times_the_scores():
    model, batches = images_for("plain")
    model = decompose(model)
    doubled = loss_scores(model, batches, loss=lambda out, y: 2 * F.cross_entropy(out, y))
    for name, layer in loss_scores(model, batches).layers.items():
        assert doubled.layers[name].values == pytest.approx([4 * value for value in layer.values])


def test_the_size_of_batches_does_not_matter():
    model, batches = images_for("depthwise")
    model = decompose(model)
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    whole = loss_scores(model, [(images, labels)])
    for name, layer in loss_scores(model, batches).layers.items():
        assert whole.layers[name].values == pytest.approx(layer.values)


# What the scores say, on a network that has learnt something


def learnt() -> tuple[nn.Module, Batches]:
    """A small network trained on patterns under noise, and the images it has learnt."""
    torch.manual_seed(0)
    patterns = torch.randn(4, 3, 8, 8)
    labels = torch.arange(256) % 4
    images = patterns[labels] + 1.5 * torch.randn(256, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.double().eval(), [(images.double(), labels)]


@torch.no_grad()
def loss_of(model: nn.Module, batches: Batches) -> float:
    ((images, labels),) = batches
    return float(F.cross_entropy(model(images), labels))


def ranks_agree(first: list[float], second: list[float]) -> float:
    """Spearman's correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("basis", ["weights", "outputs", "loss"])
def test_scores_predict_what_the_loss_does_when_a_vector_goes(basis):
    model, batches = learnt()
    given = {"weights": None, "outputs": batches, "loss": batches}[basis]
    split = decompose(model, scale_init=1.0, basis=basis, batches=given)
    scores, before = loss_scores(split, batches), loss_of(split, batches)
    expected, measured = [], []
    for name, layer in scores.layers.items():
        rank = len(layer.values)
        for gone in range(rank):
            keep = tuple(place for place in range(rank) if place != gone)
            pruned = prune_basis(split, BasisPlan({name: LayerPlan(keep, rank, layer.means)}, 0.1))
            expected.append(layer.values[gone])
            measured.append(loss_of(pruned, batches) - before)
    assert ranks_agree(expected, measured) > 0.7


def test_loss_basis_and_scores_lose_less_than_those_of_the_weights_at_every_ratio():
    model, batches = learnt()
    ways = {
        "weights": decompose(model, scale_init=1.0),
        "outputs": decompose(model, scale_init=1.0, basis="outputs", batches=batches),
        "loss": decompose(model, scale_init=1.0, basis="loss", batches=batches),
    }
    for ratio in (0.3, 0.5, 0.7):
        left = {}
        for way, split in ways.items():
            both = basis_loss(split, batches)
            plan = plan_basis(both.scores, ratio)
            left[way] = loss_of(prune_basis(split, plan, compensate="refit", statistics=both.statistics), batches)
        assert left["loss"] <= min(left.values()) * 1.05


def test_what_cannot_be_scored_is_refused():
    model, batches = images_for("plain")
    with pytest.raises(ModelError, match=r"call decompose\(model\) first"):
        loss_scores(model, batches)
    model = decompose(model)
    with pytest.raises(DataError, match="no batch came"):
        loss_scores(model, [])
    with pytest.raises(DataError, match=r"\(images, labels\) are needed, Tensor given"):
        loss_scores(model, [batches[0][0]])
    images, labels = batches[0]
    with pytest.raises(TrainingError, match="the loss of batch 1 is nan"):
        loss_scores(model, [(images, labels), (images * torch.nan, labels)])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def agree(found: BasisLoss, wanted: BasisLoss) -> None:
    assert found.scores.layers.keys() == wanted.scores.layers.keys()
    for name, layer in wanted.scores.layers.items():
        here = found.scores.layers[name]
        assert here.values == pytest.approx(layer.values, rel=1e-6, abs=1e-9 * max(layer.values))
        assert here.means == pytest.approx(layer.means, rel=1e-6, abs=1e-9)
        assert (here.groups, here.parameters, here.macs) == (layer.groups, layer.parameters, layer.macs)
        known, there = found.statistics[name], wanted.statistics[name]
        torch.testing.assert_close(known.covariance, there.covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_one_pass_tells_what_a_split_and_its_scores_tell_in_two(network, linear):
    model, batches = images_for(network)
    split, found = split_by_loss(model, batches, linear=linear)
    in_two = decompose(model, scale_init=1.0, basis="loss", batches=batches, linear=linear)
    torch.testing.assert_close(split.state_dict(), in_two.state_dict())
    agree(found, basis_loss(in_two, batches))


def test_one_pass_counts_images_of_all_sizes_and_reads_them_once():
    torch.manual_seed(0)
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, stride=2), *pooled).double()
    batches = [(torch.randn(5, 3, side, side).double(), torch.arange(5) % 4) for side in (4, 8)]
    _, found = split_by_loss(model, iter(batches))
    agree(found, basis_loss(decompose(model, scale_init=1.0, basis="loss", batches=batches), batches))


def test_there_are_no_scores_where_nothing_can_be_split():
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(), nn.Linear(4, 4))
    split, found = split_by_loss(model, [(torch.randn(4, 3, 2, 2), torch.arange(4))])
    assert not found.scores.layers
    assert not list(find_layers(split, BasisPair))


def filtered_images(network: str, count: int = 20) -> tuple[nn.Module, Coupling, Batches]:
    model, x = NETWORKS[network]()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, *x.shape[1:], generator=generator, dtype=x.dtype)
    labels = torch.randint(4, (count,), generator=generator)
    return model, trace_coupling(model, x), list(zip(images.split(8), labels.split(8), strict=True))


def filter_by_hand(model: nn.Module, name: str, batches: Batches) -> Tensor:
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
    model, coupling, batches = filtered_images(network)
    if split:
        model = decompose(model, scale_init=0.8)
        coupling = trace_coupling(model, batches[0][0])
    before = copy.deepcopy(model.state_dict())
    found = filter_loss(model, coupling, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert set(found.scores.layers) == set(coupling.layers)
    readers = unit_inputs(model, coupling)
    channels = {name: filter_by_hand(model, name, batches) for name in readers}
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
    model, coupling, batches = filtered_images(network)
    alone = filter_statistics(model, coupling, [images for images, _ in batches])
    for name, found in filter_loss(model, coupling, batches).statistics.items():
        torch.testing.assert_close(found.mean, alone[name].mean)
        torch.testing.assert_close(found.covariance, alone[name].covariance)


def test_the_method_of_that_name_gives_the_same_scores():
    model, coupling, batches = filtered_images("depthwise")
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
    model, coupling, batches = filtered_images("residual")
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
    model, coupling, batches = filtered_images("plain")
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
