"""The rules of the trace: all of them are known to it, each once."""

from __future__ import annotations

from basisprune.coupling.combining import COMBINING
from basisprune.coupling.labelled_run import RULES
from basisprune.coupling.products import PRODUCTS
from basisprune.coupling.rearranging import REARRANGING


def test_every_rule_is_known_and_no_operation_has_two():
    assert len(RULES) == len(COMBINING) + len(REARRANGING) + len(PRODUCTS)
    assert {"add", "relu"}.isdisjoint(RULES)  # element-wise by torch's own tags
    assert {"view", "cat", "convolution", "mean"} <= RULES.keys()
