"""Which channels must go together, which parameters carry them, and how to cut them."""

from basisprune.coupling.cutting import Channels, check_keep, cut, hand_over, unit_inputs, unit_outputs
from basisprune.coupling.find_groups import trace_coupling

__all__ = ["Channels", "check_keep", "cut", "hand_over", "trace_coupling", "unit_inputs", "unit_outputs"]
