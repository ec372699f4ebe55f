"""Laws of what the paper's cells would take: the docs say what the record says, and the record what the file does."""

from __future__ import annotations

import json

import pytest
from paper_hours import BEGIN, END, PAGE, RESULT, TFLOPS, cell, hours, table

from basisprune.sweeps.table import Cell

RECORD = json.loads(RESULT.read_text())


def test_the_docs_have_the_table_of_the_record():
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table(RECORD["cells"]) + "\n"


def test_the_record_has_63_cells_and_adds_them_up():
    assert len(RECORD["cells"]) == 63
    total = sum(each["operations"] for each in RECORD["cells"])
    assert {str(each): pytest.approx(hours(total, each), abs=0.1) for each in TFLOPS} == RECORD["gpu_hours"]


def test_a_baseline_is_one_training():
    options = {"recipe": "paper:cifar10", "size": 128, "max_drop": 0.01}
    found = cell(Cell("vgg16", "cifar10", "baseline", 0), options, (1000, 1200))
    assert found["operations"] == 1000 * 45_000 * 100 * 3 * 2
    assert (found["candidates"], found["decomposes"]) == (0, False)


def test_a_basis_adds_its_own_training_and_each_candidate_costs_less_than_the_unpruned():
    options = {"recipe": "paper:cifar10", "size": 128, "max_drop": 0.01, "framework": "basis"}
    found = cell(Cell("vgg16", "cifar10", "basis", 0), options, (1000, 1200))
    steps = found["operations"] / (45_000 * 100 * 3 * 2)
    assert steps == pytest.approx(1000 + 1200 + found["candidates"] * 1000 * (1 - 0.362 / 2))
