"""How far a search goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from basisprune.errors import ConfigError
from basisprune.frameworks import FrameworkName


@dataclass(frozen=True)
class SearchConfig:
    """What is pruned and how far the search goes.

    `framework` prunes filters by l1, taylor, hrank or loss, the basis, or both (default: the recipe's). Where scores
    are in units of the loss, they say which share to try first, and with the accuracies of what was tried which one
    next; otherwise the share kept is multiplied by `step` until a candidate fails, then narrowed down. The search ends
    when the share of basis vectors or filters that failed, or that is expected to fail, is within `tolerance` of the
    share that passed (their product, where both shrink together), or at `smallest`; with scores in units of the loss,
    also when a network that failed is within `tolerance` of the size of the one that passed. A candidate more than
    `give_up_margin` below the required accuracy after a fifth of its epochs is given up. With `warm_start`, a candidate
    is pruned from the last one that passed, otherwise in one step from the unpruned network, as in the paper. With
    `tune_fully`, all candidates are tuned for all epochs, also as in the paper. `polish` tunes the chosen network
    again, for all epochs.
    """

    framework: FrameworkName | None = None
    step: float = 0.5
    tolerance: float = 0.2
    smallest: float = 0.02
    give_up_margin: float = 0.1
    warm_start: bool = True
    tune_fully: bool = False
    polish: bool = True

    def __post_init__(self) -> None:
        faults = []
        allowed = [name for name in get_args(FrameworkName) if name != "baseline"]
        if self.framework is not None and self.framework not in allowed:
            faults.append(f"framework: {self.framework!r} given; allowed are {', '.join(allowed)}")
        faults += [
            f"{name}: {getattr(self, name)!r} given; allowed are True and False"
            for name in ("warm_start", "tune_fully", "polish")
            if not isinstance(getattr(self, name), bool)
        ]
        faults += [
            f"{name}: {getattr(self, name)} given; 0 < {name} < 1 is needed"
            for name in ("step", "tolerance", "smallest", "give_up_margin")
            if not 0 < getattr(self, name) < 1
        ]
        if faults:
            raise ConfigError.of("SearchConfig", faults)
