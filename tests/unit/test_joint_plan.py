"""Laws of plans that remove basis vectors and filters together, and of the knapsack behind them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from tables import invented
from torch import Tensor, nn

from basisprune.basis.decompose import decompose, recompose
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.costs import measure, weight_uses
from basisprune.coupling import trace_coupling
from basisprune.coupling.cutting import find_blocks
from basisprune.deploy.fold import fold
from basisprune.deploy.timing import table_milliseconds, time_network, wanted_shapes
from basisprune.errors import PlanError, TooMuchError
from basisprune.importance import BasisLoss, FilterLoss, filter_loss, joint_loss
from basisprune.joint_plan import Lever, Point, explore, plan_frontier, plan_together
from basisprune.layer_times import NetworkTimes
from basisprune.planning import Array, PlanConfig, Queue
from basisprune.pruning import prune_filters, prune_together
from basisprune.torchkit.surgery import find_layers
from basisprune.types import BasisPlan, Coupling, JointPlan, LayerPlan, LayerScores, Scores

NOTHING = Scores("loss", {})
FREE = PlanConfig(per="parameter", min_share=0.0)


def measured(network: str, **options) -> tuple[nn.Module, Tensor, Coupling, BasisLoss, FilterLoss]:
    model, x = NETWORKS[network]()
    model = decompose(model, scale_init=1.0, **options)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(12, *x.shape[1:], generator=generator, dtype=x.dtype)
    batches = [(images[:6], torch.arange(6) % 4), (images[6:], torch.arange(6) % 3)]
    coupling = trace_coupling(model, x)
    return model, images, coupling, *joint_loss(model, coupling, batches)


def parameters(model: nn.Module) -> int:
    """All parameters but scales, each pair in the cheaper of its two forms."""
    cost = sum(value.numel() for value in model.parameters())
    for _, pair in find_layers(model, BasisPair):
        halves = pair.basis.weight.numel() + pair.scaling.weight.numel()
        cost += min(pair.weight.numel(), halves) - halves - pair.rank
    return cost


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_cost_left_is_what_the_pruned_network_costs(network, ratio):
    model, images, coupling, basis, filters = measured(network)
    plan = plan_together(model, basis.scores, filters.scores, ratio, FREE, coupling=coupling)
    assert plan.cost == parameters(model)
    small = prune_together(model, plan, compensate="none")
    assert plan.cost_left == parameters(small) <= (1 - ratio) * plan.cost
    assert small(images).shape == model(images).shape
    assert JointPlan.from_json(plan.to_json()) == plan
    if ratio == 0:
        assert plan.basis.removed == plan.filters.removed == plan.expected_loss == plan.fraction_removed == 0


@pytest.mark.parametrize("network", ["plain", "residual", "depthwise", "transposed", "one_dimensional", "used_twice"])
def test_multiply_adds_are_those_that_are_measured(network):
    model, x = NETWORKS[network]()
    coupling = trace_coupling(model, x)
    found = filter_loss(model, coupling, [(x, torch.tensor([0, 1]))])
    config, shape = PlanConfig(per="mac", min_share=0.0), tuple(x.shape[1:])
    plan = plan_together(model, NOTHING, found.scores, 0.4, config, coupling=coupling, costs=weight_uses(model, shape))
    assert plan.cost == measure(model, shape).macs
    small = prune_filters(model, plan.filters)
    assert plan.cost_left == measure(small, shape).macs <= 0.6 * plan.cost


def test_the_expected_loss_is_half_the_sum_of_what_goes():
    model, _, coupling, basis, filters = measured("plain")
    plan = plan_together(model, basis.scores, filters.scores, 0.5, FREE, coupling=coupling)
    lost = sum(
        sum(np.delete(basis.scores.layers[name].values, layer.keep)) for name, layer in plan.basis.layers.items()
    )
    for group in coupling.groups:
        values = np.asarray(filters.scores.layers[group.layers[0]].values)
        gone = set(range(group.size)) - set(plan.filters.groups[group.name].keep)
        lost += values[sorted(gone)].sum()
    assert plan.expected_loss == pytest.approx(lost / 2)


def test_of_one_rank_alone_no_more_goes_than_must_and_the_least_important():
    conv = nn.Sequential(nn.Conv2d(16, 16, 3, bias=False))
    model = decompose(conv, scale_init=1.0)
    values = tuple(float(value) for value in torch.randperm(16))
    scores = Scores("loss", {"0": LayerScores(values)})
    nothing = Coupling((), {}, ())
    for ratio in (0.3, 0.5, 0.8):
        plan = plan_together(model, scores, NOTHING, ratio, FREE, coupling=nothing)
        rank = int((1 - ratio) * 16 * 144 / (144 + 16))
        assert plan.basis.layers["0"].keep == tuple(sorted(np.argsort(values)[-rank:].tolist()))


def test_a_pair_goes_below_what_the_dense_conv_costs_or_stays_whole():
    model, _, coupling, basis, _ = measured("plain")
    for ratio in (0.05, 0.2, 0.4):
        plan = plan_together(model, basis.scores, NOTHING, ratio, FREE, coupling=coupling)
        small = prune_together(model, plan, compensate="none")
        for name, layer in plan.basis.layers.items():
            pair = basis_pairs(small)[name]
            halves = pair.basis.weight.numel() + pair.scaling.weight.numel()
            assert not layer.removed or halves < recompose(pair).weight.numel()


def test_what_is_worth_nothing_goes_first_and_floors_hold():
    model, _, coupling, basis, filters = measured("vgg_like")
    layers = dict(filters.scores.layers)
    name = coupling.groups[0].layers[0]
    values = list(layers[name].values)
    values[2] = values[5] = 0.0
    layers[name] = LayerScores(tuple(values))
    plan = plan_together(model, basis.scores, Scores("loss", layers), 0.1, FREE, coupling=coupling)
    assert not {2, 5} & set(plan.filters.groups[coupling.groups[0].name].keep)
    most = replace(FREE, min_share=0.5, round_to=2)
    plan = plan_together(model, basis.scores, filters.scores, 0.3, most, coupling=coupling)
    for layer in plan.basis.layers.values():
        assert len(layer.keep) >= layer.rank / 2
        assert len(layer.keep) % 2 == 0 or not layer.removed
    for group in plan.filters.groups.values():
        assert len(group.keep) >= group.size / 2


def test_together_the_expected_loss_is_not_larger_than_with_either_alone():
    model, _, coupling, basis, filters = measured("depthwise")
    for ratio in (0.3, 0.5):
        both = plan_together(model, basis.scores, filters.scores, ratio, FREE, coupling=coupling)
        alone = plan_together(model, NOTHING, filters.scores, ratio, FREE, coupling=coupling)
        assert both.expected_loss <= alone.expected_loss * (1 + 1e-9)


@pytest.mark.parametrize("compensate", ["none", "mean", "refit"])
@pytest.mark.parametrize("network", ["plain", "residual", "grouped", "transposed"])
def test_one_move_is_both_moves_and_leaves_the_model_alone(network, compensate):
    model, images, coupling, basis, filters = measured(network)
    plan = plan_together(model, basis.scores, filters.scores, 0.3, FREE, coupling=coupling)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    statistics = {} if compensate == "none" else {"basis": basis.statistics, "filters": filters.statistics}
    small = prune_together(model, plan, compensate=compensate, **statistics)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert small(images).isfinite().all()
    again = prune_together(model, plan, compensate=compensate, inplace=True, **statistics)
    assert again is model
    assert torch.equal(again(images), small(images))


def test_what_does_not_fit_is_refused():
    model, _, coupling, basis, filters = measured("plain")
    taylor, l1 = Scores("taylor", basis.scores.layers), Scores("l1", filters.scores.layers)
    with pytest.raises(PlanError, match="3 faults") as caught:
        plan_together(model, taylor, l1, 0.5, PlanConfig(), coupling=coupling)
    assert "only those in units of the loss compare" in str(caught.value)
    with pytest.raises(PlanError, match=r"needs the NetworkTimes of the model"):
        plan_together(model, basis.scores, NOTHING, 0.3, PlanConfig(per="latency"), coupling=coupling)
    with pytest.raises(PlanError, match=r"needs weight_uses\(model\)"):
        plan_together(model, basis.scores, NOTHING, 0.3, PlanConfig(per="mac"), coupling=coupling)
    with pytest.raises(PlanError, match="0 <= ratio < 1"):
        plan_together(model, basis.scores, filters.scores, 1.5, coupling=coupling)
    with pytest.raises(TooMuchError, match="must stay; pass at most"):
        plan_together(model, basis.scores, filters.scores, 0.999, coupling=coupling)
    dense, _ = NETWORKS["plain"]()
    short = Scores("loss", {"3": LayerScores((1.0,) * 11)})
    with pytest.raises(PlanError, match=r"^3: 11 scores given, the model has rank 12 there"):
        plan_together(model, short, NOTHING, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="pass coupling="):
        plan_together(dense, NOTHING, filters.scores, 0.3)


def timed(model: nn.Module, images: Tensor, block: int) -> NetworkTimes:
    shape = tuple(images.shape[1:])
    return time_network(model, shape, invented(wanted_shapes(recompose(model), shape), block=block))


@pytest.mark.parametrize("network", ["plain", "residual", "depthwise", "concat", "used_twice"])
def test_by_latency_the_cost_left_is_what_the_table_says_of_the_folded_network(network):
    model, images, coupling, basis, filters = measured(network)
    times = timed(model, images, 1)
    config = PlanConfig(per="latency", min_share=0.0, round_to=1)
    plan = plan_together(model, basis.scores, filters.scores, 0.4, config, coupling=coupling, costs=times)
    small = fold(prune_together(model, plan, compensate="none"), images, "latency", times=times.table)
    left = table_milliseconds(small, tuple(images.shape[1:]), times.table) / 1000
    assert plan.cost_left == pytest.approx(left)
    assert plan.cost_left <= 0.6 * plan.cost


def test_by_latency_ranks_and_widths_come_in_the_blocks_of_the_device():
    model, images, coupling, basis, filters = measured("vgg_like")
    times = timed(model, images, 4)
    config = PlanConfig(per="latency", min_share=0.0)
    plan = plan_together(model, basis.scores, filters.scores, 0.5, config, coupling=coupling, costs=times)
    kept = [(len(layer.keep), layer.rank) for layer in plan.basis.layers.values()]
    kept += [(len(group.keep), group.size) for group in plan.filters.groups.values()]
    assert all(count % 4 == 0 or count == whole for count, whole in kept)
    assert any(count < whole for count, whole in kept)


def test_a_block_that_is_worth_nothing_goes_and_one_that_is_worth_much_stays():
    torch.manual_seed(0)
    ends = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(288, 4)
    net = nn.Sequential(*ends[:2], Added(8), Added(8), nn.Flatten(), ends[2])
    model = decompose(net.double().eval(), scale_init=1.0)
    images = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    coupling, found = trace_coupling(model, images), find_blocks(model, images)
    assert [block.name for block in found] == ["2", "3"]
    worth = {"0": 1.0, "2.conv": 1e-6, "3.conv": 10.0}
    scores = Scores("loss", {name: LayerScores((value,) * 8) for name, value in worth.items()})
    frontier = plan_frontier(model, scores, NOTHING, FREE, coupling=coupling, blocks=found)
    plan = frontier.plan(0.2)
    assert plan.blocks == (found[0],)
    assert plan.expected_loss == pytest.approx(8e-6 / 2)
    assert plan.basis.layers["2.conv"].removed == 0
    small = prune_together(model, plan, compensate="none")
    assert list(basis_pairs(small)) == ["0", "3.conv"]
    assert plan.cost_left == parameters(small) - 8  # the shift, which goes into the norm before it
    folded = fold(small, images)
    assert isinstance(folded[2], nn.Identity)
    assert torch.allclose(folded(images), small(images), rtol=0, atol=1e-10)
    assert JointPlan.from_json(plan.to_json()) == plan
    assert frontier.plan(0.0).blocks == ()


def test_of_a_block_whose_last_pair_is_trimmed_too_the_mean_stays():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Added(8), nn.Flatten(), nn.Linear(288, 4))
    model = decompose(net.double().eval(), scale_init=1.0)
    images = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    seen: list[Tensor] = []
    handle = basis_pairs(model)["1.conv"].scaling.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features = model[0](images)
    added = model[1](features) - features
    handle.remove()
    means = tuple(seen[0].mean(dim=(0, 2, 3)).tolist())
    trimmed = BasisPlan({"1.conv": LayerPlan((0, 2, 5), 8, means)}, 0.5)
    scores = Scores("loss", {name: LayerScores((1.0,) * pair.rank) for name, pair in basis_pairs(model).items()})
    nothing = plan_frontier(model, scores, NOTHING, FREE, coupling=trace_coupling(model, images)).plan(0.0)
    plan = replace(nothing, basis=trimmed, blocks=find_blocks(model, images))
    small = prune_together(model, plan, compensate="mean", filters={})
    assert torch.allclose(small[1](features), features + added.mean(dim=(0, 2, 3), keepdim=True), rtol=0, atol=1e-10)


class Added(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


@dataclass
class Apart:
    """Levers that do not touch each other; each has a cost for each of its levels."""

    tables: dict[int, Array]
    now: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = {key: float(table[-1]) for key, table in self.tables.items()}

    def costs(self, lever: Lever, level: int) -> Array:
        return self.tables[self.key(lever)]

    def move(self, lever: Lever, before: int, after: int) -> None:
        self.now[self.key(lever)] = float(self.tables[self.key(lever)][after])

    def total(self) -> float:
        return sum(self.now.values())

    @staticmethod
    def key(lever: Lever) -> int:
        return int(next(iter(lever.reach))[0])


@st.composite
def problems(draw):
    levers, tables = [], {}
    block = draw(st.sampled_from([1, 2, 4]))
    for number in range(draw(st.integers(1, 4))):
        scores = np.array(draw(st.lists(st.floats(0.01, 100), min_size=2, max_size=12)))
        config = PlanConfig(round_to=block, min_keep=draw(st.integers(1, 3)), min_share=0.0)
        queue = Queue.of(scores, np.arange(len(scores))[None], 1.0, config)
        levers.append(Lever.of(queue, {(str(number), 0): 1.0}))
        steps = draw(st.lists(st.floats(0.1, 10), min_size=len(queue.starts), max_size=len(queue.starts)))
        tables[number] = np.cumsum(steps)
    return levers, tables, block


def best(points: tuple[Point, ...], goal: float) -> Point:
    return min((point for point in points if point.cost <= goal), key=lambda point: (point.loss, point.cost))


@settings(max_examples=60)
@given(problems(), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_a_larger_budget_never_loses_more_and_every_budget_is_kept(problem, shares):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    least = min(point.cost for point in points)
    assert least == sum(float(table.min()) for table in tables.values())
    whole = points[0].cost
    goals = sorted(least + share * (whole - least) for share in shares)
    losses = [best(points, goal).loss for goal in goals]
    assert losses == sorted(losses, reverse=True)
    assert best(points, whole).loss == 0.0


@settings(max_examples=60)
@given(problems())
def test_it_is_never_worse_than_a_single_threshold(problem):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    values = sorted({value for lever in levers for value in lever.queue.values})
    for threshold in values:
        levels = [sum(value > threshold for value in lever.queue.values) for lever in levers]
        cost = sum(float(tables[place][level]) for place, level in enumerate(levels))
        loss = sum(float(lever.losses[level]) for lever, level in zip(levers, levels, strict=True))
        assert best(points, cost * (1 + 1e-12)).loss <= loss * (1 + 1e-12)


@settings(max_examples=60)
@given(problems())
def test_what_is_kept_is_in_blocks_and_above_the_floor_and_the_costs_add_up(problem):
    levers, tables, block = problem
    sizes = Apart(tables)
    points = explore(levers, sizes)
    assert sizes.total() == points[0].cost  # it is left as it was
    for point in points:
        exact = sum(float(tables[place][level]) for place, level in enumerate(point.levels))
        assert abs(point.cost - exact) <= 1e-9 * exact
        for lever, level in zip(levers, point.levels, strict=True):
            kept = lever.queue.starts[level]
            width = lever.queue.order.shape[1]
            assert kept == width or (kept % block == 0 and kept >= lever.queue.starts[0])


@settings(max_examples=60)
@given(problems(), st.floats(0.01, 100))
def test_for_every_price_levers_apart_are_set_as_trying_all_settings_would(problem, price):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    least = sum(float(np.min(lever.losses + price * tables[place])) for place, lever in enumerate(levers))
    found = min(point.loss + price * point.cost for point in points)
    # Steps of the cost that are finer than a few thousandths are left out.
    assert found <= least + 0.01 * price * points[0].cost
