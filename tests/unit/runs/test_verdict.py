"""Laws of the verdict: it says of every ONNX file what is not promised of it, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from summaries import summary

from basisprune.budget.certify import Certificate, Test
from basisprune.results import DeliveredFile
from basisprune.runs.verdict import promise_of, with_promises

FOUND = summary(files={}, runtimes=[], headline="90 % removed, certified: a loss of at most 1 point")
CERTIFIED = Certificate("certified", 0.95, "accuracy", 1000, "")
FILES = ("model.onnx", "model.int8.onnx")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("passed", [True, False, None])
def test_the_verdict_tells_what_is_promised_of_an_onnx_file(passed, name):
    test = None if passed is None else Test(3, "file", 0.95, 0.9, 0.01, 0.01, 1, 1, passed)
    files = {name: DeliveredFile(1, "a file", test=test, promise="certified" if passed else "estimated")}
    found = replace(FOUND, files=files, certificate=CERTIFIED, require_certified=True)
    said = {True: "", False: f" {name} is estimated, not certified: its test failed."}
    told = with_promises(found)
    assert told.verdict == FOUND.verdict + said.get(passed, f" {name} is estimated, not certified.")
    assert told.headline == FOUND.headline + ("" if passed else f"; {name} is not")
    assert told.fulfilled == bool(passed)
    assert with_promises(told) == told


def test_both_files_are_told_of_and_a_fault_even_where_all_is_estimated():
    files = {name: DeliveredFile(1, "a file", promise="estimated", fault="it is bad") for name in FILES}
    for certificate in (CERTIFIED, replace(CERTIFIED, status="estimated", reason="so it is")):
        told = with_promises(replace(FOUND, files=files, certificate=certificate))
        assert all(f"Warning: {name} is not within the budget: it is bad." in told.verdict for name in FILES)
        assert (told.headline == FOUND.headline) == (not certificate.certified)
        assert with_promises(told) == told


def test_a_verdict_that_is_the_headline_stays_so():
    files = {"model.int8.onnx": DeliveredFile(1, "a file", promise="estimated")}
    told = with_promises(replace(FOUND, headline=FOUND.verdict, files=files, certificate=CERTIFIED))
    assert told.headline == told.verdict != FOUND.verdict


def test_nothing_is_promised_without_a_certificate_of_the_unpruned_network_or_of_other_runtimes():
    assert promise_of("model.onnx", replace(FOUND, certificate=None)) is None
    found = replace(FOUND, certificate=CERTIFIED)
    assert promise_of("model.pt2", found) is None
    assert [promise_of("model.onnx", found, certified=each) for each in (True, False)] == ["certified", "estimated"]
    rows = tuple(replace(row, chosen=index == 0) for index, row in enumerate(found.candidates))
    unpruned = replace(found, candidates=rows)
    assert [promise_of(name, unpruned) for name in FILES] == [None, "estimated"]
