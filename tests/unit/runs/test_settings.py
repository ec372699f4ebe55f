"""Laws of a run's settings: each option is declared once, and what is noted brings all settings back."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import get_args

import pytest
import yaml
from commands import invoke
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.budget import Budget, Ratios
from basisprune.budget.goal import AMOUNT, FRACTION, LEVEL, TIME
from basisprune.errors import ConfigError
from basisprune.recipes import RECIPES
from basisprune.runs.settings import (
    BUDGETS,
    OBJECTS,
    OPTIONS,
    RATIOS,
    TRAIN_OPTIONS,
    Options,
    Panel,
    RunConfig,
    configure,
    names_in,
)
from basisprune.search import SearchConfig
from basisprune.transfer.hints import Hints

fractions = st.floats(0, 0.99)
goals = (
    st.builds(lambda value: {"max_drop": value}, fractions)
    | st.builds(lambda value: {"min_accuracy": value}, fractions)
    | st.builds(lambda value: {"target_params": value}, st.integers(1, 10**9))
    | st.builds(lambda value: {"target_latency": value}, st.floats(0.001, 1e6))
    | st.builds(lambda one, two: {"basis_ratio": one, "filter_ratio": two}, fractions, fractions)
    | st.just({})
)
others = st.fixed_dictionaries(
    {},
    optional={
        "recipe": st.sampled_from(["quick", "paper", "paper:mnist"]) | st.just({"train": {"min_lr": 1e-5}}),
        "epochs": st.integers(1, 9),
        "search": st.fixed_dictionaries({}, optional={"tolerance": st.floats(0.01, 0.9), "polish": st.booleans()}),
        "size": st.integers(1, 512),
        "pretrained": st.booleans(),
        "val_fraction": fractions,
        "confirm_fraction": fractions,
        "groups": st.just("groups.csv"),
        "strict": st.booleans(),
        "limit": st.integers(1, 99),
        "onnx": st.booleans(),
        "int8": st.booleans(),
        "seed": st.integers(0, 99),
    },
)


@settings(deadline=None)
@given(goals, others)
def test_what_is_noted_brings_all_settings_back_from_yaml(goal, options):
    config = configure({**goal, **options})
    noted = config.to_dict()
    assert set(noted) <= set(OPTIONS)
    again = configure(yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(noted)))))
    assert again == replace(config, **{name: noted.get(name) for name in (*BUDGETS, *RATIOS)})
    assert (again.goal, again.to_dict()) == (config.goal, noted)


def test_nothing_given_is_one_per_cent_by_the_quick_recipe():
    assert configure({}) == RunConfig()
    assert configure({}).goal == Budget(max_drop=0.01)
    assert configure(dict.fromkeys(OPTIONS)) == RunConfig()  # None is nothing given


def test_every_setting_is_taken_where_it_belongs():
    config = configure({"epochs": 3, "seed": 5, "framework": "l1", "search": {"step": 0.3}, "size": 9, "limit": 2})
    for training in (config.recipe.train, config.recipe.finetune):
        assert (training.epochs, training.seed) == (3, 5)
    assert config.seed == 5
    assert config.search == SearchConfig(framework="l1", step=0.3)
    assert (config.size, config.limit) == (9, 2)
    recipe = replace(RECIPES["paper"], score_batch=7)
    assert configure({"recipe": recipe}).recipe.score_batch == 7


@pytest.mark.parametrize("name", BUDGETS)
def test_every_budget_has_a_setting_of_its_name(name):
    value = 0.5 if name in ("max_drop", "min_accuracy", "target_latency") else 500
    assert configure({name: value}).goal == Budget(**{name: value})
    assert {each.name for each in fields(Budget)} == set(BUDGETS)


def test_one_ratio_leaves_the_other_at_nothing():
    assert configure({"basis_ratio": 0.5}).goal == Ratios(0.5, 0.0)
    assert configure({"filter_ratio": 0.5}).goal == Ratios(0.0, 0.5)


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"max_dorp": 0.1}, ["max_dorp: no such setting. Did you mean 'max_drop'?"]),
        ({"max_drop": "1%", "epochs": 2.5}, ["max_drop: '1%' given; a number", "epochs: 2.5 given; a whole number"]),
        ({"max_drop": 0.1, "target_params": 5}, ["max_drop, target_params given; pass one budget, or the ratios"]),
        ({"max_drop": 0.1, "basis_ratio": 0.5}, ["max_drop, basis_ratio given; pass one budget, or the ratios"]),
        ({"basis_ratio": 1.0, "filter_ratio": -0.1}, ["basis_ratio: 1.0 given", "filter_ratio: -0.1 given"]),
        ({"max_drop": 2.0, "epochs": 0}, ["epochs: 0 given", "max_drop: 2.0 given"]),
        ({"recipe": "quik"}, ["recipe: 'quik' given; allowed are paper, quick, best, paper:cifar10, "]),
        ({"recipe": {"trian": {}}}, ["recipe: trian: no such setting. Did you mean 'train'?"]),
        ({"recipe": {"train": {"epochs": 0}}}, ["recipe: train.epochs: 0 given"]),
        ({"recipe": 3}, ["recipe: 3 given; a name is needed"]),
        ({"recipe": {"base": 3}}, ["recipe: base: 3 given; a name is needed"]),
        ({"search": {"step": 2, "framework": "tailor"}}, ["search: framework: 'tailor' given"]),
        ({"search": 3}, ["search: 3 given; a mapping of settings is needed"]),
        ({"framework": "taylr"}, ["framework: 'taylr' given; allowed are"]),
        ({"framework": "baseline"}, ["framework: 'baseline' given, allowed are l1"]),
        (
            {"recipe": "quik", "search": {"steps": 1}, "max_drop": 1.0},
            ["recipe: 'quik'", "search: steps: no such setting", "max_drop: 1.0 given"],
        ),
        (
            {"framework": "l1", "basis_ratio": 0.5, "filter_ratio": 0.1},
            ["basis_ratio: 0.5 given, but the framework l1 does not prune that"],
        ),
        ({"framework": "basis", "filter_ratio": 0.1}, ["filter_ratio: 0.1 given, but the framework basis"]),
        ({"optimize": "size"}, ["optimize: 'size' given"]),
        ({"optimize": "macs", "device": "d.json"}, ["device: given with optimize 'macs'; its times are for 'latency'"]),
        (
            {"optimize": "latency", "recipe": "paper"},
            ["optimize: 'latency' given; it needs scores in units of the loss"],
        ),
        ({"optimize": "macs", "framework": "basis+taylor"}, ["optimize: 'macs' given; it needs scores in units of"]),
        ({"optimize": "macs", "basis_ratio": 0.5}, ["optimize: 'macs' given; with basis_ratio and filter_ratio"]),
    ],
)
def test_all_faults_are_told_at_once_by_the_names_of_the_settings(options, faults):
    with pytest.raises(ConfigError) as error:
        configure(options)
    assert len(error.value.faults) == len(faults)
    for told, expected in zip(error.value.faults, faults, strict=True):
        assert told.startswith(expected)


def test_the_ratios_are_those_of_the_goal():
    assert RATIOS == ("basis_ratio", "filter_ratio")
    assert {name: configure({"basis_ratio": 0.3, "filter_ratio": 0.2}).to_dict()[name] for name in RATIOS} == {
        "basis_ratio": 0.3,
        "filter_ratio": 0.2,
    }


def test_a_budget_of_time_is_planned_by_time_where_scores_and_packages_allow_it(monkeypatch):
    assert configure({"target_latency": 5.0}).optimize == "latency"
    assert configure({"target_latency": 5.0, "optimize": "params"}).optimize == "params"
    assert configure({"target_latency": 5.0, "recipe": "paper"}).optimize == "params"
    assert configure({"device": "device.json"}).optimize == "latency"
    assert configure({}).optimize == configure({"target_macs": 10**6}).optimize == "params"
    monkeypatch.setattr("basisprune.deploy.export.onnx.has_onnx", lambda: False)
    assert configure({"target_latency": 5.0}).optimize == "params"
    assert configure({"target_latency": 5.0, "device": "device.json"}).optimize == "latency"
    with pytest.raises(ConfigError, match="needs onnxruntime"):
        configure({"optimize": "latency"})


def test_what_a_run_starts_from_is_noted_where_it_is_set():
    assert not {"weights", "mean"} & configure({}).to_dict().keys()
    start = {"keep_head": True, "weights": "my.ckpt", "mean": [0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
    config = configure(start)
    assert start.items() <= config.to_dict().items()
    assert configure(config.to_dict()) == replace(config, max_drop=0.01)
    assert config.is_trained
    assert not configure({**start, "tune_first": True}).is_trained
    assert config.hints(32) == Hints((32, 32), (0.5,), (0.2, 0.3, 0.4), "bicubic")


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"weights_key": "ema"}, "weights_key: 'ema' given without weights"),
        ({"tune_first": True}, "tune_first: given without keep_head"),
        ({"mean": [0.5, 0.5], "std": [0.2] * 3}, "std: 3 numbers given"),
        ({"std": [0.0] * 3}, "all must be positive"),
        ({"mean": 0.5}, "mean: 0.5 given"),
        ({"interpolation": "area"}, "interpolation: 'area' given; allowed are bilinear, bicubic, nearest"),
    ],
)
def test_what_a_run_cannot_start_from_is_refused(start, message):
    with pytest.raises(ConfigError, match=message):
        configure({"keep_head": "tune_first" not in start, **start})


def test_type_checkers_see_the_declared_names_and_types():
    assert list(OPTIONS) == list(Options.__annotations__)
    declared = {each.name: each.type for each in fields(RunConfig)}
    for name in OPTIONS.keys() - {*OBJECTS, "optimize"}:
        assert Options.__annotations__[name].__forward_arg__ == declared[name]


@pytest.mark.parametrize(("command", "names"), [("compress", OPTIONS), ("train", TRAIN_OPTIONS)])
def test_every_option_is_one_of_the_command_line_in_its_group(command, names):
    shown = invoke(command, "--help").output
    groups = {part.split(":")[0]: part for part in shown.split("\n\n")}
    for name in names:
        each = OPTIONS[name]
        assert each.hidden or f"--{name.replace('_', '-')}" in groups[each.panel]
        assert each.hidden or re.sub(r"\s+", "", each.help) in re.sub(r"\s+", "", shown)


def test_the_options_are_in_the_order_of_their_groups():
    assert tuple(OPTIONS) == names_in(*get_args(Panel))


def test_the_budget_and_the_ratios_are_options_of_a_number_with_a_unit():
    assert all(OPTIONS[name].unit is not None for name in (*BUDGETS, *RATIOS))


def test_a_whole_number_stays_one():
    assert isinstance(AMOUNT.parse("1.5M"), int)
    assert AMOUNT.parse(250_000) == 250_000


@pytest.mark.parametrize("text", ["", "1x", "%", "-1%", "1e999", None, "1 2"])
def test_what_is_no_number_is_refused_with_examples(text):
    for unit in (FRACTION, AMOUNT, TIME):
        with pytest.raises(ConfigError, match="given; expected a"):
            unit.parse(text)


def test_a_least_value_may_be_negative_because_errors_are_negated():
    assert LEVEL.parse("-3.2") == -3.2
    assert OPTIONS["min_accuracy"].unit is LEVEL
    with pytest.raises(ConfigError, match="expected a percentage such as 90%"):
        LEVEL.parse("--3")
