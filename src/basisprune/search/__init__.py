"""The smallest model within a budget: what is tried, what is tried next, and how candidates are judged and weighed."""

from basisprune.search.config import SearchConfig
from basisprune.search.search import SAFER, Search

__all__ = ["SAFER", "Search", "SearchConfig"]
