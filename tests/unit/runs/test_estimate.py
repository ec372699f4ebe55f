"""Laws of what a search is expected to take."""

from __future__ import annotations

from basisprune.runs.estimate import Estimate, expected_candidates
from basisprune.search import Budget, SearchConfig


def test_more_is_expected_of_two_kinds_of_pruning_and_of_a_finer_search():
    accuracy = Budget(max_drop=0.01)
    one, two = (expected_candidates(SearchConfig(framework=name), accuracy) for name in ("basis", "basis+l1"))
    assert one < two < expected_candidates(SearchConfig(framework="basis+l1", tolerance=0.01), accuracy)
    assert expected_candidates(SearchConfig(framework="taylor"), None) == 1
    assert Estimate(reference=10, candidates=3, candidate=5).total == 25
