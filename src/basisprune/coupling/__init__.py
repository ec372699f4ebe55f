"""Which channels must go together, which parameters carry them, and how to cut them."""

from basisprune.coupling.compensate import hand_over
from basisprune.coupling.cutting import check_keep, cut
from basisprune.coupling.find_groups import trace_coupling
from basisprune.coupling.units import Channels, unit_inputs, unit_outputs

__all__ = ["Channels", "check_keep", "cut", "hand_over", "trace_coupling", "unit_inputs", "unit_outputs"]
