"""Laws of the values that travel between stages."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError, DataError, PlanError
from basisprune.types import (
    Axis,
    BasisPlan,
    Coupling,
    FilterPlan,
    Group,
    GroupPlan,
    InputSpec,
    LayerPlan,
    LayerScores,
    Scores,
    Size,
    dotted,
    read_json,
)

floats = st.floats(allow_nan=False, allow_infinity=False)
means = st.none() | st.lists(floats, max_size=4).map(tuple)
costs = st.none() | st.integers(0)
layer_scores = st.builds(
    LayerScores, st.lists(floats, max_size=4).map(tuple), st.integers(1, 4), means, parameters=costs, macs=costs
)
layer_plans = st.builds(LayerPlan, st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(0, 9), means)
options = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | floats | st.text(), max_size=3)
places = st.lists(st.integers(0, 9), max_size=4).map(tuple)
counts = st.integers(0, 99)
groups = st.builds(
    Group,
    st.text(),
    counts,
    st.dictionaries(st.text(), counts, max_size=2),
    st.lists(st.builds(Axis, st.text(), counts, places), max_size=2).map(tuple),
    st.lists(places, max_size=2).map(tuple),
    st.lists(st.builds(Size, st.text(), st.text(), st.none() | counts, counts, counts), max_size=2).map(tuple),
)
couplings = st.builds(
    Coupling,
    st.lists(groups, max_size=2).map(tuple),
    st.dictionaries(st.text(), st.text(), max_size=2),
    st.lists(st.text(), max_size=2).map(tuple),
)
filter_plans = st.builds(
    FilterPlan,
    st.dictionaries(st.text(), st.builds(GroupPlan, places, counts), max_size=2),
    couplings,
    st.dictionaries(st.text(), places, max_size=2),
    counts,
    floats,
    options,
)
specs = st.just(InputSpec((4, 6), (0.5,), (0.25,), "bicubic"))


@given(st.builds(Scores, st.text(), st.dictionaries(st.text(), layer_scores, max_size=3)))
def test_scores_survive_json(scores):
    assert Scores.from_json(scores.to_json()) == scores


@given(st.builds(BasisPlan, st.dictionaries(st.text(), layer_plans, max_size=3), floats, options))
def test_a_plan_survives_json(plan):
    assert BasisPlan.from_json(plan.to_json()) == plan


@given(couplings | filter_plans | specs)
def test_couplings_filter_plans_and_specs_survive_json(value):
    assert type(value).from_json(value.to_json()) == value


@given(filter_plans)
def test_plans_written_with_sorted_names_by_older_versions_can_still_be_read(plan):
    assert FilterPlan.from_json(json.dumps(dataclasses.asdict(plan), sort_keys=True)) == plan


@given(st.dictionaries(st.text(), layer_scores, min_size=2, max_size=4))
def test_layers_keep_their_order_in_json(layers):
    assert list(Scores.from_json(Scores("l1", layers).to_json()).layers) == list(layers)


def test_all_that_is_wrong_with_a_text_is_told_with_its_place():
    text = '{"method": 3, "layers": {"a": {"values": [1.0, "x"], "rank": 2}}}'
    with pytest.raises(PlanError, match=r"^Scores: the JSON does not hold one: 3 faults") as caught:
        Scores.from_json(text)
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == [
        "method",
        "layers.a.values.1",
        "layers.a.rank",
    ]


def test_numbers_in_quotes_are_no_numbers():
    with pytest.raises(PlanError, match="pruning_ratio"):
        BasisPlan.from_json('{"layers": {}, "pruning_ratio": "0.5"}')


def test_a_spec_that_cannot_be_is_refused_when_read():
    with pytest.raises(PlanError, match="one of each per channel"):
        InputSpec.from_json('{"size": [4, 4], "mean": [0.5], "std": []}')


@pytest.mark.parametrize("kind", [Scores, BasisPlan, FilterPlan, Coupling, InputSpec])
@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"text"', "{}", '{"layers": 3, "method": "x", "pruning_ratio": 1, "options": {}}',
     '{"layers": {"a": {}}, "method": "x", "pruning_ratio": 1, "options": {}}',
     '{"layers": {"a": {"keep": 1, "rank": 2, "values": 3}}, "method": "x", "pruning_ratio": 1, "options": {}}',
     '{"layers": {"a": 4}, "method": "x", "pruning_ratio": 1, "options": {}}'],
)  # fmt: skip
def test_text_that_holds_no_such_value_is_refused(kind, text):
    with pytest.raises(PlanError, match=rf"^{kind.__name__}: the JSON does not hold one"):
        kind.from_json(text)


def test_scores_written_before_costs_were_known_can_still_be_read():
    text = '{"layers": {"a": {"groups": 1, "means": null, "values": [1.0]}}, "method": "taylor"}'
    assert Scores.from_json(text) == Scores("taylor", {"a": LayerScores((1.0,), parameters=None, macs=None)})


def test_sequences_become_tuples_so_that_values_compare():
    assert LayerScores([1.0, 2.0], 1, [0.0, 1.0]) == LayerScores((1.0, 2.0), 1, (0.0, 1.0))
    assert LayerPlan([0, 2], 3) == LayerPlan((0, 2), 3)


def test_a_plan_counts_what_goes():
    plan = BasisPlan({"a": LayerPlan((0,), 4), "b": LayerPlan((0, 1), 2)}, 0.5)
    assert (plan.removed, plan.total, plan.layers["a"].removed) == (3, 6, 3)


def test_values_are_frozen():
    for value, name in [
        (InputSpec((4, 4), (0.0,), (1.0,)), "size"),
        (LayerScores((1.0,)), "values"),
        (Scores("taylor", {}), "method"),
        (LayerPlan((0,), 1), "keep"),
        (BasisPlan({}, 0.0), "layers"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_an_input_spec_tells_the_shape_of_an_image():
    spec = InputSpec((12, 16), mean=(0.5,), std=(0.5,))
    assert (spec.channels, spec.shape, spec.interpolation) == (1, (1, 12, 16), "bilinear")


def test_an_input_that_cannot_be_is_refused_with_all_its_faults():
    with pytest.raises(ConfigError, match="3 faults"):
        InputSpec(size=(0, 8), mean=(0.5, 0.5), std=(0.0,))


def test_dotted_names_lead_to_every_value_and_empty_mappings_are_values():
    nested = {"a": {"b": {"c": 1}, "d": {}}, "e": [2, {"f": 3}]}
    assert dict(dotted(nested)) == {"a.b.c": 1, "a.d": {}, "e": [2, {"f": 3}]}


def test_of_each_list_the_first_fault_is_told():
    with pytest.raises(DataError) as caught:
        read_json(dict[str, list[int]], '{"a": ["x", "y"], "b": [1, "z", "z"]}', DataError, "here")
    assert [fault.split(":")[0] for fault in caught.value.faults][:1] == ["a.0"]
    assert len(caught.value.faults) <= 2
    with pytest.raises(PlanError) as plan:
        InputSpec.from_json('{"size": "x", "mean": "y"}')
    assert len(plan.value.faults) == 3


def test_a_mapping_of_very_many_names_is_refused_before_it_is_read():
    text = "{" + ",".join('"a":0' for _ in range(1_000_001)) + "}"
    for each in (text, text.encode()):
        with pytest.raises(DataError, match="1,000,001 names"):
            read_json(dict[str, int], each, DataError)


def test_what_is_wrong_in_a_long_list_takes_no_memory():
    tracemalloc.start()
    try:
        with pytest.raises(PlanError):
            InputSpec.from_json(b'{"size": [' + b'"",' * 500_000 + b"0]}")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
