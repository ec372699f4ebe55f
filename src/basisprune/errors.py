"""Everything basisprune raises on purpose.

    BasisPruneError
    ├── ConfigError          (ValueError)     settings that are wrong; all faults are listed at once
    ├── DataError            (ValueError)     images or labels that cannot be used; names the file
    ├── ModelError           (ValueError)     a network that cannot be taken as it is
    │   └── LayerError                        one layer of it; the message starts with its name
    ├── PlanError            (ValueError)     a plan or scores that do not fit the network
    │   └── TooMuchError                      a ratio that removes more than can go
    ├── CheckpointError      (ValueError)     a file of ours that is damaged or belongs to another run
    ├── BundleError          (ValueError)     a saved network that cannot be written, or trusted when read
    ├── TrainingError        (RuntimeError)   a training that cannot go on
    └── MissingExtraError    (ImportError)    an optional package is needed; the message names the extra

Each is also the matching builtin, so that code which knows nothing of basisprune can catch it. A message
says where, what was given, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class BasisPruneError(Exception):
    """The base of every error that basisprune raises on purpose."""


class ConfigError(BasisPruneError, ValueError):
    """Settings that are wrong; lists all their faults at once.

    >>> str(ConfigError.of("TrainConfig", ["epochs: 0 given, at least 1 is needed"]))
    'TrainConfig: epochs: 0 given, at least 1 is needed'
    """

    @classmethod
    def of(cls, where: str, faults: Iterable[str]) -> ConfigError:
        """One error that lists every fault found in `where`."""
        listed = list(faults)
        if len(listed) == 1:
            return cls(f"{where}: {listed[0]}")
        return cls("\n  - ".join([f"{where}: {len(listed)} faults", *listed]))


class DataError(BasisPruneError, ValueError):
    """Images or labels that cannot be used."""


class ModelError(BasisPruneError, ValueError):
    """A network that cannot be taken as it is."""


class LayerError(ModelError):
    """One layer that cannot be handled; the message starts with the layer's name.

    >>> str(LayerError("layer2.0.conv1", "rank 96 exceeds the maximum 64; pass rank<=64"))
    'layer2.0.conv1: rank 96 exceeds the maximum 64; pass rank<=64'
    """

    def __init__(self, layer: str, message: str) -> None:
        self.layer = layer
        super().__init__(f"{layer or '(root module)'}: {message}")


class PlanError(BasisPruneError, ValueError):
    """A plan or scores that do not fit the network."""


class TooMuchError(PlanError):
    """A pruning ratio that asks for more than can be removed; a smaller one may do."""


class CheckpointError(BasisPruneError, ValueError):
    """A file of ours that is damaged, or that belongs to another run."""


class BundleError(BasisPruneError, ValueError):
    """A saved network that cannot be written, or that is damaged or does not fit when it is read."""


class TrainingError(BasisPruneError, RuntimeError):
    """A training that cannot go on."""


class MissingExtraError(BasisPruneError, ImportError):
    """An optional package is missing.

    >>> str(MissingExtraError("mlflow", extra="mlflow"))
    "the package 'mlflow' is needed for this; install it with: pip install 'basisprune[mlflow]'"
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is needed for this; install it with: pip install 'basisprune[{extra}]'"
        )
