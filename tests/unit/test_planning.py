"""Laws of the plan: what is kept, how much goes, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from tiny import tiny_model
from torch import nn
from zeroing import FREE, planned_filters

from basisprune.coupling import trace_coupling
from basisprune.errors import ConfigError, PlanError
from basisprune.importance import score_filters
from basisprune.planning import PlanConfig, count_filters, plan_basis, plan_filters
from basisprune.pruning import prune_filters
from basisprune.types import BasisPlan, LayerScores, Scores

MANY = settings(max_examples=150, deadline=None)
values = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1e6, allow_subnormal=False)
configs = st.builds(
    PlanConfig,
    normalise=st.sampled_from(["max", "mean", "median", "none"]),
    min_keep=st.integers(1, 4),
    min_share=st.floats(0, 0.5),
)


@st.composite
def scores(draw, most_groups: int = 1) -> Scores:
    layers = {}
    for index in range(draw(st.integers(1, 5))):
        groups, width = draw(st.integers(1, most_groups)), draw(st.integers(1, 12))
        size = groups * width
        layers[f"layer{index}"] = LayerScores(tuple(draw(st.lists(values, min_size=size, max_size=size))), groups)
    return Scores("taylor", layers)


def floors(given_scores: Scores, config: PlanConfig) -> dict[str, int]:
    """The least that each group of each layer keeps."""
    least = {}
    for name, layer in given_scores.layers.items():
        width = len(layer.values) // layer.groups
        share = math.ceil(config.min_share * width - 1e-9)
        least[name] = min(width, max(math.ceil(config.min_keep / layer.groups), share))
    return least


def removable(given_scores: Scores, config: PlanConfig) -> int:
    least = floors(given_scores, config)
    return sum(len(layer.values) - layer.groups * least[name] for name, layer in given_scores.layers.items())


def total(given_scores: Scores) -> int:
    return sum(len(layer.values) for layer in given_scores.layers.values())


def possible_ratio(given_scores: Scores, share: float, config: PlanConfig) -> float:
    """The ratio that removes this share of all that may be removed."""
    return share * removable(given_scores, config) / total(given_scores)


def normalised(layer: LayerScores, how: str) -> np.ndarray:
    array = np.array(layer.values)
    size = {"max": array.max(), "mean": array.mean(), "median": np.median(array), "none": 1.0}[how]
    with np.errstate(over="ignore"):
        return array / size if size > 0 else array


@MANY
@given(scores(), st.floats(0, 1, exclude_max=True), configs)
def test_exactly_the_asked_number_goes_or_the_possible_ratio_is_named(given_scores, ratio, config):
    goal = round(ratio * total(given_scores))
    if goal > removable(given_scores, config):
        with pytest.raises(PlanError, match="pass at most") as caught:
            plan_basis(given_scores, ratio, config)
        possible = float(re.search(r"pass at most ([\d.]+),", str(caught.value)).group(1))
        assert plan_basis(given_scores, possible, config).removed <= removable(given_scores, config)
        return
    plan = plan_basis(given_scores, ratio, config)
    assert (plan.removed, plan.total) == (goal, total(given_scores))
    for name, least in floors(given_scores, config).items():
        assert len(plan.layers[name].keep) >= least
        assert list(plan.layers[name].keep) == sorted(set(plan.layers[name].keep))
    assert BasisPlan.from_json(plan.to_json()) == plan
    assert plan == plan_basis(given_scores, ratio, config)


@MANY
@given(scores(), st.floats(0, 1), configs)
def test_no_vector_that_goes_scores_higher_than_one_that_could_have_gone(given_scores, share, config):
    plan = plan_basis(given_scores, possible_ratio(given_scores, share, config), config)
    gone, free = [], []
    for name, layer in given_scores.layers.items():
        array, keep = normalised(layer, config.normalise), plan.layers[name].keep
        lost = [array[index] for index in range(len(array)) if index not in keep]
        gone += lost
        assert not lost or max(lost) <= min(array[list(keep)])
        if len(keep) > floors(given_scores, config)[name]:
            free.append(min(array[list(keep)]))
    assert not gone or not free or max(gone) <= min(free)


@MANY
@given(scores(), st.floats(0, 1), st.floats(0, 1), configs)
def test_a_larger_ratio_keeps_a_part_of_what_a_smaller_one_keeps(given_scores, one, other, config):
    low, high = (possible_ratio(given_scores, share, config) for share in sorted([one, other]))
    more, less = plan_basis(given_scores, low, config), plan_basis(given_scores, high, config)
    assert all(set(less.layers[name].keep) <= set(more.layers[name].keep) for name in more.layers)


@MANY
@given(scores(most_groups=4), st.floats(0, 0.9), configs)
def test_groups_keep_equally_many_and_the_number_falls_short_by_less_than_one_slot(given_scores, ratio, config):
    goal = round(ratio * total(given_scores))
    if goal > removable(given_scores, config):
        with pytest.raises(PlanError, match="pass at most"):
            plan_basis(given_scores, ratio, config)
        return
    plan = plan_basis(given_scores, ratio, config)
    assert 0 <= goal - plan.removed < max(layer.groups for layer in given_scores.layers.values())
    for name, layer in given_scores.layers.items():
        width = len(layer.values) // layer.groups
        counts = np.bincount(np.array(plan.layers[name].keep) // width, minlength=layer.groups)
        assert len(set(counts)) == 1
        assert counts[0] >= floors(given_scores, config)[name]
        array = np.array(layer.values).reshape(layer.groups, width)
        for group in range(layer.groups):
            kept = [index - group * width for index in plan.layers[name].keep if index // width == group]
            lost = sorted(set(range(width)) - set(kept))
            assert not lost or array[group, lost].max() <= array[group, kept].min()


@MANY
@given(scores(most_groups=3), st.floats(0, 0.9), st.sampled_from([2, 3, 4, 8]))
def test_with_round_to_every_layer_keeps_a_multiple_or_all(given_scores, ratio, multiple):
    config = PlanConfig(min_share=0.0, round_to=multiple)
    try:
        plan = plan_basis(given_scores, ratio, config)
    except PlanError as error:
        possible = float(re.search(r"pass at most ([\d.]+),", str(error)).group(1))
        plan = plan_basis(given_scores, possible, config)
    assert plan.removed <= round(ratio * plan.total)
    for layer in plan.layers.values():
        assert len(layer.keep) % multiple == 0 or len(layer.keep) == layer.rank


def test_ties_go_from_the_first_layer_and_the_last_vector_on():
    tied = Scores("taylor", {"a": LayerScores((1.0,) * 4), "b": LayerScores((1.0,) * 4)})
    keep = {ratio: [layer.keep for layer in plan_basis(tied, ratio).layers.values()] for ratio in (0.25, 0.5)}
    assert keep == {0.25: [(0, 1), (0, 1, 2, 3)], 0.5: [(0,), (0, 1, 2)]}


def test_normalisation_makes_layers_of_different_size_comparable():
    given_scores = Scores("taylor", {"small": LayerScores((4e-9, 2e-9)), "large": LayerScores((9.0, 1.0))})
    kept = {how: plan_basis(given_scores, 0.25, PlanConfig(how)).layers["small"].keep for how in ("max", "none")}
    assert kept == {"max": (0, 1), "none": (0,)}


def test_one_dominant_score_starves_a_layer_by_the_maximum_but_not_by_the_mean():
    dominated = LayerScores((1000.0, *[1.0] * 9))
    given_scores = Scores("taylor", {"dominated": dominated, "even": LayerScores((1.0, *[0.02] * 9))})
    by_max = plan_basis(given_scores, 0.45, PlanConfig("max", min_share=0.0))
    assert by_max.layers["dominated"].keep == (0,)
    assert len(plan_basis(given_scores, 0.45, PlanConfig("max", min_share=0.3)).layers["dominated"].keep) == 3


def test_a_layer_without_any_importance_goes_first_but_is_not_emptied():
    given_scores = Scores("taylor", {"dead": LayerScores((0.0,) * 4), "alive": LayerScores((1.0, 2.0, 3.0, 4.0))})
    plan = plan_basis(given_scores, 0.5)
    assert (plan.layers["dead"].keep, plan.layers["alive"].keep) == ((0,), (1, 2, 3))


def test_a_floor_that_is_a_whole_number_is_not_rounded_up():
    config = PlanConfig(min_share=0.07)
    plan = plan_basis(Scores("taylor", {"a": LayerScores(tuple(map(float, range(100))))}), 0.93, config)
    assert plan.layers["a"].keep == tuple(range(93, 100))


def test_per_cost_the_expensive_layer_gives_more():
    cheap = LayerScores((1.0, 1.1, 1.2, 1.3), parameters=10, macs=700)
    dear = LayerScores((5.0, 5.1, 5.2, 5.3), parameters=100, macs=400)
    given_scores = Scores("taylor", {"cheap": cheap, "dear": dear})
    config = PlanConfig(min_share=0.0)
    lost = {
        per: [layer.removed for layer in plan_basis(given_scores, 0.25, replace(config, per=per)).layers.values()]
        for per in ("vector", "parameter", "mac")
    }
    assert lost == {"vector": [2, 0], "parameter": [0, 2], "mac": [2, 0]}


@MANY
@given(scores(most_groups=3), st.floats(0, 0.9), configs, st.sampled_from(["parameter", "mac"]), st.integers(1, 10**9))
def test_where_all_vectors_cost_the_same_the_cost_is_as_if_it_were_one(given_scores, ratio, config, per, cost):
    ones, same = (
        Scores("", {name: replace(layer, parameters=n, macs=n) for name, layer in given_scores.layers.items()})
        for n in (1, 2 ** cost.bit_length())  # a power of two divides without rounding
    )
    assume(all(v == 0 or v > 1e-200 for layer in given_scores.layers.values() for v in layer.values))
    try:
        expected = plan_basis(given_scores, ratio, config).layers
    except PlanError:
        return
    assert plan_basis(ones, ratio, replace(config, per=per)).layers == expected
    assert plan_basis(same, ratio, replace(config, per=per)).layers == expected


@pytest.mark.parametrize(("per", "cost"), [("parameter", "macs"), ("mac", "parameters")])
def test_per_cost_needs_costs(per, cost):
    given_scores = Scores("l1", {"a": LayerScores((1.0, 2.0), **{cost: 3})})
    with pytest.raises(PlanError, match=f"^a: per='{per}' needs the cost of a vector"):
        plan_basis(given_scores, 0.5, PlanConfig(per=per))
    negative = Scores("l1", {"a": LayerScores((1.0, 2.0), parameters=-1, macs=-1)})
    with pytest.raises(PlanError, match="a: a vector cannot cost -1"):
        plan_basis(negative, 0.5, PlanConfig(per=per))


def test_filters_have_no_such_cost():
    with pytest.raises(PlanError, match="per: 'mac' given; filters are compared as they are"):
        plan_filters(None, Scores("l1", {}), 0.5, PlanConfig(per="mac"), coupling=None)


def test_vectors_that_cost_nothing_can_be_planned():
    idle = LayerScores((0.0, 0.0), parameters=9, macs=0)
    given_scores = Scores("taylor", {"idle": idle, "busy": LayerScores((1.0, 2.0), parameters=9, macs=9)})
    assert plan_basis(given_scores, 0.25, PlanConfig(per="mac")).layers["idle"].keep == (0,)


def test_means_options_and_method_travel_with_the_plan():
    given_scores = Scores("taylor", {"a": LayerScores((1.0, 2.0), means=(0.5, -0.5))})
    plan = plan_basis(given_scores, 0.5, PlanConfig("max", 1, 0.0))
    assert plan.layers["a"].means == (0.5, -0.5)
    assert plan.options == {"scores": "taylor", **dataclasses.asdict(PlanConfig("max", 1, 0.0))}
    assert plan.pruning_ratio == 0.5


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, math.nan])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(PlanError, match="it is the fraction removed"):
        plan_basis(Scores("taylor", {"a": LayerScores((1.0, 2.0))}), ratio)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerScores(()), "a: scores must be finite and not negative; none given"),
        (LayerScores((1.0, math.nan)), "a: scores must be finite and not negative; nan given"),
        (LayerScores((1.0, math.inf)), "inf given"),
        (LayerScores((1.0, -2.0)), r"-2\.0 given"),
        (LayerScores((1.0, 2.0, 3.0), groups=2), "a: 3 scores cannot be shared evenly by 2 groups"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused_by_name(layer, message):
    with pytest.raises(PlanError, match=message):
        plan_basis(Scores("taylor", {"a": layer}), 0.5)


def test_wrong_settings_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="6 faults") as caught:
        PlanConfig("maximum", min_keep=0, min_share=2.0, round_to=0, reduce="median", per="flop")
    words = ("'maximum'", "min_keep: 0", "min_share: 2.0", "round_to: 0", "reduce: 'median'", "per: 'flop'")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_number_that_goes_is_exact_up_to_what_is_coupled(name):
    model, _, plan = planned_filters(name, 0.25)
    counts = {k: m.out_channels for k, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    small = prune_filters(model, plan)
    after = {k: m.out_channels for k, m in small.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    assert plan.total == sum(counts.values())
    assert plan.removed == sum(counts.values()) - sum(after.values())
    once = max(sum(group.filters.values()) // group.size * len(group.parts) for group in plan.coupling.groups)
    assert 0 <= round(0.25 * plan.total) - plan.removed < once
    assert min(after.values()) >= 1


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["plain", "grouped", "residual"]), st.floats(0, 0.6), st.sampled_from([2, 3, 4]))
def test_round_to_keeps_multiples_of_filters_or_all(name, ratio, multiple):
    config = dataclasses.replace(FREE, round_to=multiple)
    try:
        _, _, plan = planned_filters(name, ratio, config)
    except PlanError as error:  # too much for blocks of this size
        possible = float(re.search(r"pass at most ([\d.]+),", str(error)).group(1))
        _, _, plan = planned_filters(name, possible, config)
    for group in plan.coupling.groups:
        kept = len(plan.groups[group.name].keep)
        assert kept == group.size or kept % (multiple // math.gcd(multiple, len(group.parts))) == 0


def test_the_least_important_filters_go_and_coupled_ones_by_their_reduction():
    model, images = NETWORKS["residual"]()
    coupling = trace_coupling(model, images)
    group = next(group for group in coupling.groups if "stem.0" in group.layers)
    assert set(group.layers) == {"stem.0", "conv2"}
    flat = {name: LayerScores((1.0,) * model.get_submodule(name).out_channels) for name in coupling.layers}
    flat["stem.0"] = LayerScores((0.1, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0))
    flat["conv2"] = LayerScores((0.1, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0))
    two_filters = 2 / count_filters(model, coupling)
    gone = {}
    for reduce in ("mean", "min", "max", "sum"):
        config = dataclasses.replace(FREE, reduce=reduce)
        plan = plan_filters(model, Scores("l1", flat), two_filters, config, coupling=coupling)
        gone[reduce] = set(range(8)) - set(plan.groups[group.name].keep)
    assert gone == {"mean": {0}, "min": {3}, "max": {0}, "sum": {0}}


def test_missing_scores_and_too_much_are_refused_by_name():
    model, images = NETWORKS["plain"]()
    coupling = trace_coupling(model, images)
    scores = score_filters(model, "l1", coupling.layers)
    missing = Scores("l1", {name: given for name, given in scores.layers.items() if name != "3"})
    with pytest.raises(PlanError, match="3: has no scores"):
        plan_filters(model, missing, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="pass at most"):
        plan_filters(model, scores, 0.99, coupling=coupling)
    short = Scores("l1", scores.layers | {"3": LayerScores((1.0,) * 5)})
    with pytest.raises(PlanError, match="3: 5 scores given"):
        plan_filters(model, short, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="fraction removed"):
        plan_filters(model, scores, 1.0, coupling=coupling)


def test_a_transfer_model_is_traced_where_no_coupling_is_given():
    model = tiny_model()
    coupling = trace_coupling(model, torch.zeros(2, *model.input_spec.shape))
    scores = score_filters(model, "l1", coupling.layers)
    assert plan_filters(model, scores, 0.3) == plan_filters(model, scores, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="pass coupling="):
        plan_filters(model.backbone, scores, 0.3)
