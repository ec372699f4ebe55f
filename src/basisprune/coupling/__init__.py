"""Which channels must go together, which parameters carry them, and how to cut them."""

from basisprune.coupling.cutting import check_keep, cut
from basisprune.coupling.groups import OUTPUT, Axis, Coupling, Group, Size
from basisprune.coupling.trial import trace_coupling

__all__ = ["OUTPUT", "Axis", "Coupling", "Group", "Size", "check_keep", "cut", "trace_coupling"]
