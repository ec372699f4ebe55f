"""Laws of settings as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.recipes import RECIPES
from basisprune.runs.parsing import (
    changed,
    differences,
    faults_of,
    parse_yaml,
    read_settings,
    recipe_of,
    search_of,
    yaml_of,
)
from basisprune.search import SearchConfig


@pytest.mark.parametrize("name", ["quick", "paper", "paper:mnist"])
def test_a_recipe_survives_yaml(name):
    recipe = recipe_of(name)
    assert recipe_of(yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(asdict(recipe)))))) == recipe


def test_the_settings_of_a_search_survive_yaml():
    search = SearchConfig(framework="l1", tolerance=0.3)
    assert search_of(yaml.safe_load(yaml.safe_dump(asdict(search)))) == search


def test_only_what_is_given_differs_from_the_base():
    recipe = recipe_of({"base": "paper", "train": {"lr": 1e-3, "augmentation": {"flip": True}}})
    assert recipe.train.lr == 1e-3
    assert recipe.train.augmentation.flip
    assert recipe.finetune == RECIPES["paper"].finetune
    assert recipe.train.augmentation.shift == RECIPES["paper"].train.augmentation.shift


def test_all_faults_are_listed_at_once_with_the_nearest_names():
    given = {"basis": "output", "train": {"epoch": 1, "batch_size": 2.5, "augmentation": {"flip": 1}}, "plan": 3}
    with pytest.raises(ConfigError) as error:
        recipe_of(given)
    for part in ("5 faults", "'outputs'", "'epochs'", "train.batch_size: 2.5", "train.augmentation.flip", "plan: 3"):
        assert part in str(error.value)


def test_values_out_of_range_are_told_where_they_are():
    with pytest.raises(ConfigError, match=r"train\.epochs: 0 given, at least 1"):
        recipe_of({"train": {"epochs": 0}})
    with pytest.raises(ConfigError, match=r"tolerance: 2\.0 given"):
        search_of({"tolerance": 2})
    with pytest.raises(ConfigError, match="base: 3 given"):
        recipe_of({"base": 3})


def test_differences_name_what_is_new_and_what_is_gone():
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": None}) == {"a": "1 -> not set", "c": "not set -> None"}
    assert differences({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) == {}


def test_what_is_meant_is_taken_as_it_is():
    recipe, search = RECIPES["paper"], SearchConfig(framework="l1")
    assert recipe_of(recipe) is recipe
    assert search_of(search) is search
    assert search_of(None) == search_of({}) == SearchConfig()
    assert recipe_of({}) == RECIPES["quick"]


def test_a_number_is_a_number_however_yaml_writes_it(tmp_path):
    (tmp_path / "a.yaml").write_text("a: 1e-3\nb: -2E+4\nc: 1.5e3\nd: 3\ne: 1e\nf: e3\n")
    assert read_settings(tmp_path / "a.yaml") == {"a": 0.001, "b": -20000.0, "c": 1500.0, "d": 3, "e": "1e", "f": "e3"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a list", "list found"),
        (b"just text", "str found"),
        (b"3: numbers are no names", "a name is needed here"),
        (b"a: [", "not valid YAML"),
        (b"a: \xff", "not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(content, said, tmp_path):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_settings(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        read_settings(tmp_path / "nowhere.yaml")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LAUGHS + "epochs: *i", "holds more than 10,000 values"),
        ("recipe: &a {train: *a}", "nested more than 50 levels deep"),
        ("epochs: " + "[" * 5000, "not valid YAML"),
        ("epochs: " + "9" * 5000, "not valid YAML"),
        ("epochs: 1" + "0" * 30, r"line 1: a number beyond 1e\+18 given"),
        ("recipe: {train: {weight_decay: .nan, lr: -.inf}}", "line 1: nan given; a finite number"),
        ("epochs: !!set {a}", "tag .* not allowed"),
        ("model: !!binary aGk=", "tag .* not allowed"),
        ("model: !<tag:yaml.org,2002:python/name:os.system> x", "tag .* not allowed"),
        ("? [a]\n: b", "not valid YAML"),
        ("<<: 5", "merge keys are not allowed"),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}", "merge keys are not allowed"),
        ("".join(f"k{index}: 1\n" for index in range(100_000)), "holds more than 10,000 values"),
        ("a: " + "[" * 500_000, "nested more than 50 levels deep"),
        ("- " * 500_000, "nested more than 50 levels deep"),
        ("{" * 500_000, "nested more than 50 levels deep"),
        ("? " * 500_000, "nested more than 50 levels deep"),
        ("epochs: 1e" + "9" * 5000, "a number of 5,002 digits"),
        ("epochs: ." + "9" * 500_000, "a number of 500,001 digits"),
        ("a: 1\n---\na: 2", "another document"),
        ("model: " + "x" * 20_000, "line 1: a text of 20,000 letters"),
        ('model: "\\UFFFFFFFF"', "not valid YAML"),
        ('model: "\\ud800"', "line 1: .* is not Unicode"),
        ("a: " + "x" * (1 << 20), "at most 1,048,576 are read"),
        ("epochs: 1\nseed: 2\nepochs: 2", "'epochs' is given twice"),
        ("recipe: {train: {lr: 1, lr: 2}}", "'lr' is given twice"),
        ("5", "int found"),
        ("true", "bool found"),
    ],
)  # fmt: skip
def test_settings_beyond_reason_are_refused_before_they_take_memory(content, said, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_settings(tmp_path / "bad.yaml")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("text", ["1" + ":1" * 4000, "2020-01-01", "1:30", "010", "0x10", "=", "Infinity"])
def test_text_that_older_yaml_takes_for_numbers_and_dates_is_text(text):
    assert parse_yaml(f"a: {text}") == {"a": text}


FINITE = st.floats(allow_nan=False, allow_infinity=False)  # others are refused, and no setting allows them
PLAIN = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | FINITE | st.text()
ODD = ("08", "010", "1e3", "1.5e3", ".5", "1_0", "no", "~", "<<", "1:30", "2020-01-01", "=", "a: b", "&a", "")


@given(
    st.recursive(
        PLAIN | st.sampled_from(ODD),
        lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text() | st.sampled_from(ODD), part, max_size=4),
        max_leaves=20,
    )
)
def test_what_a_run_writes_down_is_read_as_it_was(value):
    assert parse_yaml(yaml_of({"a": value})) == {"a": value}


def test_settings_are_not_read_from_what_never_ends():
    with pytest.raises(ConfigError, match="it is a device, no file"):
        read_settings("/dev/zero")


def test_parts_of_a_file_may_have_names(tmp_path):
    (tmp_path / "a.yaml").write_text("recipe: {train: &t {epochs: 3}, finetune: *t}\n")
    assert read_settings(tmp_path / "a.yaml")["recipe"] == {"train": {"epochs": 3}, "finetune": {"epochs": 3}}


def test_an_empty_file_sets_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_settings(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (True, int, "a whole number"),
        ("3", int, "a whole number"),
        (3.5, int, "a whole number"),
        ("x", float, "a number"),
        (1, bool, "true or false"),
        (3, str, "a string"),
        ([1], float, "a number"),
        ("outptus", Literal["weights", "outputs"] | None, "allowed are weights, outputs. Did you mean 'outputs'?"),
        (object(), int, "only strings, numbers"),
    ],
)
def test_no_value_is_taken_for_another_kind(value, kind, said):
    (fault,) = faults_of(value, kind, "name")
    assert fault.startswith("name: ")
    assert said in fault


@pytest.mark.parametrize(("value", "kind"), [(3, float), (3, int | None), (None, int | None), ("a", Literal["a", "b"])])
def test_a_value_of_its_kind_has_no_fault(value, kind):
    assert faults_of(value, kind, "name") == []


def test_the_base_is_not_changed():
    base = SearchConfig()
    assert changed(base, {"tolerance": 0.5}, "search") == SearchConfig(tolerance=0.5)
    assert base == SearchConfig()
    with pytest.raises(ConfigError, match="search: 3 given; a mapping of settings is needed"):
        changed(base, 3, "search")
