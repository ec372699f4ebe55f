"""Laws of the text tables."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from networks import NETWORKS
from summaries import summary
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.costs import measure
from basisprune.method.states import Pruned, Stage
from basisprune.pruning import prune_basis
from basisprune.report import framework_table, layer_table
from basisprune.report.text import csv_table, runtime_table, text_table
from basisprune.types import BasisPlan, LayerPlan


def test_the_layer_table_reads_as_expected():
    model, _ = NETWORKS["depthwise"]()
    model = prune_basis(decompose(model), BasisPlan({"9": LayerPlan((0, 1, 2), 12)}, 0.5))
    assert layer_table(measure(model, (3, 12, 12))).splitlines() == [
        "layer               kind            rank  parameters  multiply-adds  note",
        "------------------  -------------  -----  ----------  -------------  --------------------------------",
        "0                   conv 3x3         8/8         296         40,320",
        "3                   depthwise 3x3    8/8          72         10,368  depthwise: a split gains nothing",
        "6                   depthwise 3x3  16/16         144         20,736  depthwise: a split gains nothing",
        "9                   conv 1x1        3/12          87         12,096",
        "13                  linear           4/4          52             48  not decomposed",
        "(norms and others)                                88",
        "total                                            739         83,568  input (3, 12, 12)",
    ]


def test_runtimes_are_listed_with_what_was_measured():
    rows = summary().runtimes
    unknown = replace(rows[0], accuracy=None)
    assert runtime_table([unknown, rows[1]]).splitlines() == [
        "runtime   file          size  difference  accuracy  one image",
        "--------  ---------  -------  ----------  --------  ---------",
        "OpenVINO  model.xml  8.05 MB       2e-06         -    3.20 ms",
        "PyTorch   -          8.05 MB           -     97.1%    8.10 ms",
    ]


def test_a_root_layer_has_a_name_too():
    assert "(root)" in layer_table(measure(nn.Conv2d(3, 4, 1), 4))


def test_frameworks_are_compared_with_the_first():
    stages = Stage("dense", 0.9, 2_000_000, 10, 80_000_000), Stage("pruned", 0.875, 500_000, 5, 60_000_000)
    results = [
        Pruned("baseline", nn.ReLU(), stages[:1], (), test_accuracy=0.8),
        Pruned("basis", nn.ReLU(), stages, (), test_accuracy=None),
    ]
    assert framework_table(results).splitlines() == [
        "framework  accuracy  parameters  removed  multiply-adds  removed",
        "---------  --------  ----------  -------  -------------  -------",
        "baseline      80.0%      2.000M     0.0%         80.00M     0.0%",
        "basis         87.5%      0.500M    75.0%         60.00M    25.0%",
    ]


def test_a_table_without_rows_is_its_header():
    assert text_table(("a", "bb"), [], left={0}) == "a  bb\n-  --"


@pytest.mark.parametrize("network", NETWORKS)
def test_the_table_names_every_layer(network):
    model, x = NETWORKS[network]()
    report = measure(decompose(model), tuple(x.shape[1:]))
    lines = layer_table(report).splitlines()
    for layer, line in zip(report.layers, [each for each in lines[2:-1] if not each.startswith("(norms")], strict=True):
        assert line.startswith(layer.name)
        assert f"{layer.parameters:,}" in line
        assert f"{layer.macs:,}" in line


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"])
def test_no_text_in_csv_is_a_formula(text):
    (_, (cell, number)) = csv.reader(io.StringIO(csv_table(("a", "b"), [(text, -0.5)])))
    assert (cell[0], number) == ("'", "-0.5")


@pytest.mark.parametrize("text", ["red", "-0.25", "+1", "-0.1 0.2", "1e-3", "", "a=b", "caf\u00e9, \u8d64"])
def test_other_text_in_csv_stays_as_it_is(text):
    assert list(csv.reader(io.StringIO(csv_table(("a",), [(text,)]))))[1:] == [[text]] if text else True
