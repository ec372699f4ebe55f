"""Bad settings of a search are refused."""

from __future__ import annotations

import pytest

from basisprune.errors import ConfigError
from basisprune.search import SearchConfig


def test_nothing_is_not_a_way_to_start():
    with pytest.raises(ConfigError, match="warm_start: None given, allowed are True and False"):
        SearchConfig(warm_start=None)


def test_faults_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="5 faults"):
        SearchConfig(framework="tailor", step=1, tolerance=0, smallest=1, give_up_margin=0)
