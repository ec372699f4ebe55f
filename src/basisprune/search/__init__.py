"""The smallest model within a budget: what is tried, what is tried next, and how candidates are judged and weighed."""

from basisprune.search.search import SAFER, Search
from basisprune.search.stepping import SearchConfig

__all__ = ["SAFER", "Search", "SearchConfig"]
