"""Which channels must go together, which parameters carry them, and how to cut them."""

from basisprune.coupling.cutting import check_keep, cut
from basisprune.coupling.trial import trace_coupling

__all__ = ["check_keep", "cut", "trace_coupling"]
